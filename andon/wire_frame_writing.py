"""Writing frames: Arrow where pyarrow is installed, else JSON columns."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from andon.wire_frames import ARROW_TYPE, JSON_TYPE, Frame
from andon.wire_values import float_flag


def encode_frame(frame: Frame) -> tuple[bytes, str]:
    """Return (body, content type) of a frame, uncompressed."""
    from andon import wire_arrow  # pyarrow weighs 25 MB, and most processes of a server write no frame

    if wire_arrow.available():
        return wire_arrow.encode_arrow(frame), ARROW_TYPE
    return encode_frame_json(frame), JSON_TYPE


def encode_frame_json(frame: Frame) -> bytes:
    """Return the frame as JSON columns: valid JSON, nonfinite values spelled, not measured as null."""
    columns: dict[str, list[Any]] = {
        "step": frame.step.tolist(),
        "lane": frame.lane if isinstance(frame.lane, list) else frame.lane.tolist(),
    }
    for name, axis in (("time_ns", frame.time_ns), ("micro_batch", frame.micro_batch), ("rank", frame.rank)):
        if axis is not None:
            columns[name] = axis.tolist()
    for name, values in frame.metrics.items():
        columns[name] = _json_values(values, frame.missing.get(name))
    document: dict[str, Any] = {"stream": frame.stream, "attempt": frame.attempt, "columns": columns}
    for key in ("node", "views", "groups", "schema"):
        if getattr(frame, key):
            document[key] = getattr(frame, key)
    return msgspec.json.encode(document)


def _json_values(values: NDArray[Any], missing: NDArray[np.bool_] | None) -> list[Any]:
    items: list[Any] = values.tolist()
    if values.dtype.kind == "f":
        for row in np.flatnonzero(~np.isfinite(values)).tolist():
            items[row] = float_flag(items[row])
    if missing is not None:
        for row in np.flatnonzero(missing).tolist():
            items[row] = None
    return items
