"""Hugging Face `Trainer` (also TRL, Unsloth): printed dictionaries, or JSON lines.

A Python dictionary's text is no JSON: single quotes and a bare nan; newer versions print numbers as
strings. It names no step: records are then counted, which is said. By default the Trainer replaces a
NaN loss by the running mean before it prints (`logging_nan_inf_filter`), so the gradient norm tells.
"""

import re

from andon.readers.logs.lines import Line, whole
from andon.readers.logs.record import Record, take

HINT = "{"
_DICTIONARY = re.compile(r"\{[^{}]{1,8000}\}")
_PAIR = re.compile(r"""(?:'([^']{1,100})'|"([^"]{1,100})")\s*:\s*(?:'([^']*)'|"([^"]*)"|([^,{}'"]+))""")
_STEPS = ("step", "global_step", "current_steps")


def read(line: Line) -> Record | None:
    """Return the record of a line, None when it has none. A record without a step is a counted one."""
    found = _DICTIONARY.search(line.text)
    if found is None:
        return None
    fields: dict[str, str] = {}
    for match in _PAIR.finditer(found[0]):
        fields[match[1] or match[2]] = (match[3] or match[4] or match[5] or "").strip()
    if "train_runtime" in fields:
        return None  # the summary at the end: means of the whole training
    step = next((whole(fields.pop(name)) for name in _STEPS if name in fields), None)
    if "eval_loss" in fields and "loss" not in fields:
        record = Record(trainer="huggingface", step=step, kind="eval")
    elif "loss" in fields and fields.keys() & {"learning_rate", "grad_norm", "epoch"}:
        record = Record(trainer="huggingface", step=step)
    else:
        return None
    for name, text in fields.items():
        take(record.values, name, text)
    return record
