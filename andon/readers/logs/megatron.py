"""Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and Megatron-Bridge: one line per interval, fields between bars.

Printed by the last rank (megatron/training/training.py). A loss is printed only when its mean is at
least 0, so a NaN is no value at all but a field that is not there; "lm loss", "lm-loss" and "lm_loss"
are one name, and other losses are not the loss. Skipped and NaN iterations are counted per interval.
The elapsed time is in milliseconds or seconds, as its name says.
"""

import re

from andon.readers.logs.lines import Line, number, whole
from andon.readers.logs.record import Record, take

HINT = "iteration"
_ITERATION = re.compile(r"(?:\[[^\]]{0,40}\]\s*)?iteration\s+(\d{1,18})\s*/\s*\d{1,18}", re.A)
_EVAL = re.compile(
    r"valid(?:ation)? loss at iteration\s+(\d{1,18})[^|]*\|\s*(?:lm[ _-]?loss value|lm[ _-]?loss):\s*(\S+)",
    re.A,
)
_MILLISECONDS = "elapsed time per iteration (ms)"
_COUNTS = {"number of skipped iterations": "skipped", "number of nan iterations": "nan_steps"}


def read(line: Line) -> Record | None:
    """Return the record of a line, None when it has none."""
    evaluated = _EVAL.search(line.text)
    if evaluated is not None:
        value = number(evaluated[2])
        values = {} if value is None else {"eval_loss": value}
        return Record(trainer="megatron", step=int(evaluated[1]), kind="eval", values=values)
    fields = line.text.split("|")
    at = next((found for field in fields if (found := _ITERATION.fullmatch(field.strip())) is not None), None)
    if at is None or len(fields) < 3:
        return None
    record = Record(trainer="megatron", step=int(at[1]), omits_nan=True)
    for field in fields:
        name, colon, text = field.rpartition(":")
        name = name.strip().lower()
        if not colon or not name:
            continue
        if name == _MILLISECONDS:
            value = number(text)
            if value is not None:
                record.values["step_time_s"] = value / 1000.0
        elif name in _COUNTS:
            setattr(record, _COUNTS[name], whole(text))
        else:
            take(record.values, name, text)
    if "consumed_samples" in record.values:
        # Its sampler begins at the consumed samples: the two positions are one number here.
        record.values["loader_position"] = record.values["consumed_samples"]
    return record
