"""Canonical bytes and digests of what people sign and of what is chained."""

import contextlib
import hashlib
import json
import math
from decimal import Decimal
from typing import Any

import rfc8785

# RFC 8785 numbers are doubles; a step may be up to 2^63 − 1, and a digest must not fail on it.
_EXACT = 2**53 - 1


def exact(value: Any) -> Any:
    """Return JSON-ready data that RFC 8785 can write: unsafe integers and nonfinite floats as text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if -_EXACT <= value <= _EXACT else str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        # A database keeps 1.7e30 as the whole number it is written as, and gives that back.
        return value if abs(value) <= _EXACT else str(int(Decimal(repr(value))))
    if isinstance(value, dict):
        return {str(name): exact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        if _whole(value) and min(value) >= -_EXACT and max(value) <= _EXACT:
            return list(value)  # the ranks of a fleet
        return [exact(item) for item in value]
    return str(value)


def canonical_bytes(value: Any) -> bytes:
    """Return the RFC 8785 form of `value`."""
    made = exact(value)
    if _is_simple(made):
        # The same bytes, written in C: a ledger is thousands of rows, and a row may name every rank.
        text = json.dumps(made, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate: the library says what is wrong
            return text.encode()
    return rfc8785.dumps(made)


def _is_simple(value: Any) -> bool:
    """Return whether Python's JSON and RFC 8785 write a value alike: no floats, and names that sort alike."""
    if isinstance(value, dict):
        return all(name.isascii() and _is_simple(item) for name, item in value.items())
    if isinstance(value, list):
        return _whole(value) or all(map(_is_simple, value))
    return not isinstance(value, float)


def _whole(value: list[Any] | tuple[Any, ...]) -> bool:
    return set(map(type, value)) == {int}


def sha256(value: Any) -> str:
    """Return the lower-case hex SHA-256 of the RFC 8785 form of `value`."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()
