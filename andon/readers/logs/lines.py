"""A raw log line, freed of what launchers and terminals put around it, and numbers as trainers print them."""

import re
from datetime import UTC, datetime, timedelta

import msgspec

# CSI and OSC sequences (ECMA-48): torchtitan puts colours between a name and its number.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\-_])")
# torchrun's "[default7]:" and "[rank0]:", mpirun's and srun's "12: ", pdsh's "node-07: ".
_PREFIX = re.compile(
    r"(?:\[(?P<role>[A-Za-z_]{1,40})(?P<number>\d{1,7})\]:[ ]?|(?P<task>\d{1,7}):[ ]"
    r"|(?P<host>[A-Za-z][A-Za-z0-9.\-]{0,252}):[ ](?=[ \[]|[a-z]))",
    re.A,
)
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)[T _-](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?\s?(Z|UTC|[+-]\d\d:?\d\d)?(?![\d:])", re.A
)
_MOMENT_WITHIN = 160  # a date further right is part of what was logged
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.A)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.A)
_NONFINITE = {"nan": "nan", "inf": "inf", "infinity": "inf"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Line(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        text: without escapes and prefixes.
        source: the prefixes as they stood: lines of one source come from one process.
        rank: the number of the innermost "[rank3]:" (PyTorch's own is the global rank).
        local_rank: that of any other role: "[default7]:" is torchrun's, and counts within a node.
        host: what pdsh put before the line.
        moment_ns: the time the line itself names, nanoseconds since 1970; None when it names none.
        has_zone: the time named its offset; without one it was read as if it were UTC.
    """

    text: str
    source: str = ""
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    moment_ns: int | None = None
    has_zone: bool = False


def clean(raw: str) -> Line:
    """Return a line freed of terminal escapes and launchers' prefixes."""
    text = _ESCAPES.sub("", raw).replace("\x00", "").rstrip("\r\n")
    source, rank, local_rank, host, at = "", None, None, None, 0
    while (found := _PREFIX.match(text, at)) is not None:
        if found["host"] and (host is not None or not _is_host(found["host"])):
            break
        if found["host"]:
            host = found["host"]
        elif found["role"] == "rank":
            rank = int(found["number"])
        elif found["role"]:
            local_rank = int(found["number"])
        source += found[0].strip()
        at = found.end()
    text = text[at:]
    moment_ns, has_zone = moment(text)
    return Line(text, source, rank, local_rank, host, moment_ns, has_zone)


def _is_host(name: str) -> bool:
    """Nodes have a number in their name; "loss: 2.5" and "step: 3" do not."""
    return any(letter.isdigit() for letter in name) and any(letter.isalpha() for letter in name)


def moment(text: str) -> tuple[int | None, bool]:
    """Return the time near the start of a line and whether it named its offset."""
    found = _MOMENT.search(text, 0, _MOMENT_WITHIN)
    if found is None:
        return None, False
    day, clock, fraction, zone = found.groups()
    try:
        seconds = (datetime.fromisoformat(f"{day}T{clock}+00:00") - _EPOCH) // timedelta(seconds=1)
    except ValueError:
        return None, False
    if zone and zone not in ("Z", "UTC"):
        sign = -1 if zone[0] == "-" else 1
        seconds -= sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    nanoseconds = seconds * 10**9 + int((fraction or "0").ljust(9, "0"))
    return (nanoseconds, bool(zone)) if 0 <= nanoseconds < 2**63 else (None, False)


def number(text: str) -> float | None:
    """Return what a trainer printed as a number, None where it is none.

    "1.5E-04", "152,515", "nan", "-inf", "Infinity" are numbers; "N/A", "--", "" and "1,5" are not.
    """
    bare = text.strip()
    if _NUMBER.fullmatch(bare):
        return float(bare)
    if _GROUPED.fullmatch(bare):
        return float(bare.replace(",", ""))
    word = _NONFINITE.get(bare.lstrip("+-").lower())
    if word is None or len(bare) - len(bare.lstrip("+-")) > 1:
        return None
    return -float(word) if bare.startswith("-") else float(word)


def whole(text: str) -> int | None:
    """Return a whole number that a counter printed (also as "794.0"), None where it is none or too large."""
    value = number(text)
    if value is None or not float(value).is_integer() or not 0 <= value <= 2**53:
        return None
    return int(value)


def slug(name: str) -> str:
    """Return a metric's name as the wire's columns are spelled: "lm-loss" → "lm_loss"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:100]
