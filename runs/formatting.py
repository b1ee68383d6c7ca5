"""How numbers, times, ranks and names are written for people.

One place, so that a page, a figure and a sentence never disagree: a number keeps its unit with a
no-break space, a minus is U+2212, nonfinite values are written as received, and text that came from
outside is made inert before it reaches a line that people read at night.
"""

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

NBSP = "\u00a0"
NARROW = "\u202f"
MINUS = "\u2212"
NB_HYPHEN = "\u2011"
RANGE = "\u2013"

LATE_AFTER_S = 10.0  # a post later than this is called late: agents post every 5 s
NAME_CHARS = 80  # a longer name fills the line and hides what stands after it

_NONFINITE = {"nan": "NaN", "+inf": "+Inf", "inf": "+Inf", "-inf": f"{MINUS}Inf"}
# Characters that reorder or hide what follows, and control characters that a terminal or a copy would obey.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def count(value: int | None) -> str:
    """Return a step, sample or count: `18,003`; `not known yet` for None."""
    if value is None:
        return "not known yet"
    return f"{value:,d}".replace("-", MINUS)


def nonfinite(value: object) -> str | None:
    """Return `NaN`, `+Inf` or `−Inf` for a nonfinite number or its wire flag, else None."""
    if isinstance(value, str):
        return _NONFINITE.get(value.strip().lower())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else f"{MINUS}Inf"
    return None


def significant(value: object, digits: int) -> str:
    """Return a number with `digits` significant digits.

    Very small and very large numbers take an exponent, because a column of zeros can not be read.
    None is `not measured`; nonfinite values are written as received.
    """
    if value is None or value == "":
        return "not measured"
    word = nonfinite(value)
    if word is not None:
        return word
    if isinstance(value, bool) or not isinstance(value, int | float):
        return inert(value)
    number = float(value)
    if number == 0.0:
        return "0"
    rounded = float(f"{number:.{digits - 1}e}")
    size = abs(rounded)
    if size < 1e-3 or size >= 1e6:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
        # The exponent keeps its hyphen: 2.4e-4 is copied into a config as it stands.
        return (MINUS + text[1:]) if text.startswith("-") else text
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{rounded:,.{decimals}f}".replace("-", MINUS)


def loss(value: object) -> str:
    """Return a loss: four significant digits."""
    return significant(value, 4)


def grad_norm(value: object) -> str:
    """Return a gradient norm: three significant digits."""
    return significant(value, 3)


def learning_rate(value: object) -> str:
    """Return a learning rate: two significant digits."""
    return significant(value, 2)


def z_score(value: object) -> str:
    """Return a z score: one decimal."""
    if value is None:
        return "not judged"
    word = nonfinite(value)
    if word is not None:
        return word
    if not isinstance(value, int | float):
        return inert(value)
    # Adding 0.0 turns a rounded −0.0 into 0.0.
    return f"{round(float(value), 1) + 0.0:,.1f}".replace("-", MINUS)


def metric(name: str, value: object) -> str:
    """Return a value in the form of its metric (`loss`, `grad_norm`, `lr`; others three digits)."""
    forms = {"loss": loss, "grad_norm": grad_norm, "lr": learning_rate}
    return forms.get(name, grad_norm)(value)


def size(value: int | None) -> str:
    """Return bytes in SI units: `182 GB`, `2.1 MB`."""
    if value is None:
        return "size not known yet"
    if abs(value) < 1000:
        return f"{value}{NBSP}B".replace("-", MINUS)
    amount = float(value)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        amount /= 1000.0
        text = f"{amount:.1f}".removesuffix(".0") if abs(amount) < 9.95 else f"{amount:.0f}"
        # 999,999,999 rounds to 1000 MB, which is 1 GB.
        if abs(float(text)) < 1000 or unit == "PB":
            return f"{text}{NBSP}{unit}".replace("-", MINUS)
    raise AssertionError("unreachable")


def amount(value: object) -> str:
    """Return a large count of tokens or samples in SI prefixes: `75.5 G`, `45.7 M`; exact below 10,000."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return significant(value, 3)
    if abs(value) < 10_000:
        return count(int(value))
    scaled = float(value)
    for prefix in ("k", "M", "G", "T", "P"):
        scaled /= 1000.0
        if abs(scaled) < 999.5 or prefix == "P":
            return f"{significant(scaled, 3)}{NBSP}{prefix}"
    raise AssertionError("unreachable")


def percent(part: float, whole: float) -> str:
    """Return a share: `61 %`; a decimal only for 1,000 things or more, and never rounded up to 100."""
    if whole <= 0:
        return "not known yet"
    share = 100.0 * part / whole
    if whole >= 1000:
        text = f"{min(share, 99.9) if part < whole else share:.1f}"
    else:
        text = f"{min(share, 99.0) if part < whole else share:.0f}"
    return f"{text}{NARROW}%"


def money(amount: float) -> str:
    """Return dollars: two decimals below 10, none above."""
    text = f"{abs(amount):,.2f}" if abs(amount) < 9.995 else f"{abs(amount):,.0f}"
    return f"{MINUS if amount < 0 else ''}${text}"


def gpu_hours(hours: float) -> str:
    """Return GPU-hours with one decimal."""
    return f"{hours:,.1f}{NBSP}GPU{NB_HYPHEN}hours"


def duration(seconds: float) -> str:
    """Return a length of time: `40 s`, `4 min`, `1 h 12 min`, `3 d 4 h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}{NBSP}s"
    if whole < 3600:
        return f"{whole // 60}{NBSP}min"
    if whole < 86400:
        hours, minutes = whole // 3600, whole % 3600 // 60
        return f"{hours}{NBSP}h" + (f"{NBSP}{minutes}{NBSP}min" if minutes else "")
    days, hours = whole // 86400, whole % 86400 // 3600
    return f"{days}{NBSP}d" + (f"{NBSP}{hours}{NBSP}h" if hours else "")


def clock(moment: datetime, now: datetime, *, ms: bool = False) -> str:
    """Return `03:12:07`, with the date (and no seconds) when it was not on the day of `now`."""
    moment, now = moment.astimezone(UTC), now.astimezone(UTC)
    if ms:
        text = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"
        return text if moment.date() == now.date() else f"{day(moment, now)} {text}"
    if moment.date() == now.date():
        return f"{moment:%H:%M:%S}"
    return f"{day(moment, now)} {moment:%H:%M}"


def day(moment: datetime, now: datetime) -> str:
    """Return `29 Oct`, with the year when it is another one."""
    moment, now = moment.astimezone(UTC), now.astimezone(UTC)
    text = f"{moment.day}{NBSP}{moment:%b}"
    return text if moment.year == now.year else f"{text}{NBSP}{moment.year}"


def ago(moment: datetime, now: datetime) -> str:
    """Return `4 min ago`, or `in 4 min` for a moment to come."""
    seconds = (now - moment).total_seconds()
    return f"in {duration(-seconds)}" if seconds <= -1 else f"{duration(seconds)} ago"


def lag(occurred: datetime, received: datetime) -> str:
    """Return how long after it occurred something was received: `+94 ms`, `+31 s`; "" below 1 ms."""
    seconds = (received - occurred).total_seconds()
    sign = "+" if seconds >= 0 else MINUS
    seconds = abs(seconds)
    if seconds < 0.001:
        return ""
    if seconds < 1:
        return f"{sign}{seconds * 1000:.0f}{NBSP}ms"
    return f"{sign}{duration(seconds)}"


def fold(ranks: Iterable[int]) -> list[str]:
    """Return ranks as pieces: three or more in a row fold into a range, two stay two."""
    pieces: list[str] = []
    run: list[int] = []

    def close() -> None:
        if len(run) >= 3:
            pieces.append(f"{run[0]}{RANGE}{run[-1]}")
        else:
            pieces.extend(str(rank) for rank in run)

    everyone = sorted(set(ranks))
    if len(everyone) >= 3 and everyone[-1] - everyone[0] + 1 == len(everyone):
        return [f"{everyone[0]}{RANGE}{everyone[-1]}"]  # all ranks of a run: not one by one
    for rank in everyone:
        if run and rank != run[-1] + 1:
            close()
            run = []
        run.append(rank)
    close()
    return pieces


def ranks(values: Iterable[int], *, most: int = 5) -> str:
    """Return `56–60, 62, 63`; more than `most` pieces end in `and 12 more` (ranks, not pieces)."""
    everyone = sorted(set(values))
    pieces = fold(everyone)
    if len(pieces) <= most:
        return ", ".join(pieces)
    shown = 0
    for piece in pieces[:most]:
        first, _, last = piece.partition(RANGE)
        shown += int(last) - int(first) + 1 if last else 1
    return f"{', '.join(pieces[:most])} and {count(len(everyone) - shown)} more"


def rank_words(values: Sequence[int]) -> str:
    """Return `rank 61`, `ranks 12 and 40`, `ranks 56–63`."""
    everyone = sorted(set(values))
    if not everyone:
        return "the rank is not known"
    if len(everyone) == 1:
        return f"rank {everyone[0]}"
    if len(everyone) == 2:
        return f"ranks {everyone[0]} and {everyone[1]}"
    return f"ranks {ranks(everyone)}"


def digest(value: str) -> str:
    """Return the first eight and last four characters of a digest."""
    return value if len(value) <= 13 else f"{value[:8]}…{value[-4:]}"


def inert(value: object, most: int = NAME_CHARS) -> str:
    """Return outside text that is safe to stand in a sentence.

    Bidirectional, zero-width and control characters become U+FFFD, so that a name can neither hide
    nor reorder what follows it; length is cut at `most` characters with a word about the rest.
    Markup is left to the template's escaping.
    """
    text = _UNSAFE.sub("\ufffd", str(value))
    if len(text) <= most:
        return text
    return f"{text[:most]}… (+{len(text) - most:,d} characters)"


def figure_text(value: object) -> str:
    """Return outside text for a Plotly label, which reads a small dialect of HTML."""
    return inert(value, 48).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def plural(number: int, one: str, many: str = "") -> str:
    """Return `1 step`, `3 steps`."""
    return f"{count(number)}{NBSP}{one if number == 1 else many or one + 's'}"
