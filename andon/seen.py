"""What a run actually saw: which samples its weights were trained on, over all restarts and rollbacks.

An attempt begins from a checkpoint of an earlier one, so attempts form a tree, and the weights at its
newest step come from one path through it: the *lineage*. What an attempt did after the step from which
the next one began is in no weights any more. Of all samples the loader passed on the lineage, each is
exactly one of

* trained: its update is in the weights (some of these more than once: *repeated*);
* not applied: read, but the update of its step was dropped;
* skipped: left out on purpose;
* unaccounted: passed, and nothing says what became of it.

Beside these stand the samples of steps that were thrown away: *replayed* where the lineage trained them
again, *rolled back* where it did not. Everything is a window of absolute loader positions (see
`andon.loader`), so the answer means the same on any layout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from andon.intervals import Window, Windows, common, merged, more_than_once, part, total, without

SCHEMA = "andon.seen/1"


class Mark(msgspec.Struct, frozen=True):
    """Where the loader stood once `step` was done. `consumed`: samples trained on so far, where told."""

    step: int
    position: int
    consumed: int | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as far as it was told.

    Args:
        parent: the attempt of the checkpoint it began from; None: it began from scratch.
        began: the step of that checkpoint; its own steps are `began` + 1 to `last`.
        start: the first mark, at `began`; None where no loader position of it is known.
        marks: further marks, by step. Between two of them every step takes equally many samples: a
            caller gives a mark on both sides of every step at which that changes.
        skips: windows its loader was told to leave out.
        dropped: steps whose update was not applied. The caller gives a mark on both sides of each.
    """

    number: int
    parent: int | None = None
    began: int = 0
    last: int
    start: Mark | None = None
    marks: tuple[Mark, ...] = ()
    skips: Windows = ()
    dropped: frozenset[int] = frozenset()


class Of(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the steps and samples of one attempt. Steps are half-open windows, too."""

    number: int
    kept_steps: Window | None
    thrown_steps: Window | None
    kept: Windows
    thrown: Windows
    dropped: Windows
    skipped: Windows
    again: Windows  # of kept and thrown: what an earlier attempt had trained before


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for the weights of `attempt` after `step`."""

    attempt: int
    step: int
    lineage: tuple[tuple[int, int, int], ...]  # attempt, first and last step, oldest first
    passed: Windows
    trained: Windows
    repeated: Windows
    dropped: Windows
    skipped: Windows
    unaccounted: Windows
    replayed: Windows
    rolled_back: Windows
    attempts: tuple[Of, ...]
    unknown: tuple[str, ...]  # what could not be said, a sentence each; () = the answer is whole

    def document(self) -> dict[str, object]:
        """Return it as JSON-ready data; a window is [first sample, one past the last]."""
        made: dict[str, object] = {"schema": SCHEMA, **msgspec.to_builtins(self)}
        return {name: _pairs(value) for name, value in made.items()}


def _pairs(value: object) -> object:
    if isinstance(value, dict):
        if value.keys() == {"start", "stop"}:
            return [value["start"], value["stop"]]
        return {name: _pairs(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_pairs(one) for one in value]
    return value


def lineage(attempts: Mapping[int, Attempt], number: int, step: int) -> list[tuple[Attempt, int]]:
    """Return (attempt, last step of it that is in the weights), oldest first.

    Raises:
        ValueError: `step` of attempt `number` was never reached.
    """
    path: list[tuple[Attempt, int]] = []
    at: int | None = number
    while at is not None:
        attempt = attempts.get(at)
        if attempt is None or not attempt.began <= step <= attempt.last:
            raise ValueError(f"step {step} is no step of attempt {at}")
        path.append((attempt, step))
        at, step = attempt.parent, attempt.began
        if at is not None and at >= attempt.number:
            raise ValueError(f"attempt {attempt.number} cannot begin from attempt {at}")
    return path[::-1]


def seen(attempts: Iterable[Attempt], number: int, step: int) -> Seen:
    """Return what the weights of attempt `number` after `step` were trained on.

    Raises:
        ValueError: the lineage cannot be followed; the text says where it breaks.
    """
    known = {attempt.number: attempt for attempt in attempts}
    path = lineage(known, number, step)
    kept_to = {attempt.number: last for attempt, last in path}
    reads = {one.number: _Read(one) for one in known.values()}
    skips = merged(window for attempt, _ in path for window in attempt.skips)

    applied: list[Window] = []
    dropped: list[Window] = []
    passed: list[Window] = []
    thrown: list[Window] = []
    for attempt in known.values():
        read = reads[attempt.number]
        last = kept_to.get(attempt.number, attempt.began)
        # Each kept step by itself: a sample in two of them was trained twice.
        applied += [w for piece in read.applied(attempt.began, last) for w in piece]
        dropped += [w for piece in read.dropped(attempt.began, last) for w in piece]
        passed += read.passed(attempt.began, last)
        thrown += [w for piece in read.applied(last, attempt.last) for w in piece]
    trained = merged(applied)
    not_applied = without(dropped, trained)
    left_out = without(common(skips, passed), (*trained, *not_applied))
    return Seen(
        attempt=number,
        step=step,
        lineage=tuple((one.number, one.began + 1, last) for one, last in path if last > one.began),
        passed=merged(passed),
        trained=trained,
        repeated=more_than_once(applied),
        dropped=not_applied,
        skipped=left_out,
        unaccounted=without(passed, (*trained, *not_applied, *left_out)),
        replayed=common(thrown, trained),
        rolled_back=without(thrown, trained),
        attempts=tuple(_each(known, reads, kept_to)),
        unknown=tuple(line for one, last in path for line in reads[one.number].unknown(last)),
    )


def _each(
    known: Mapping[int, Attempt], reads: Mapping[int, "_Read"], kept_to: Mapping[int, int]
) -> Iterator[Of]:
    before: Windows = ()
    for number in sorted(known):
        attempt, read = known[number], reads[number]
        last = min(kept_to.get(number, attempt.began), attempt.last)
        kept = merged(w for piece in read.applied(attempt.began, last) for w in piece)
        thrown = merged(w for piece in read.applied(last, attempt.last) for w in piece)
        yield Of(
            number=number,
            kept_steps=Window(attempt.began + 1, last + 1) if last > attempt.began else None,
            thrown_steps=Window(last + 1, attempt.last + 1) if attempt.last > last else None,
            kept=kept,
            thrown=thrown,
            dropped=merged(w for piece in read.dropped(attempt.began, attempt.last) for w in piece),
            skipped=common(attempt.skips, read.passed(attempt.began, attempt.last)),
            again=common((*kept, *thrown), before),
        )
        before = merged((*before, *kept, *thrown))


class _Segment(msgspec.Struct, frozen=True):
    """Steps `first` + 1 to `last`, between two marks: what the loader passed, and what was read of it."""

    first: int
    last: int
    passed: Windows
    read: Windows
    sure: bool

    def of(self, after: int, until: int) -> Windows:
        """Return what steps `after` + 1 to `until` read: whole batches in ascending order."""
        low, high = max(after, self.first), min(until, self.last)
        if low >= high:
            return ()
        if (low, high) == (self.first, self.last):
            return self.read
        batch = total(self.read) // (self.last - self.first)
        return part(self.read, (low - self.first) * batch, (high - low) * batch)


class _Read:
    """What the steps of one attempt read."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        # Of two marks of one step the earlier given stands: a checkpoint's own number before any other.
        by_step = {mark.step: mark for mark in reversed(attempt.marks)}
        if attempt.start is not None:
            by_step[attempt.began] = attempt.start
        self.marks = [by_step[at] for at in sorted(by_step) if attempt.began <= at <= attempt.last]
        self.backwards = [
            later.step for earlier, later in pairwise(self.marks) if later.position < earlier.position
        ]
        self.segments = [] if self.backwards else [_segment(attempt, a, b) for a, b in pairwise(self.marks)]

    def _between(self, after: int, until: int, *, dropped: bool) -> Iterator[Windows]:
        for segment in self.segments:
            is_dropped = segment.last == segment.first + 1 and segment.last in self.attempt.dropped
            if segment.sure and is_dropped == dropped:
                yield segment.of(after, until)

    def applied(self, after: int, until: int) -> Iterator[Windows]:
        """Return what steps `after` + 1 to `until` trained on, segment by segment."""
        return self._between(after, until, dropped=False)

    def dropped(self, after: int, until: int) -> Iterator[Windows]:
        """Return what they read without an update."""
        return self._between(after, until, dropped=True)

    def passed(self, after: int, until: int) -> Windows:
        """Return all that the loader passed in these steps, read or not."""
        found: list[Window] = []
        for segment in self.segments:
            if after <= segment.first and segment.last <= until:
                found += segment.passed
                continue
            read = segment.of(after, until)
            if read:
                # Left out is what lies between samples that were read, not what follows the last of them.
                inside = Window(read[0].start, read[-1].stop)
                found += common(segment.passed, [inside])
        return merged(found)

    def unknown(self, last: int) -> list[str]:
        """Return what cannot be said of its steps up to `last`."""
        name = f"attempt {self.attempt.number}"
        if last <= self.attempt.began:
            return []
        if self.backwards:
            return [f"{name}: its loader position goes backwards at step {self.backwards[0]:,}"]
        if not self.segments:
            return [f"{name}: no loader position was reported on both sides of any step"]
        lines = []
        first, end = self.segments[0].first, self.segments[-1].last
        if first > self.attempt.began:
            lines.append(f"{name}, steps {self.attempt.began + 1:,} to {first:,}: no loader position before")
        if end < last:
            lines.append(f"{name}, steps {end + 1:,} to {last:,}: no loader position after")
        lines += [
            f"{name}, steps {one.first + 1:,} to {one.last:,}: the loader passed {total(one.read):,} samples"
            " and another number was consumed"
            for one in self.segments
            if not one.sure and one.first < last
        ]
        lines += [
            f"{name}, steps {one.first + 1:,} to {one.last:,}: {total(one.read):,} samples are no whole"
            f" number for each step, so what was read up to step {last:,} is not exact"
            for one in self.segments
            if one.first < last < one.last and total(one.read) % (one.last - one.first)
        ]
        alone = {one.last for one in self.segments if one.last == one.first + 1}
        lines += [
            f"{name}, step {step:,}: its update was not applied, and which samples it read is not known"
            for step in sorted(self.attempt.dropped - alone)
            if first < step <= min(end, last)
        ]
        return lines


def _segment(attempt: Attempt, a: Mark, b: Mark) -> _Segment:
    passed = merged([Window(a.position, b.position)])
    read = without(passed, attempt.skips)
    sure = True
    if a.consumed is not None and b.consumed is not None and b.step not in attempt.dropped:
        sure = b.consumed - a.consumed == total(read)
    return _Segment(a.step, b.step, passed, read, sure)


def kept_until(attempts: Sequence[Attempt]) -> dict[int, int]:
    """Return the last step of each attempt that is in the newest weights; `began` where none is."""
    known = {attempt.number: attempt for attempt in attempts}
    if not known:
        return {}
    newest = known[max(known)]
    kept = {attempt.number: attempt.began for attempt in attempts}
    try:
        path = lineage(known, newest.number, newest.last)
    except ValueError:
        return kept
    return kept | {attempt.number: last for attempt, last in path}
