"""From what is stored to facts that speak, one file per thing that can speak."""

from andon.diagnose.fact import Fact
from andon.diagnose.gather import checks, collectives, curves, data, hardware, launches, origin
from andon.diagnose.record import Record

_PARTS = (origin, curves, data, launches, checks, hardware, collectives)


def gather(record: Record) -> list[Fact]:
    """Return every fact of `record` that speaks about a cause, in a fixed order."""
    return [fact for part in _PARTS for fact in part.facts(record)]
