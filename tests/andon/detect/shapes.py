"""Events and frames as the wire decodes them, built in one line."""

import json
from typing import Any

import numpy as np

from andon.wire import Event, Frame, decode_events, decode_frame


def event(type_: str = "step", **fields: Any) -> Event:
    """Send one event through the real decoder; keys other than the envelope's go to its data."""
    envelope: dict[str, Any] = {"type": type_}
    for name in ("step", "rank", "ranks", "node", "attempt", "time"):
        if name in fields:
            envelope[name] = fields.pop(name)
    if type_ == "step":
        envelope.setdefault("step", 100)
    body = json.dumps({**envelope, "data": fields}).encode()  # json writes NaN and Infinity bare
    [(_, decoded)] = decode_events(body, "application/json").events
    return decoded


def frame(
    columns: dict[str, Any],
    *,
    stream: str = "rank",
    views: dict[str, str] | None = None,
    attempt: int = 1,
) -> Frame:
    """Send one frame through the real JSON decoder."""
    document = {"stream": stream, "attempt": attempt, "columns": columns, "views": views or {}}
    return decode_frame(json.dumps(document).encode(), "application/json")


def block(steps: int, lanes: int, *, first_step: int = 0, stream: str = "rank", **metrics: Any) -> Frame:
    """Build a frame of the whole rectangle, step by step; a scalar metric fills it."""
    rows = steps * lanes
    filled = {
        name: np.broadcast_to(np.asarray(v), (steps, lanes)).reshape(rows) for name, v in metrics.items()
    }
    views = {
        name: view
        for name, view in (("loss", "local"), ("nonfinite", "local"), ("grad_norm", "reduced"))
        if name in metrics
    }
    return Frame(
        stream=stream,
        attempt=1,
        step=np.repeat(np.arange(first_step, first_step + steps, dtype=np.int64), lanes),
        lane=np.tile(np.arange(lanes, dtype=np.int32), steps),
        metrics=filled,
        views=views,
    )
