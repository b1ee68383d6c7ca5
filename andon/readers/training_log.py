"""A training log as events: readers of single records, and what only their order tells.

Which step came before decides whether a step that is lower is a restart, how many steps a count of
dropped updates stands for, whether a loss that is not printed should have been, and whether a validation
loss is a new one. All of that is kept in `Memory`, which may be stored: reading goes on after a kill as if
nothing had happened.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from andon.readers.logs import deepspeed, huggingface, megatron, nemo, olmo, simple, torchtitan
from andon.readers.logs.errors import Errors, Traceback
from andon.readers.logs.lines import Line, clean
from andon.readers.logs.record import Record

Event = dict[str, Any]
Read = Callable[[Line], Record | None]

# In the order in which they are asked; the simplest last, since it would take others' lines.
READERS: dict[str, tuple[str | tuple[str, ...], Read]] = {
    "megatron": (megatron.HINT, megatron.read),
    "torchtitan": (torchtitan.HINT, torchtitan.read),
    "nemo": (nemo.HINT, nemo.read),
    "deepspeed": (deepspeed.HINT, deepspeed.read),
    "huggingface": (huggingface.HINT, huggingface.read),
    "simple": (simple.HINT, simple.read),
}
FORMATS = ("auto", "olmo", *READERS)
MAX_LINE_CHARS = 32_768  # longer lines are data, not records; what fits is read
MAX_ERRORS = 500  # of one log and attempt: a rank that prints one in every step must not fill the run's log
_NEVER_TWICE = 64  # sources remembered: ranks of one node, with room


class Memory(msgspec.Struct):
    """What reading needs to know of the lines before.

    Attributes:
        step: the last step told, `before` the one before it; `had_loss`: a record of this attempt had one.
        told_loss: the last step told had a loss.
        sources: the last step of each source (rank or host prefix).
        skipped_total: the running count of dropped updates, where a format keeps one.
        counted: records without a step that were counted; `epoch` is that of the last.
        restarts: how often the step went back.
        errors: how many this attempt has told.
        open_record, open_line, tracebacks: what was begun and not ended.
    """

    step: int | None = None
    before: int | None = None
    had_loss: bool = False
    told_loss: bool = False
    sources: dict[str, int] = {}
    skipped_total: int | None = None
    val_loss: float | None = None
    counted: int = 0
    epoch: float | None = None
    restarts: int = 0
    errors: int = 0
    open_record: Record | None = None
    open_line: Line | None = None
    tracebacks: dict[str, Traceback] = {}


class TrainingLog:
    """Reads one log, line by line.

    Args:
        format: one of `FORMATS`; "auto" asks every reader.
        logging_steps: steps between two records of a log that prints no step.
        attempt: the number of the attempt that the log begins in; None: whichever is the newest.
        rank: whose log it is, for errors that name no rank.
        memory: of an earlier reading of the same log.
    """

    def __init__(
        self,
        *,
        format: str = "auto",  # noqa: A002  (the option's name)
        logging_steps: int = 1,
        attempt: int | None = None,
        rank: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"format: {format!r} is none of {', '.join(FORMATS)}")
        self.memory = memory or Memory()
        self._logging_steps = logging_steps
        self._attempt = attempt
        self._rank = rank
        self._readers = {name: one for name, one in READERS.items() if format in ("auto", name)}
        self._has_olmo = format in ("auto", "olmo")

    @property
    def is_open(self) -> bool:
        """Whether a record of several lines was begun and not ended."""
        return self.memory.open_record is not None or bool(self.memory.tracebacks)

    def feed(self, raw: str) -> list[Event]:
        """Return the events that one line (without its end) completes.

        An event has a `time` only where the line names one: nanoseconds since 1970, read as UTC where
        it names no offset, which `zoned` then says by being False. Both are the caller's to settle.
        """
        line = clean(raw[:MAX_LINE_CHARS])
        found: list[Event] = []
        if self._has_olmo:
            begun = self.memory.open_record
            if begun is not None and olmo.metric(line, begun):
                return found
            found += self._end_record()
            self.memory.open_record = olmo.header(line)
            if self.memory.open_record is not None:
                self.memory.open_line = line
                return found
        record = self._record(line.text, line)
        if record is not None:
            return found + self._told(record, line)
        return found + self._failed(Errors(self.memory.tracebacks).feed(line), line)

    def flush(self) -> list[Event]:
        """End what is open: no further line has come for a while."""
        return self._end_record() + self._failed(Errors(self.memory.tracebacks).flush(), Line(""))

    def _failed(self, events: list[Event], line: Line) -> list[Event]:
        """Tell errors, up to a number; the last says that there are more."""
        told = []
        for event in events:
            self.memory.errors += event["type"] == "process.error"
            if self.memory.errors == MAX_ERRORS:
                event["data"]["note"] = "the log holds more errors; they are not told one by one"
            if event["type"] != "process.error" or self.memory.errors <= MAX_ERRORS:
                told.append(self._stamped(event, line))
        return told

    def _end_record(self) -> list[Event]:
        begun, self.memory.open_record = self.memory.open_record, None
        record = None if begun is None else olmo.ended(begun)
        return [] if record is None else self._told(record, self.memory.open_line or Line(""))

    def _record(self, text: str, line: Line) -> Record | None:
        for hint, read in self._readers.values():
            hints = (hint,) if isinstance(hint, str) else hint
            if any(one in text for one in hints) and (record := read(line)) is not None:
                return record
        return None

    # --- what the order tells

    def _told(self, record: Record, line: Line) -> list[Event]:
        memory = self.memory
        if record.kind == "overflow":
            data = {**record.values, "reason": "overflow", "trainer": record.trainer}
            return [self._stamped({"type": "skip", "data": data}, line)]
        if record.kind == "eval":
            step = record.step if record.step is not None else memory.step
            if step is None:
                return []
            return [self._stamped({"type": "step", "step": step, "data": dict(record.values)}, line)]
        events = self._restart(record, line)
        step = self._place(record, line)
        if step is None:
            return events
        return [*events, self._stamped(self._step(record, step), line)]

    def _restart(self, record: Record, line: Line) -> list[Event]:
        """A step below the last one of the same source, or of a host that never spoke, is a new launch."""
        memory = self.memory
        if record.step is None:
            epoch = record.values.get("epoch")
            back = epoch is not None and memory.epoch is not None and epoch < memory.epoch
            words = "the epoch went back"
        else:
            own = memory.sources.get(line.source)
            moved = own is None and line.host is not None and memory.step is not None
            last = memory.step if moved else own
            back = last is not None and record.step < last
            words = f"the step went from {last} to {record.step}"
        if not back:
            return []
        self.memory = Memory(restarts=memory.restarts + 1, tracebacks=memory.tracebacks)
        data = {"seen_in": "log", "trainer": record.trainer, "reason": words}
        return [self._stamped({"type": "attempt.launched", "data": data}, line)]

    def _place(self, record: Record, line: Line) -> int | None:
        """Return the step to tell; None where another rank told it already."""
        memory = self.memory
        if record.step is None:
            memory.counted += self._logging_steps
            memory.epoch = record.values.get("epoch", memory.epoch)
            return memory.counted
        if line.source in memory.sources or len(memory.sources) < _NEVER_TWICE:
            memory.sources[line.source] = record.step
        has_loss = "loss" in record.values
        if memory.step is not None and record.step < memory.step:
            return None
        if memory.step == record.step and (memory.told_loss or not has_loss):
            return None
        return record.step

    def _step(self, record: Record, step: int) -> Event:
        memory = self.memory
        if memory.step != step:
            memory.before = memory.step
        first = memory.before is None
        interval = None if memory.before is None else step - memory.before
        values: dict[str, Any] = dict(record.values)
        notes = list(record.notes)
        if record.step is None:
            notes.append("the log prints no step: records are counted")
        skipped = self._skipped(record, interval)
        if skipped is not None:
            values["skipped_steps"] = skipped
        if record.nan_steps:
            values["nan_steps"] = record.nan_steps
        # A running count begins at the first step; of an interval that is not known the count is taken to
        # be all of it.
        whole = interval or (step if record.skipped_total is not None else skipped)
        if skipped == 0:
            values["skipped"] = False
        elif skipped and whole is not None and skipped >= whole:
            values["skipped"] = True
        if record.omits_nan and "loss" not in values:
            notes.append(self._omitted(values))
        if "val_loss" in values:
            stale = memory.val_loss is None or values["val_loss"] == memory.val_loss
            memory.val_loss = values["val_loss"]
            if stale:  # repeated until the next validation; of the first one nobody knows when it was
                del values["val_loss"]
        judged = (values.get("loss"), values.get("grad_norm"))
        if first and any(value is not None and not math.isfinite(value) for value in judged):
            notes.append("the first record of this log: it began here or before")
        memory.step = step
        memory.told_loss = "loss" in values
        memory.had_loss |= "loss" in values
        if notes:
            values["note"] = "; ".join(note for note in notes if note)
        return {"type": "step", "step": step, "data": values}

    def _skipped(self, record: Record, interval: int | None) -> int | None:
        """Return how many updates were dropped since the record before."""
        if record.skipped_total is None:
            return record.skipped
        before, self.memory.skipped_total = self.memory.skipped_total, record.skipped_total
        return record.skipped_total - (before or 0) if record.skipped_total >= (before or 0) else None

    def _omitted(self, values: dict[str, Any]) -> str:
        """Megatron prints no loss where its mean is NaN, and none where every update was dropped."""
        norm = values.get("grad_norm")
        nonfinite = bool(values.get("nan_steps")) or (norm is not None and not math.isfinite(norm))
        if not nonfinite and values.get("skipped") is True:
            return "no loss: every update of the interval was dropped"
        if nonfinite or self.memory.had_loss:
            values["loss"] = math.nan
            return "the loss is left out of the line, as this trainer does with NaN"
        return "no loss in the line: nonfinite, or printed under another name"

    def _stamped(self, event: Event, line: Line) -> Event:
        """Give an event the line's time, the log's rank for an error, and the attempt."""
        if event["type"] == "process.error" and "rank" not in event and self._rank is not None:
            event["rank"] = self._rank
        if self._attempt is not None:
            event["attempt"] = self._attempt + self.memory.restarts
        if line.moment_ns is not None:
            event["time"] = line.moment_ns
            event["zoned"] = line.has_zone
        if line.host is not None:
            event.setdefault("node", line.host)
        return event


def read_lines(lines: Sequence[str], **options: Any) -> list[Event]:
    """Return the events of a whole log. Options: those of `TrainingLog`."""
    log = TrainingLog(**options)
    found = [event for line in lines for event in log.feed(line)]
    return found + log.flush()
