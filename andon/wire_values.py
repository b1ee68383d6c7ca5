"""Reading hostile JSON: tolerant of what trainers really write, strict about what it becomes.

JSON has no NaN, and the moment that matters is the moment one appears. So the bare tokens `NaN`,
`Infinity` and `-Infinity` and numbers beyond a double are read; every nonfinite value becomes null
plus a flag; what comes out is always valid JSON that PostgreSQL's jsonb takes too (no NUL, no lone
surrogates, no integers beyond 64 bits).
"""

import functools
import json
import math
import re
from typing import Any

import msgspec

MAX_DEPTH = 32
MAX_RANK = 2**31 - 1  # the lane column is int32
MAX_RANKS = 2**18  # of one set: above any machine built; "0-999999999999" must not be expanded
MAX_FLAGS = 1000  # flags kept one by one per event; beyond it they are only counted
INT64_MAX = 2**63 - 1

# Spellings of nonfinite numbers by C, Python, Java, Go, JavaScript and Rust, in any letter case.
_SPELLED = {
    "nan": "nan", "+nan": "nan", "-nan": "nan",
    "inf": "+inf", "+inf": "+inf", "infinity": "+inf", "+infinity": "+inf",
    "-inf": "-inf", "-infinity": "-inf",
}  # fmt: skip
_REPLACED = re.compile("[\x00\ud800-\udfff]")
_MAX_DIGITS = 400  # an integer of more digits is beyond a double (1.8e308) in any case


class WireError(Exception):
    """A body that cannot be taken; becomes an RFC 9457 problem.

    Attributes: `status` (HTTP), `problem_type` (a slug), `detail` (what was wrong and what to do),
    `field` (which part of the request, or None), `refused` (one Refusal per event, where events
    were looked at one by one).
    """

    def __init__(
        self, status: int, problem_type: str, detail: str, field: str | None = None, refused: Any = ()
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.problem_type = problem_type
        self.detail = detail
        self.field = field
        self.refused = list(refused)


def undecodable(detail: str, field: str | None = "body") -> WireError:
    """Return the 400 for bytes that are not what their content type says."""
    return WireError(400, "undecodable", detail, field)


def unprocessable(detail: str, field: str | None) -> WireError:
    """Return the 422 for a readable body that breaks a rule."""
    return WireError(422, "unprocessable", detail, field)


def nested_too_deep() -> WireError:
    """Return the 422 for nesting beyond MAX_DEPTH."""
    return WireError(422, "nested-too-deep", f"nesting above {MAX_DEPTH} levels is refused", "body")


def media_type(content_type: str | None) -> str:
    """Return the bare lower-case media type.

    Raises:
        WireError: 415 when a charset other than UTF-8 is named.
    """
    kind, *parameters = (content_type or "").split(";")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise WireError(415, "unsupported-media-type", "JSON must be UTF-8", "content-type")
    return kind.strip().lower()


def _constant(token: str) -> float:
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[token]


def _integer(digits: str) -> int | float:
    if len(digits) > _MAX_DIGITS:
        return -math.inf if digits[0] == "-" else math.inf
    return int(digits)


_tolerant = json.JSONDecoder(parse_constant=_constant, parse_int=_integer, strict=False)


def load_json(body: bytes) -> Any:
    """Decode one JSON value; nonfinite numbers come out as floats, later duplicates of a key win.

    The common case goes through msgspec (under a microsecond); what that refuses is read again by
    the tolerant reader, so that a NaN costs a little more and is never lost.

    Raises:
        WireError: 400 not JSON, 422 nested too deep.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise nested_too_deep() from None
    except (msgspec.DecodeError, UnicodeError, ValueError):
        pass
    try:
        # surrogatepass: a surrogate written as raw bytes becomes U+FFFD later, like an escaped one.
        text = body.decode("utf-8", "surrogatepass").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise undecodable(f"not UTF-8 at byte {error.start}") from None
    text = text.strip(" \t\r\n")
    if not text:
        raise undecodable("the body is empty")
    try:
        value, end = _tolerant.raw_decode(text)
    except RecursionError:
        raise nested_too_deep() from None
    except ValueError as error:
        raise undecodable(f"not JSON: {error}") from None
    if end != len(text):
        raise undecodable(f"not JSON: something follows the value at character {end}")
    return value


def spelled_nonfinite(value: object) -> str | None:
    """Return the flag of a string that spells a nonfinite number ("NaN", "-inf", …), else None."""
    if isinstance(value, str) and len(value) <= 9:
        return _SPELLED.get(value.lower())
    return None


def float_flag(value: float) -> str:
    """Return the flag of a nonfinite float."""
    return "nan" if math.isnan(value) else "+inf" if value > 0 else "-inf"


class Cleaner:
    """Makes one decoded value storable, in place, and collects what it had to change.

    `flags` maps a path ("data.loss", "data.nodes[3].node") to "nan", "+inf", "-inf", "replaced"
    (NUL or surrogates became U+FFFD) or "rounded" (an integer beyond 64 bits became a double).
    """

    __slots__ = ("flags", "more", "replaced")

    def __init__(self) -> None:
        self.flags: dict[str, str] = {}
        self.replaced = 0
        self.more = 0

    def flag(self, path: str, flag: str) -> None:
        """Record one flag; beyond MAX_FLAGS only their number is kept, under the path "…"."""
        if len(self.flags) < MAX_FLAGS or path in self.flags:
            self.flags[path] = flag
        else:
            self.more += 1
            self.flags["…"] = f"{self.more} more"

    def text(self, text: str, path: str) -> str:
        """Return the text without NUL and lone surrogates."""
        changed, count = _REPLACED.subn("\ufffd", text)
        if count:
            self.replaced += count
            self.flag(path, "replaced")
        return changed

    def clean(self, value: Any, path: str, depth: int = 1) -> Any:
        """Return the storable form of `value`; `depth` is its own level of nesting.

        Raises:
            WireError: 422 nested too deep.
        """
        kind = type(value)
        if kind is str:
            return self.text(value, path)
        if kind is float:
            if math.isfinite(value):
                return value
            self.flag(path, float_flag(value))
            return None
        if kind is int:
            return value if -INT64_MAX <= value <= INT64_MAX else self._large(value, path)
        if kind is dict:
            return self._object(value, path, depth)
        if kind is list:
            if depth > MAX_DEPTH:
                raise nested_too_deep()
            for position, item in enumerate(value):
                item_kind = type(item)
                if item_kind is bool or item is None or (item_kind is float and math.isfinite(item)):
                    continue
                value[position] = self.clean(item, f"{path}[{position}]", depth + 1)
        return value

    def _object(self, value: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise nested_too_deep()
        renamed = False
        for key, item in value.items():
            name = key
            if _REPLACED.search(key):
                name, renamed = _REPLACED.sub("\ufffd", key), True
            kind = type(item)
            if kind is float and math.isfinite(item):
                continue
            # The path is stored as well, so it must not hold what the key may not.
            value[key] = self.clean(item, f"{path}.{name}" if path else name, depth + 1)
        return self._renamed(value, path) if renamed else value

    def _renamed(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        result = {}
        for key, item in value.items():
            name, count = _REPLACED.subn("\ufffd", key)
            inner = f"{path}.{name}" if path else name
            if count:
                self.replaced += count
                if inner not in self.flags:  # a NaN under such a key stays a NaN
                    self.flag(inner, "replaced")
            result[name] = item
        return result

    def _large(self, value: int, path: str) -> Any:
        try:
            rounded = float(value)
        except OverflowError:
            self.flag(path, "-inf" if value < 0 else "+inf")
            return None
        self.flag(path, "rounded")
        return rounded


_PIECE = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")


def parse_ranks(value: object) -> tuple[int, ...]:
    """Return a rank set, sorted and without doubles, from 5, [0, 1], "0-3,6" or ["0-3", 6].

    Raises:
        ValueError: not a rank set, empty, a rank outside 0 to 2^31−1, or more than 2^18 ranks.
    """
    if isinstance(value, str):
        return _ranks_of_text(value)
    if isinstance(value, list | tuple):
        found: set[int] = set()
        if value and all(type(item) is int for item in value) and min(value) >= 0:
            found = set(value)  # a launch of 16,384 ranks names each three times over
            if len(found) <= MAX_RANKS and max(found) <= MAX_RANK:
                return tuple(sorted(found))
            found = set()
        for item in value:
            found.update(_ranks_of_text(item) if isinstance(item, str) else (_one_rank(item),))
            if len(found) > MAX_RANKS:
                raise ValueError(f"names more than {MAX_RANKS} ranks")
        if not found:
            raise ValueError("names no rank")
        return tuple(sorted(found))
    return (_one_rank(value),)


def _one_rank(value: object) -> int:
    if type(value) is not int:
        raise ValueError('must be a rank, a list of ranks, or ranges such as "0-3,6"')
    if not 0 <= value <= MAX_RANK:
        raise ValueError(f"rank {value if abs(value) < 10**20 else 'number'} is not in 0 to 2^31−1")
    return value


@functools.lru_cache(maxsize=8)  # trainers send the same few sets; at worst 8 × 9 MB are kept
def _ranks_of_text(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for piece in text.split(","):
        match = _PIECE.fullmatch(piece.strip())
        if match is None:
            raise ValueError('must be ranges such as "0-3,6"')
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if not first <= last <= MAX_RANK:
            raise ValueError("a range must go upwards and end at 2^31−1 or below")
        if last - first >= MAX_RANKS or len(found) + last - first >= MAX_RANKS:
            raise ValueError(f"names more than {MAX_RANKS} ranks")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def fold_ranks(ranks: object) -> str:
    """Return the shortest range text of a rank set: (0, 1, 2, 3, 6) → "0-3,6"."""
    pieces: list[str] = []
    ordered = parse_ranks(ranks)
    start = previous = ordered[0]
    for rank in (*ordered[1:], None):
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        pieces.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return ",".join(pieces)
