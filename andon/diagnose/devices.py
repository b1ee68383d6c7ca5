"""What a hardware record means: which Xid is a fault of the device, which only follows something else.

The codes and their classes are NVIDIA's (XID Errors, docs.nvidia.com/deploy/xid-errors). The number
decides, never the text beside it or the process it names: the driver prints whoever happened to call.
"""

from collections.abc import Mapping
from typing import Any, Literal

Class = Literal["device", "link", "remapped", "application", "follows", "unknown"]

_XIDS: dict[int, tuple[Class, str]] = {
    13: ("application", "graphics engine exception"),
    31: ("application", "memory page fault"),
    43: ("application", "GPU stopped processing"),
    45: ("follows", "preemptive clean-up"),
    48: ("device", "double-bit ECC error"),
    62: ("device", "micro-controller halt"),
    63: ("remapped", "memory row remapped"),
    64: ("device", "memory remap failed"),
    74: ("link", "NVLink error"),
    79: ("device", "fell off the bus"),
    92: ("remapped", "high rate of corrected ECC errors"),
    94: ("device", "contained memory error"),
    95: ("device", "uncontained memory error"),
    109: ("device", "context-switch timeout"),
    119: ("device", "GSP firmware timeout"),
    120: ("device", "GSP firmware error"),
    136: ("link", "link training failed"),
    140: ("device", "unrecovered ECC error"),
    143: ("device", "GPU initialisation error"),
    **dict.fromkeys(range(144, 151), ("link", "NVLink error")),
    154: ("follows", "recovery action changed"),
}
_UNCORRECTED = ("dbe", "ecc_dbe", "uncorrectable", "uncorrected")
_CORRECTED = ("sbe", "ecc_sbe", "correctable", "corrected")


def xid(data: Mapping[str, Any]) -> tuple[int | None, Class, str]:
    """Return code, class and words of a `hardware.xid` event; a code not in the table is "unknown"."""
    code = next((number for name in ("xid", "code") if (number := _whole(data.get(name))) is not None), None)
    if code is None:
        return None, "unknown", "no code was posted"
    kind, words = _XIDS.get(code, ("unknown", "not in the table"))
    return code, kind, words


def ecc(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return (uncorrected, corrected) counts of a `hardware.ecc` event."""
    counts = [sum(_whole(data.get(name)) or 0 for name in names) for names in (_UNCORRECTED, _CORRECTED)]
    return counts[0], counts[1]


def is_fault(kind: str, data: Mapping[str, Any]) -> bool:
    """Return whether an event is about a device or link that failed by itself.

    An application's Xid, a remapped row and a corrected bit are not: no value was damaged by them.
    """
    if kind == "hardware.xid":
        return xid(data)[1] in ("device", "link", "unknown")
    if kind == "hardware.ecc":
        uncorrected, corrected = ecc(data)
        # Without any count the record says no more than that something was wrong.
        return uncorrected > 0 or corrected == 0
    return kind == "hardware.link"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isdecimal() and len(value) < 12:
        return int(value)
    return int(value) if isinstance(value, int | float) and float(value).is_integer() else None
