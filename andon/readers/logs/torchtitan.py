"""torchtitan: "step: 10  loss:  2.8186  grad_norm:  0.2686  memory:  1.00GiB(1.06%)  tps: 152,515 …".

Colours stand between names and numbers, tokens per second have a comma, and a pipeline stage without
loss prints −1 (torchtitan/components/metrics.py). Validation lines begin with another word.
"""

import re

from andon.readers.logs.lines import Line
from andon.readers.logs.record import Record, take

HINT = "step:"
_STEP = re.compile(r"(?<!\w)step:\s*(\d{1,18})\s{2,}(?=\w)", re.A)
_VALIDATE = re.compile(r"\bvalidate\s+step:\s*(\d{1,18})\s+loss:\s*(\S+)", re.A)
_PAIR = re.compile(r"([A-Za-z_][\w/]{0,80}):\s*(\S+)")
_MEMORY = re.compile(r"([0-9.]+)GiB(?:\([0-9.]+%\))?")


def read(line: Line) -> Record | None:
    """Return the record of a line, None when it has none."""
    evaluated = _VALIDATE.search(line.text)
    if evaluated is not None:
        record = Record(trainer="torchtitan", step=int(evaluated[1]), kind="eval")
        take(record.values, "eval_loss", evaluated[2])
        return record
    found = _STEP.search(line.text)
    if found is None:
        return None
    pairs = _PAIR.findall(line.text, found.end())
    names = {name for name, _ in pairs}
    if not names & {"loss", "tps"}:
        return None
    record = Record(trainer="torchtitan", step=int(found[1]))
    for name, text in pairs:
        memory = _MEMORY.fullmatch(text)
        if name == "memory" and memory is not None:
            take(record.values, "memory_gib", memory[1])
        else:
            take(record.values, "mfu_percent" if name == "mfu" else name, text.removesuffix("%"))
    if "loss" not in record.values and "loss" in names:
        record.notes = ["this stage has no loss (−1)"]
    return record
