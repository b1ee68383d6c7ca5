"""The error file that torchelastic writes for a rank that raised (TORCHELASTIC_ERROR_FILE).

`message` is an object with the message, a call stack and a time, or a plain string beside a top-level
time (torch/distributed/elastic/multiprocessing/errors/). Times are whole seconds as text, so the first
of several is often a tie. A rank killed by a signal writes no file.
"""

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

MAX_BYTES = 4 << 20
_MAX_CHARS = 8_000


class ErrorFileError(ValueError):
    """The bytes are no error file; the message says why."""


def read(body: bytes) -> dict[str, Any]:
    """Return an error file as a `process.error` event: `data`, and `time` in nanoseconds where it has one.

    Raises:
        ErrorFileError: too large, no JSON, or without a message.
    """
    if len(body) > MAX_BYTES:
        raise ErrorFileError(f"{len(body)} bytes: larger than any error file")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ErrorFileError(f"it is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ErrorFileError("it is no object")
    said: Any = document.get("message")
    inner: Mapping[str, Any] = said if isinstance(said, dict) else document
    message = inner.get("message")
    if not isinstance(message, str) or not message:
        raise ErrorFileError("it has no message")
    extra = inner.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    data: dict[str, Any] = {"class": "exception", "message": message[:2_000]}
    stack = extra.get("py_callstack")
    if isinstance(stack, str) and stack:
        data["traceback"] = stack[-_MAX_CHARS:]
    code = inner.get("errorCode")
    if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 2**31:
        data["exitcode"] = code
    event: dict[str, Any] = {"type": "process.error", "data": data}
    seconds = _seconds(extra.get("timestamp", document.get("timestamp")))
    if seconds is not None:
        event["time"] = seconds * 10**9
    return event


def local_rank_of(path: PurePath) -> int | None:
    """Return the local rank that torchrun's own layout names: …/attempt_0/3/error.json."""
    parent = path.parent
    is_one = re.fullmatch(r"\d{1,5}", parent.name) and re.fullmatch(r"attempt_\d+", parent.parent.name)
    return int(parent.name) if is_one else None


def _seconds(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\d{1,10}", value, re.ASCII):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**10:
        return value
    return None
