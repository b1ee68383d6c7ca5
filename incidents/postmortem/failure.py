"""First failure, symptom and scope, what changed: where it began and how far it went."""

from typing import Any

from andon.diagnose.gather import launches
from andon.postmortem.document import Item, Sentence, Table
from incidents import board, diagnosis, firstbad, rules
from incidents.postmortem.book import Book
from incidents.postmortem.facts import Facts
from incidents.postmortem.words import plain
from runs import formatting, queries
from runs.models import Finding

_GROUPS = 8  # groups of bad cells told after the first
_NAMED = 5  # pieces of a folded set; the whole set stands in the appendix
_NUMBERS = 12  # findings whose numbers are told


def first_failure(book: Book, facts: Facts) -> list[Item]:
    """Return what broke first, how sure that is, and what followed."""
    document, incident = facts.first_bad, facts.incident
    if document["step"] is None:
        by_hand = incident.kind == rules.HELD_BY_HAND
        said = "Nothing is known to be bad" + (": a person held the run." if by_hand else ".")
        return [book.say(said, facts.leading or incident)]
    origin = facts.origin or incident
    items: list[Item] = [book.say(_first(facts), origin)]
    items.append(book.say(_certainty(document), origin))
    groups = queries.bad_cells(incident.run, incident.attempt, 20)
    first = set(document["ranks"])
    for group in groups[:_GROUPS]:
        if group.step == document["step"] and group.stream == "rank" and first and _ranks(group) <= first:
            continue
        items.append(book.say(_followed(group), group))
    if len(groups) > _GROUPS:
        more = len(groups) - _GROUPS
        text = f"At least {formatting.plural(more, 'further group')} of cells went bad later."
        items.append(book.say(text, groups[-1]))
    return items


def _first(facts: Facts) -> str:
    document = facts.first_bad
    step = f"step {formatting.count(document['step'])}"
    if "at or before" in document["certainty"]:
        step = f"at or before {step}"
    where = f"{step}, {document['phase']}" if document["phase"] else step
    if document["layer"] is not None:
        where += f", {plain(document['layer'], 120)}"
    what = _value(facts.origin)
    if not document["ranks"]:
        return f"The first bad value was {what} at {where}; the rank is not known."
    ranks = formatting.rank_words(document["ranks"])
    ranks = ranks[0].upper() + ranks[1:]
    nodes = firstbad.nodes_of(facts.attempt, document["ranks"])
    on = f" on {plain(nodes[0])}" if len(nodes) == 1 else ""
    verb = "was" if len(document["ranks"]) == 1 else "were"
    tie = f" (a tie: {plain(document['tie_reason'])})" if document["tie"] else ""
    return f"{ranks}{on} {verb} first: {what} at {where}{tie}."


def _value(finding: Finding | None) -> str:
    if finding is None:
        return "a bad value"
    series = finding.series.rpartition(".")[2].replace("_", " ")  # "rank.grad_norm" is grad norm
    if finding.kind in rules.NONFINITE_KINDS:
        word = rules.value_word(finding)
        word = word.replace("Nonfinite", "nonfinite")  # a value keeps its own spelling: NaN, +Inf
        return f"{series} {word}" if series and series != "nonfinite" else word
    return f"{finding.kind.replace('_', ' ')}{f' of {plain(series)}' if series else ''}"


def _certainty(document: dict[str, Any]) -> str:
    if not document["ranks"]:
        return "Only reduced values were bad, and a reduced value names no rank."
    tie = "a tie" if document["tie"] else "no tie"
    skipped = " The update of that step was skipped." if document["skipped"] else ""
    return f"The values are local, computed before any exchange; {tie}.{skipped}"


def _ranks(group: queries.BadGroup) -> set[int]:
    try:
        return set(formatting_ranks(group.ranks))
    except ValueError:
        return set()


def formatting_ranks(text: str) -> list[int]:
    """Return the ranks of "0-3,6"; of a group that names none, nothing."""
    found: list[int] = []
    for piece in text.split(","):
        low, _, high = piece.strip().partition("-")
        if not low.isdecimal():
            continue
        found += range(int(low), int(high or low) + 1)
    return found


def _followed(group: queries.BadGroup) -> str:
    who = "Layers" if group.stream == "layer" else "Ranks"
    pieces = [piece.strip() for piece in group.ranks.split(",")]
    if group.stream == "rank":
        pieces = [piece.replace("-", formatting.RANGE) for piece in pieces]
    named = ", ".join(plain(piece, 80) for piece in pieces[:_NAMED])
    named += f" and {len(pieces) - _NAMED:,} more" if len(pieces) > _NAMED else ""
    series = "" if group.series in ("", "nonfinite") else f" {plain(group.series.replace('_', ' '), 60)}"
    value = formatting.nonfinite(group.value) or "nonfinite"
    skipped = ", the update was skipped" if group.skipped else ""
    kind = "local" if group.view == "local" else "reduced" if group.view == "reduced" else group.view
    place = f"step {formatting.count(group.step)}, {group.phase}"
    return f"{who} {named}:{series} {value} ({kind}) at {place}{skipped}."


def symptom(book: Book, facts: Facts) -> list[Item]:
    """Return the symptom's class, how far it went, and the numbers the detectors used."""
    incident = facts.incident
    known = diagnosis.words(incident.symptom)
    items: list[Item] = [book.say(f"Symptom: {known.name}. Look first at {known.look_first}.", incident)]
    items.append(book.say(_scope(facts), facts.attempt or incident))
    rows = [
        book.row(
            (
                f"{plain(one.detector, 60)} v{plain(one.detector_version, 20)}",
                plain(one.series, 60) or one.kind.replace("_", " "),
                formatting.count(one.step) if one.step is not None else "",
                _number(one, "value"),
                _number(one, "median"),
                _number(one, "mad"),
                formatting.z_score(one.score) if one.score is not None else "",
                one.severity if one.mode == "act" else f"{one.severity}, {one.mode} only",
            ),
            one,
        )
        for one in _told(facts.findings)
    ]
    if rows:
        head = ("Detector", "Series", "Step", "Value", "Median", "MAD", "z", "Says")
        items.append(Table(head, tuple(rows)))
    return items


def _told(findings: list[Finding]) -> list[Finding]:
    """Return the first finding of each kind and series, the worst first."""
    order = {"halt": 0, "warn": 1, "info": 2}
    first: dict[tuple[str, str], Finding] = {}
    for one in findings:
        first.setdefault((one.kind, one.series), one)
    return sorted(first.values(), key=lambda one: (order.get(one.severity, 3), one.step or 0, one.pk))[
        :_NUMBERS
    ]


def _number(finding: Finding, name: str) -> str:
    value = finding.numbers.get(name)
    if value is None and name == "value":
        value = finding.numbers.get(finding.series)
        if value is None and "nonfinite" in finding.kind:
            return "nonfinite"
    if value is None:
        return ""
    return formatting.significant(value, 4)


def _scope(facts: Facts) -> str:
    incident, attempt = facts.incident, facts.attempt
    bad = firstbad.spread(incident.run, incident.attempt)
    world = attempt.world_size if attempt else None
    of = f" of {formatting.count(world)}" if world else ""
    if not bad:
        return f"No rank{of} posted a bad value of its own; only values of all ranks were bad."
    return f"{formatting.count(bad)}{of} {'rank' if bad == 1 else 'ranks'} had a bad value in the end."


def changed(book: Book, facts: Facts) -> list[Item]:
    """Return what the failing attempt was launched with against the one before it."""
    record = board.record(facts.incident, facts.first_bad)
    found: list[Item] = [
        book.say(f"{fact.text[:1].upper()}{plain(fact.text[1:])}.", fact.id)
        for fact in launches.facts(record)
    ]
    told = any(isinstance(item, Sentence) for item in found)
    if not told:
        source = facts.attempt or facts.incident
        found.append(book.say("What changed is not known: no launch reported what it ran.", source))
    return found
