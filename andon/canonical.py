"""Canonical bytes and digests of what people sign and of what is chained."""

import hashlib
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
        return [exact(item) for item in value]
    return str(value)


def canonical_bytes(value: Any) -> bytes:
    """Return the RFC 8785 form of `value`."""
    return rfc8785.dumps(exact(value))


def sha256(value: Any) -> str:
    """Return the lower-case hex SHA-256 of the RFC 8785 form of `value`."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()
