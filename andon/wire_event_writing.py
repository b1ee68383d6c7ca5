"""Writing events: valid JSON that keeps what a nonfinite number was."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from andon.wire_values import float_flag


def encode_events(events: list[dict[str, Any]]) -> bytes:
    """Return the JSON body for these events: an object for one, an array for several.

    Nonfinite numbers become the strings "nan", "+inf" and "-inf", so that the body is valid JSON for
    every proxy on the way and the receiver still sees what they were. Numpy and torch scalars and
    arrays are written as their values.

    Raises:
        TypeError: a value cannot be written as JSON.
        ValueError: there is no event.
    """
    if not events:
        raise ValueError("there is no event to send")
    ready = [_writable(event) for event in events]
    return msgspec.json.encode(ready[0] if len(ready) == 1 else ready)


def _writable(value: Any, depth: int = 0) -> Any:
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else float_flag(value)
    if kind is str:
        return (
            value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    if kind is int:
        return value if -(2**63) <= value < 2**63 else _writable(_as_float(value))
    if value is None or kind is bool:
        return value
    if depth > 64:
        raise TypeError("the event is nested too deeply, or holds itself")
    if isinstance(value, Mapping):
        return {str(key): _writable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_writable(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _writable(value.tolist(), depth + 1)
    if isinstance(value, int | float | str):  # subclasses: IntEnum, numpy.float64, StrEnum
        base = bool(value) if isinstance(value, bool) else value
        return _writable(next(c for c in (int, float, str) if isinstance(base, c))(base), depth + 1)
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    raise TypeError(f"cannot write a {kind.__name__} as JSON")


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
