"""Loops that print "iteration: 45457, loss: 1.26", or timm's "loss: 6.9021 (6.9154)".

The number in parentheses is a running mean: a nonfinite one tells of an earlier step of this epoch, not
of this one. A loss may be a sentence: "Loss is Infinity".
"""

import math
import re

from andon.readers.logs.lines import Line, number
from andon.readers.logs.record import Record, take

HINT = ("iteration:", "iter:", "step:", "Epoch: [")
_STEP = re.compile(
    r"^\W{0,4}(?:global[ _])?(?:iteration|iter|step):\s*(\d{1,18})\s*[,;|]\s*(.*)$", re.I | re.A
)
_SENTENCE = re.compile(r"\bloss is (nan|[+-]?inf(?:inity)?)\b", re.I)
_EPOCH = re.compile(r"\bEpoch:\s*\[(\d{1,9})\]\s*\[\s*(\d{1,9})/(\d{1,9})\](.*)$", re.A)
_METER = re.compile(r"([A-Za-z_]\w{0,60}):\s*(\S+)(?:\s+\((\S+)\))?")


def read(line: Line) -> Record | None:
    """Return the record of a line, None when it has none."""
    found = _STEP.match(line.text)
    if found is not None:
        return _plain(int(found[1]), found[2])
    found = _EPOCH.search(line.text)
    return None if found is None else _meters(int(found[1]) * int(found[3]) + int(found[2]), found[4])


def _plain(step: int, rest: str) -> Record | None:
    record = Record(trainer="simple", step=step)
    sentence = _SENTENCE.search(rest)
    if sentence is not None:
        value = number(sentence[1])
        assert value is not None
        record.values["loss"] = value
    for field in re.split(r"[,;|]", rest):
        name, colon, text = field.rpartition(":")
        if colon:
            take(record.values, name.strip(), text)
    return record if "loss" in record.values else None


def _meters(step: int, rest: str) -> Record | None:
    record = Record(trainer="simple", step=step)
    for name, text, mean in _METER.findall(rest):
        take(record.values, name, text)
        average = number(mean)
        if average is not None and not math.isfinite(average) and math.isfinite(number(text) or 0.0):
            record.values[f"{name.lower()}_running_mean"] = average
            record.notes = [
                *record.notes,
                f"the running mean of {name} is {mean}: an earlier step of this epoch",
            ]
    return record if "loss" in record.values else None
