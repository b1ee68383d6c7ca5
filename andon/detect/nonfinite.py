"""Nonfinite values: what holds a run at once, what is only shown, and what the grid draws.

`judge_event` and `judge_frame` keep no state: they decide inside the transaction that stores the post.
Skipped updates need memory and are judged by `SkipCounter`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from andon.detect.cells import NO_LANE, SOURCES, VALUES, BadCells, Phase, cells, no_cells
from andon.detect.finding import Finding, Number, Severity, View
from andon.detect.frame_health import (
    BAD_BITS,
    BIT_PHASE,
    JUDGED,
    SKIPPED,
    STATE_BITS,
    RowHealth,
    axes,
    cells_of,
    is_local,
    nonfinite_rows,
    row_health,
)
from andon.detect.planes import (
    CHECKSUM,
    HEALTHY,
    HELD,
    MISSING,
    NO_PROGRESS,
    NONFINITE,
    OUTSIDE,
    SPIKE,
    SPREAD,
    STRAGGLER,
    coarsen,
    combine_planes,
    state_plane,
)
from andon.detect.skips import SkipClass, SkipCounter, StepSeen
from andon.policy import Policy
from andon.wire import ORIGIN_BITS, Event, Frame

__all__ = [
    "CHECKSUM",
    "HEALTHY",
    "HELD",
    "MISSING",
    "NONFINITE",
    "NO_PROGRESS",
    "OUTSIDE",
    "SPIKE",
    "SPREAD",
    "STRAGGLER",
    "SkipCounter",
    "StepSeen",
    "axes",
    "bad_cells",
    "cells_in_event",
    "coarsen",
    "combine_planes",
    "event_cells",
    "judge_event",
    "judge_frame",
    "row_health",
    "seen_in_event",
    "seen_in_frame",
    "state_plane",
]

DETECTOR = "nonfinite"
VERSION = 1
RULE = "nonfinite"
MAX_NAMED_LANES = 4096  # a finding names at most this many lanes; the count stands in its numbers

_SKIP_REASON = re.compile(r"\b(non-?finite|overflow|nan|inf)\b", re.IGNORECASE)

_FLAG_TEXT = {"nan": "NaN", "+inf": "+Inf", "-inf": "-Inf"}


@dataclass(frozen=True, slots=True)
class _Step:
    """What one `step` event says about nonfinite values."""

    values: dict[str, str]  # judged column → "nan" | "+inf" | "-inf"
    elsewhere: dict[str, str]  # any other path → the same
    bits: int
    skipped: bool
    phase: Phase | None
    local: bool

    @property
    def bad(self) -> bool:
        return bool(self.values) or bool(self.bits & BAD_BITS)


def _nonfinite_flags(event: Event) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, flag in event.flags.items():
        if flag in _FLAG_TEXT:
            found[path.removeprefix("data.")] = flag
    return found


def _read(event: Event) -> _Step:
    flags = _nonfinite_flags(event)
    said = event.data.get("nonfinite") if event.type in ("step", "skip") else 0
    bits = said & 127 if type(said) is int and said > 0 else 0
    judged: dict[str, str] = {name: flags.pop(name) for name in ("loss", "grad_norm") if name in flags}
    phase: Phase | None = None
    local = False
    if bits & BAD_BITS:
        phase = Phase(int(BIT_PHASE[bits]))
        local = _is_local(event, "nonfinite") and bool(bits & ORIGIN_BITS)
    elif judged:
        seen = []
        if "loss" in judged:
            seen.append((not _is_local(event, "loss"), Phase.FORWARD))
        if "grad_norm" in judged:
            local_norm = _is_local(event, "grad_norm")
            seen.append((not local_norm, Phase.BACKWARD if local_norm else Phase.REDUCE))
        spread, phase = min(seen)
        local = not spread
    skipped = event.data.get("skipped") is True or bool(bits & SKIPPED)
    return _Step(judged, flags, bits, skipped, phase, local)


def _is_local(event: Event, metric: str) -> bool:
    """A value without one rank that speaks is nobody's, whatever view it claims."""
    return event.rank is not None and event.view_of(metric) == "local"


def _lanes(event: Event) -> tuple[int, ...]:
    if event.rank is not None:
        return (event.rank,)
    return tuple(event.ranks or ())[:MAX_NAMED_LANES]


def judge_event(
    event: Event, policy: Policy, *, backfill: bool = False, skipped_steps: Collection[int] = ()
) -> list[Finding]:
    """Judge the nonfinite values of one event, without memory.

    A nonfinite train loss, gradient norm or bit set that was applied, or does not say, is a halt; so are
    nonfinite weights or optimizer moments whether applied or not. Any other nonfinite value (evaluation,
    perplexity, router and auxiliary losses, unknown columns, other event types) is only shown. A skipped
    update gives nothing here: `SkipCounter` judges it. A sentinel is finite and gives nothing.

    Args:
        event: as decoded by `andon.wire`.
        policy: the run's policy; with rule "nonfinite" off nothing is said. Whether a halt acts is the
            caller's business (`policy.mode`).
        backfill: the event is late or of an earlier attempt: everything is shown, nothing asks to hold.
        skipped_steps: steps of this attempt that another post already said were skipped.
    """
    if policy.mode(RULE) == "off" or not (event.flags or event.data.get("nonfinite")):
        return []
    step = _read(event)
    findings: list[Finding] = []
    if event.type != "step":
        elsewhere = step.elsewhere | step.values
    else:
        elsewhere = step.elsewhere
        state = bool(step.bits & STATE_BITS)
        skipped = step.skipped or (event.step in skipped_steps and event.data.get("skipped") is not False)
        if step.bad and (state or not skipped):
            findings.append(_applied(event, step, state=state, backfill=backfill))
    for path, flag in elsewhere.items():
        findings.append(
            Finding(
                kind="nonfinite_shown",
                severity="info",
                rule=RULE,
                step=event.step,
                lanes=_lanes(event),
                detector=DETECTOR,
                detector_version=VERSION,
                series=path,
                view=event.view,
                numbers={"value": flag},
                detail=f"{path} is {_FLAG_TEXT[flag]}: shown, holds nothing",
            )
        )
    return findings


def _applied(event: Event, step: _Step, *, state: bool, backfill: bool) -> Finding:
    numbers: dict[str, Number] = dict(step.values)
    if step.bits:
        numbers["bits"] = step.bits
    for name in ("loss", "grad_norm", "loss_scale"):
        value = event.data.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers.setdefault(name, value)
    numbers["skipped"] = step.skipped
    said = ", ".join(f"{name} {_FLAG_TEXT[flag]}" for name, flag in step.values.items())
    if not said:
        said = f"nonfinite bits {step.bits}"
    if state:
        effect = "weights or optimizer moments are nonfinite"
    elif "skipped" in event.data:
        effect = "the update was applied"
    else:
        effect = "nothing says that the update was skipped"
    severity: Severity = "halt"
    if backfill:
        severity = "info"
        effect += "; backfill, so the directive stays"
        numbers["backfill"] = True
    view: View = "local" if step.local else "reduced"
    return Finding(
        kind="nonfinite_state" if state else "nonfinite",
        severity=severity,
        rule=RULE,
        step=event.step,
        lanes=_lanes(event),
        detector=DETECTOR,
        detector_version=VERSION,
        series=next(iter(step.values), "nonfinite"),
        view=view,
        phase=None if step.phase is None else step.phase.name.lower(),
        numbers=numbers,
        detail=f"{said}; {effect}",
    )


class EventCells(NamedTuple):
    """The bad cells of one `step` event: the same cell on every rank it names."""

    ranks: list[int]  # `NO_LANE` where a reduced value named none
    step: int
    phase: Phase
    local: bool
    skipped: bool
    bits: int
    source: str  # of `SOURCES`
    value: str  # of `VALUES`


def cells_in_event(event: Event) -> EventCells | None:
    """Return the bad cells of a `step` event, None where it has none or names no step.

    Skipped ones are included and marked.
    """
    if event.type != "step" or event.step is None or not (event.flags or event.data.get("nonfinite")):
        return None
    step = _read(event)
    if not step.bad or step.phase is None:
        return None
    return EventCells(
        ranks=[event.rank] if event.rank is not None else list(event.ranks or (NO_LANE,)),
        step=event.step,
        phase=step.phase,
        local=step.local,
        skipped=step.skipped and not step.bits & STATE_BITS,
        bits=step.bits,
        source="nonfinite" if step.bits & BAD_BITS else next(iter(step.values), "nonfinite"),
        value=next(iter(step.values.values()), ""),
    )


def event_cells(event: Event) -> BadCells:
    """Return `cells_in_event` as columns; empty where there are none."""
    found = cells_in_event(event)
    if found is None:
        return no_cells()
    n = len(found.ranks)
    return cells(
        step=[found.step] * n,
        lane=np.asarray(found.ranks, dtype=np.int32),
        phase=[found.phase] * n,
        local=[found.local] * n,
        skipped=[found.skipped] * n,
        bits=[found.bits] * n,
        source=[SOURCES.index(found.source)] * n,
        value=[VALUES.index(found.value)] * n,
    )


def seen_in_event(event: Event) -> StepSeen | None:
    """Return what `SkipCounter` needs of an event, None when it is no step."""
    if event.type not in ("step", "skip") or event.step is None:
        return None
    step = _read(event)
    skipped = step.skipped
    what = _skip_class(loss="loss" in step.values, gradient="grad_norm" in step.values, bits=step.bits)
    if event.type == "skip":
        # A skip for another reason, such as a declared data window, is no nonfinite step.
        if _SKIP_REASON.search(str(event.data.get("reason", ""))):
            what = max(what, SkipClass.GRADIENT)
        if what == SkipClass.NOT_SAID:
            return None
        skipped = True
    scale = event.data.get("loss_scale")
    known = isinstance(scale, int | float) and not isinstance(scale, bool) and scale > 0
    return StepSeen(
        step=event.step,
        skipped=skipped,
        what=what,
        loss_scale=float(scale) if known and scale is not None else None,  # −1: the logger has none
        ranks=_lanes(event) if step.local else (),
    )


def _skip_class(*, loss: bool, gradient: bool, bits: int) -> SkipClass:
    if loss or bits & (ORIGIN_BITS & ~4):
        return SkipClass.LOSS
    if gradient or bits & BAD_BITS:
        return SkipClass.GRADIENT
    return SkipClass.NOT_SAID


def bad_cells(frame: Frame, health: RowHealth | None = None) -> BadCells:
    """Return every bad cell of a frame; pass `health` when `row_health(frame)` is already known."""
    return cells_of(frame, row_health(frame) if health is None else health)


def seen_in_frame(frame: Frame, health: RowHealth | None = None) -> list[StepSeen]:
    """Return what `SkipCounter` needs of a rank frame: its skipped steps, and its applied ones."""
    if frame.stream != "rank":
        return []
    health = row_health(frame) if health is None else health
    where = health.axes
    count = len(where.steps)
    skipped = np.zeros(count, dtype=np.bool_)
    skipped[where.row[health.skipped]] = True
    worst = np.zeros(count, dtype=np.int64)
    rows = np.flatnonzero(health.bad)
    kind = np.where(health.phase[rows] <= Phase.FORWARD, int(SkipClass.LOSS), int(SkipClass.GRADIENT))
    np.maximum.at(worst, where.row[rows], kind)
    seen = []
    for i in range(count):
        ranks: tuple[int, ...] = ()
        if skipped[i]:
            local = np.flatnonzero(health.local & (where.row == i))
            ranks = tuple(np.unique(where.lanes[where.column[local]]).tolist())[:MAX_NAMED_LANES]
        seen.append(
            StepSeen(
                step=int(where.steps[i]),
                skipped=bool(skipped[i]),
                what=SkipClass(int(worst[i])),
                loss_scale=None,
                ranks=ranks,
            )
        )
    return seen


def judge_frame(
    frame: Frame,
    policy: Policy,
    *,
    backfill: bool = False,
    health: RowHealth | None = None,
    skipped_steps: Collection[int] = (),
) -> list[Finding]:
    """Judge a frame as `judge_event` judges an event: at most one finding per kind and column.

    The halt finding is about the first applied bad step; its lanes are the local origins in that step,
    or every lane of it when all are reduced or shards (view says which).
    """
    if policy.mode(RULE) == "off":
        return []
    health = row_health(frame) if health is None else health
    where = health.axes
    findings: list[Finding] = []
    step_of = where.steps[where.row]
    skipped = health.skipped
    if skipped_steps and not health.healthy:
        skipped = skipped | np.isin(step_of, list(skipped_steps))
    for state in (True, False):
        rows = health.bad & health.state if state else health.bad & ~health.state & ~skipped
        if not rows.any():
            continue
        first = int(step_of[rows].min())
        at = rows & (step_of == first)
        local = bool((at & health.local).any())
        named = at & health.local if local else at
        phase = Phase(int(health.phase[named].min()))
        lanes = np.unique(where.column[named])
        listed = where.lanes[lanes[:MAX_NAMED_LANES]].tolist()
        numbers: dict[str, Number] = {f"nonfinite_{name}": n for name, n in health.columns.items()}
        numbers |= {
            "bad_cells": int(rows.sum()),
            "lanes": len(lanes),
            "last_step": int(step_of[rows].max()),
        }
        effect = "weights or optimizer moments are nonfinite" if state else "no skip was reported"
        if backfill:
            numbers["backfill"] = True
            effect += "; backfill, so the directive stays"
        findings.append(
            Finding(
                kind="nonfinite_state" if state else "nonfinite",
                severity="info" if backfill else "halt",
                rule=RULE,
                step=first,
                lanes=tuple(listed),
                detector=DETECTOR,
                detector_version=VERSION,
                series=f"{frame.stream}.{next(iter(health.columns), 'nonfinite')}",
                view="local" if local else "reduced",
                phase=phase.name.lower(),
                numbers=numbers,
                detail=f"{len(lanes)} {frame.stream}s nonfinite at step {first}; {effect}",
            )
        )
    judged = {*JUDGED.get(frame.stream, {}), "nonfinite"} if frame.stream != "node" else set()
    for name in frame.metrics:
        rows_or_none = None if name in judged else nonfinite_rows(frame, name)
        if rows_or_none is None:
            continue
        at = np.flatnonzero(rows_or_none)
        first = int(step_of[at].min())
        findings.append(
            Finding(
                kind="nonfinite_shown",
                severity="info",
                rule=RULE,
                step=first,
                lanes=tuple(where.lanes[np.unique(where.column[at])[:MAX_NAMED_LANES]].tolist()),
                detector=DETECTOR,
                detector_version=VERSION,
                series=f"{frame.stream}.{name}",
                view="local" if is_local(frame, name) else "reduced",
                numbers={"values": len(at)},
                detail=f"{len(at)} nonfinite values of {name}: shown, holds nothing",
            )
        )
    return findings
