"""Stored events as the detectors of `andon` take them."""

from typing import Any

from andon.wire import Event as WireEvent
from runs.models import Event


def as_posted(event: Event) -> WireEvent:
    """Return a stored event as it was decoded when it was posted."""
    view: Any = event.view or "reduced"
    return WireEvent(
        type=event.type,
        step=event.step,
        ranks=None if event.ranks is None else tuple(event.ranks),
        rank=event.rank,
        node=event.node or None,
        attempt=event.attempt,
        flags=event.flags,
        data=event.data,
        view=view,
    )
