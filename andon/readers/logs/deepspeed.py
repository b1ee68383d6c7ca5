"""DeepSpeed: its step counter, the pipeline engine's loss, and the lines of a dropped update.

`skipped=` is a running count, not one per interval as in Megatron. An OVERFLOW line names no step, and
"Rank 0" in it is who printed it; "reducing to" may name the scale that was attempted (hysteresis), and
the step is dropped all the same.
"""

import re

from andon.readers.logs.lines import Line, number
from andon.readers.logs.record import Record, take

HINT = ("step=", "steps:", "OVERFLOW")
_COUNTER = re.compile(r"\bstep=(\d{1,18}), skipped=(\d{1,18}), lr=\[([^\],]*)[^\]]*\]", re.A)
_PIPELINE = re.compile(
    r"\bsteps:\s*(\d{1,18})\s+loss:\s*(\S+)(?:\s+iter time \(s\):\s*(\S+))?(?:\s+samples/sec:\s*(\S+))?", re.A
)
_OVERFLOW = re.compile(
    r"OVERFLOW!.{0,80}?Skipping step\. Attempted loss scale:\s*([0-9.eE+]+)"
    r"(?:,\s*reducing to\s*([0-9.eE+]+))?"
)


def read(line: Line) -> Record | None:
    """Return the record of a line, None when it has none."""
    found = _OVERFLOW.search(line.text)
    if found is not None:
        scales = {"attempted_loss_scale": number(found[1]), "loss_scale": number(found[2] or "")}
        values = {name: value for name, value in scales.items() if value is not None}
        return Record(trainer="deepspeed", step=None, kind="overflow", values=values, skipped=1)
    found = _COUNTER.search(line.text)
    if found is not None:
        record = Record(trainer="deepspeed", step=int(found[1]), skipped_total=int(found[2]))
        take(record.values, "lr", found[3])
        return record
    found = _PIPELINE.search(line.text)
    if found is None:
        return None
    record = Record(trainer="deepspeed", step=int(found[1]))
    for name, text in zip(("loss", "iter_time_s", "samples/sec"), found.groups()[1:], strict=True):
        take(record.values, name, text or "")
    return record
