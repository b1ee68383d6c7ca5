"""What the readout says of one cell: where it stands, what was posted, or why there is nothing."""

from datetime import UTC, datetime

import numpy as np

from andon.detect.cells import Phase
from andon.wire import Frame as WireFrame
from andon.wire import decode_frame
from incidents.models import Incident
from runs import formatting
from runs.blocks import NEVER
from runs.models import FirstBad, Frame, Grid, RunProgress
from runs.placement import nodes_of, topology_of
from runs.seen import Seen
from runs.uncompacted import uncompacted

CELL_METRICS = (
    ("loss", "loss"),
    ("grad_norm", "grad norm"),
    ("compute_s", "compute, s"),
    ("wait_s", "wait, s"),
)


def rank_names(incident: Incident) -> dict[str, object]:
    """Return nodes with their ranks, so that the readout names a cell without asking again."""
    known = nodes_of(incident.run, incident.attempt)
    return {
        "nodes": [[formatting.inert(name, 48), formatting.fold(ranks), ranks[0]] for name, ranks, _ in known]
    }


def cell_words(incident: Incident, step: int, rank: int) -> str:
    """Return where a cell stands, what was posted for it and when; or why nothing was."""
    frame = (
        Frame.objects.filter(
            run_id=incident.run_id,
            attempt=incident.attempt,
            stream="rank",
            step_first__lte=step,
            step_last__gte=step,
            lane_first__lte=rank,
            lane_last__gte=rank,
        )
        # The newest that began before it: what an index finds first.
        .order_by("-step_first", "id")
        .first()
    )
    first = (
        FirstBad.objects.filter(
            run_id=incident.run_id, attempt=incident.attempt, stream="rank", lane=str(rank), step=step
        )
        .order_by("view")
        .first()
    )
    parts = _groups(incident, rank)
    if first is not None and first.series:
        parts.append(_bad_words(first))
    said = _frame_values(frame, step, rank) if frame is not None else []
    if frame is not None and said is not None:
        parts += [*said, f"received {_received(frame.received_at)} UTC"]
    elif first is not None:
        parts.append(f"received {_received(first.received_at)} UTC")
    else:
        parts.append(_why_nothing(incident, step, rank))
    return "; ".join(parts)


def _groups(incident: Incident, rank: int) -> list[str]:
    """Return `TP 5, DP 7`: which groups of the launch a rank is in, or nothing."""
    topology = topology_of(incident.run, incident.attempt)
    known = {} if topology is None else topology.groups
    found = [
        f"{kind.upper()} {index}"
        for kind in ("tp", "pp", "dp")
        for index, members in enumerate(known.get(kind, []))
        if rank in members
    ]
    return [", ".join(found)] if found else []


def _bad_words(first: FirstBad) -> str:
    word = formatting.nonfinite(first.value) or "nonfinite"
    phase = Phase(first.phase).name.lower()
    skipped = ", update skipped" if first.skipped else ""
    if first.series == "nonfinite":
        return f"flagged by the trainer in {phase}, {first.view} value{skipped}"
    return f"{first.series.replace('_', ' ')} {word} in {phase}, {first.view} value{skipped}"


def _received(moment: datetime) -> str:
    moment = moment.astimezone(UTC)
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"


def _frame_values(frame: Frame, step: int, rank: int) -> list[str] | None:
    """Return the values of a cell; None when the frame has no row of it."""
    if not frame.body:
        return []
    decoded = decode_frame(bytes(frame.body), frame.content_type)
    rows = np.flatnonzero((decoded.step == step) & (np.asarray(decoded.lane) == rank)).tolist()
    found: list[str] = []
    for index in rows:
        for name, words in CELL_METRICS:
            text = _value(decoded, name, words, index)
            if text and text not in found:
                found.append(text)
    return found if rows else None


def _value(decoded: WireFrame, name: str, words: str, index: int) -> str:
    if name not in decoded.metrics:
        return ""
    missing = decoded.missing.get(name)
    if missing is not None and bool(missing[index]):
        return f"{words} not applicable: this rank measures none"
    return f"{words} {formatting.metric(name, float(decoded.metrics[name][index]))}"


def _why_nothing(incident: Incident, step: int, rank: int) -> str:
    """Return why a cell has no value: not there yet, late, or never sent."""
    if uncompacted(incident.run_id, incident.attempt).key:
        return "no values posted for this cell so far; posts are being taken in"
    grid = Grid.objects.filter(run=incident.run, attempt=incident.attempt).only("seen").first()
    seen = Seen(bytes(grid.seen) if grid is not None else b"")
    if rank >= len(seen.first) or seen.first[rank] == NEVER:
        return "no values posted for this cell: this rank posted nothing in this attempt"
    first, last = int(seen.first[rank]), int(seen.last[rank])
    if step < first:
        return f"no values posted for this cell: this rank joined at step {formatting.count(first)}"
    if step <= last:
        return "no values posted for this cell: later ones came; a late post is put in when it arrives"
    return (
        f"no values posted for this cell: the last of this rank is of step {formatting.count(last)}"
        + _silent(incident, rank)
    )


def _silent(incident: Incident, rank: int) -> str:
    node = next((name for name, held, _ in nodes_of(incident.run, incident.attempt) if rank in held), None)
    heard = RunProgress.objects.filter(run=incident.run).values_list("nodes", flat=True).first() or {}
    if node is None or not heard.get(node):
        return ""
    at = _received(datetime.fromisoformat(heard[node]))
    return f"; {formatting.inert(node, 48)} was last heard at {at} UTC"
