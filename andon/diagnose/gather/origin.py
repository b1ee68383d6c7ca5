"""Where it began, what the detectors said, and whether it was there before."""

from andon.diagnose.fact import Fact, step_words
from andon.diagnose.meaning import MEANING
from andon.diagnose.record import Record, Seen
from andon.wire_values import fold_ranks

_NONFINITE = ("nonfinite", "nonfinite_state", "nonfinite_skipped")
_CAME_BACK = {
    "same_data": "the same samples failed again",
    "same_step": "it came back at the same step",
    "other_step": "it came back at another step with other data",
    "other_nodes": "it came back on other nodes",
    "same_node": "it came back on the same node",
}


def facts(record: Record) -> list[Fact]:
    """Return what the first-bad cell, the findings and earlier incidents say."""
    return [*_origin(record), *_findings(record), *_again(record)]


def _origin(record: Record) -> list[Fact]:
    bad = [one for one in record.findings if one.kind in _NONFINITE]
    cell = record.cell()
    if cell is None or not bad:
        return []
    leading = min(bad, key=lambda one: (one.step != cell.step, one.view != "local", one.step or 0, one.id))
    at = f"in {cell.phase.name.lower()} of {step_words(cell.step)}"
    found: list[Fact] = []
    if not cell.ranks:
        found.append(Fact(id=leading.id, kind="rank_unknown", text=f"only reduced values were bad {at}"))
    else:
        many = cell.tie and not cell.tie_reason.startswith("ranks ") and len(cell.ranks) > 2
        who = f"rank{'s' if len(cell.ranks) > 1 else ''} {fold_ranks(list(cell.ranks))}"
        kind = "many_ranks_first" if many else "one_rank_first"
        if cell.phase.name == "DATA":
            kind = "bad_input"
        found.append(Fact(id=leading.id, kind=kind, text=f"{who} went nonfinite by itself {at}"))
    if "at or before" in cell.certainty:
        text = f"already bad in the first record, {step_words(cell.step)}: it began there or before"
        found.append(Fact(id=leading.id, kind="already_bad", text=text))
    return found


def _findings(record: Record) -> list[Fact]:
    alike: dict[tuple[str, str], list[Seen]] = {}
    for one in record.findings:
        if one.kind in MEANING and one.severity != "info":
            alike.setdefault((one.kind, one.series), []).append(one)
    if any(one.kind == "nonfinite" for one in record.findings):
        # A curve that breaks on a NaN says nothing more than the NaN.
        alike = {key: rows for key, rows in alike.items() if key[0] != "nonfinite_state"}
    found = []
    for (kind, series), rows in alike.items():
        first = min(rows, key=lambda one: (one.step is None, one.step or 0, one.id))
        words = f"{kind.replace('_', ' ')}{f' of {series}' if series else ''} at {step_words(first.step)}"
        text = f"{words}: {first.detail}" if first.detail else words
        found.append(Fact(id=first.id, kind=kind, text=text, more=len(rows) - 1))
    return found


def _again(record: Record) -> list[Fact]:
    found = []
    if record.recurrence in _CAME_BACK:
        text = _CAME_BACK[record.recurrence]
        found.append(Fact(id=record.incident, kind=record.recurrence, text=text))
    here = set(record.bad_nodes)
    for one in record.earlier:
        same = sorted(here & set(one.nodes))
        if same:
            text = f"{one.kind.replace('_', ' ')} at {step_words(one.step)} began on {', '.join(same)}, too"
            found.append(Fact(id=one.id, kind="node_again", text=text))
    return found
