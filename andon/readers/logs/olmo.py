"""OLMo and OLMo-core: a line "[step=10/1000,epoch=1]", and below it one indented "name=value" per metric
(olmo_core/train/callbacks/console_logger.py, olmo/train.py).

Numbers above a thousand have commas. A header with nothing below it is a sign of life, no record.
"""

import re

from andon.readers.logs.lines import Line
from andon.readers.logs.record import Record, take

_HEADER = re.compile(r"\[step=(\d{1,18})/[\d?,]{1,24}(?:,[^\]]*)?\]\s*$", re.A)
_METRIC = re.compile(r"\s+([A-Za-z][\w/ .()*\-]{0,160}?)=(\S+)\s*$")
_SKIPPED = "optim_step_skipped"


def header(line: Line) -> Record | None:
    """Return the beginning of a record, None where a line begins none."""
    found = _HEADER.search(line.text)
    return None if found is None else Record(trainer="olmo", step=int(found[1]))


def metric(line: Line, record: Record) -> bool:
    """Put a metric's line into its record; return whether it is one."""
    found = _METRIC.match(line.text)
    if found is not None:
        take(record.values, found[1], found[2])
    return found is not None


def ended(record: Record) -> Record | None:
    """Return a record whose lines have all come; None when there were none."""
    dropped = record.values.pop(_SKIPPED, None)
    if dropped is not None:
        record.skipped = int(dropped == 1.0)
    return record if record.values else None
