"""Times on the wire: RFC 3339 text or plain numbers, kept as nanoseconds since 1970 UTC."""

import math
import re
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,18}))?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})?"
)
MAX_NS = 2**63 - 1
# A number below 1e11 can only be seconds (1e11 s is the year 5138), one from 1e17 on only
# nanoseconds (1973). Between them milli- and microseconds of different decades overlap: refused.
SECONDS_BELOW = 1e11
NANOSECONDS_FROM = 1e17


def parse_time(value: object) -> tuple[int, bool]:
    """Return (nanoseconds since 1970 UTC, whether an RFC 3339 text had no offset and was read as UTC).

    Digits beyond nanoseconds are cut. A leap second `:60` is the first instant of the next minute.

    Raises:
        ValueError: it is neither RFC 3339 nor a number of seconds or nanoseconds, or it lies
            outside 1970 to 2262.
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("must be RFC 3339 text or a number of seconds or nanoseconds")
    if 0 <= value < SECONDS_BELOW:
        nanoseconds = value * 10**9 if isinstance(value, int) else round(value * 1e6) * 1000
    elif NANOSECONDS_FROM <= value <= MAX_NS:
        nanoseconds = int(value)
    else:
        raise ValueError(
            "a number must be seconds (0 to below 1e11) or nanoseconds (1e17 to 2^63−1) since 1970; "
            "milliseconds and microseconds cannot be told apart safely"
        )
    if nanoseconds > MAX_NS:
        raise ValueError("must lie between 1970 and 2262")
    return nanoseconds, False


def _parse_text(text: str) -> tuple[int, bool]:
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError("must be RFC 3339, for example 2026-01-02T03:04:05.678Z")
    year, month, day, hour, minute, second, fraction, offset = match.groups()
    leap = second == "60"
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour), int(minute), 59 if leap else int(second), tzinfo=UTC
        )
    except ValueError as error:
        raise ValueError(f"is no date and time of the calendar: {error}") from error
    seconds = (moment - _EPOCH) // timedelta(seconds=1) + leap
    if offset and offset not in "Zz":
        hours, minutes = int(offset[1:3]), int(offset[4:6])
        if hours > 23 or minutes > 59:
            raise ValueError("its offset is out of range")
        shift = (hours * 60 + minutes) * 60
        seconds += shift if offset[0] == "-" else -shift
    nanoseconds = seconds * 10**9
    if fraction and not leap:
        nanoseconds += int(fraction[:9].ljust(9, "0"))
    if not 0 <= nanoseconds <= MAX_NS:
        raise ValueError("must lie between 1970 and 2262")
    return nanoseconds, offset is None


def format_time(nanoseconds: int) -> str:
    """Return RFC 3339 UTC with as many fraction digits as needed."""
    seconds, fraction = divmod(nanoseconds, 10**9)
    text = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
    return text + (f".{fraction:09d}".rstrip("0") if fraction else "") + "Z"
