"""NeMo: fields between bars (NeMo 2), or a progress bar's postfix (NeMo 1).

Three counters stand in a line: the iteration of the epoch, the bar's position, and `global_step`, the
only one that is the step. A `val_loss` is repeated in every line until the next validation.
"""

import re

from andon.readers.logs.lines import Line, whole
from andon.readers.logs.record import Record, take

HINT = ("Training epoch", "global_step=")
_PRINTED = re.compile(r"\bTraining epoch (\d{1,9}), iteration (\d{1,18})/\S+\s*\|(.*)$", re.A)
_BAR = re.compile(r"\[[^\]]{0,80}(?:it/s|s/it)\s*,(?P<postfix>[^\]]*)\]")


def read(line: Line) -> Record | None:
    """Return the record of a line, None when it has none."""
    printed = _PRINTED.search(line.text)
    if printed is not None:
        pairs = [field.rpartition(":")[::2] for field in printed[3].split("|")]
        fields = {name.strip(): text.strip() for name, text in pairs if name.strip()}
        step = whole(fields.pop("global_step", ""))
        if step is None and printed[1] == "0":
            step = int(printed[2])  # in the first epoch the iteration is the step
    else:
        bar = _BAR.search(line.text)
        if bar is None:
            return None
        pairs = [field.partition("=")[::2] for field in bar["postfix"].split(",")]
        fields = {name.strip(): text.strip() for name, text in pairs if name.strip()}
        fields.pop("loss", None)  # the bar's own running mean
        if "e" in fields.get("consumed_samples", ""):
            del fields["consumed_samples"]  # rounded to three digits
        step = whole(fields.pop("global_step", ""))
    if step is None or "reduced_train_loss" not in fields:
        return None
    record = Record(trainer="nemo", step=step)
    for name, text in fields.items():
        take(record.values, name, text)
    return record
