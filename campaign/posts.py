"""A sender that takes posts as the server would, through the wire's own reading, and keeps them."""

from typing import Any

from andon.wire import Event, Frame, decode_events, decode_frame, encode_events, encode_frame


class Posts:
    """What one leader posted in one case."""

    def __init__(self) -> None:
        self.directive: dict[str, Any] | None = None
        self.events: list[Event] = []
        self.frames: list[Frame] = []

    def send_events(self, events: list[dict[str, Any]]) -> None:
        """Keep events.

        Raises:
            ValueError: the server would refuse one.
        """
        decoded = decode_events(encode_events(events), "application/json")
        if decoded.refused:
            raise ValueError(f"refused: {decoded.refused}")
        self.events += [event for _, event in decoded.events]

    def send_frame(self, frame: Frame) -> None:
        """Keep a frame."""
        self.frames.append(decode_frame(*encode_frame(frame)))

    def of(self, kind: str) -> list[Event]:
        """Return the events of a type, in the order they came."""
        return [event for event in self.events if event.type == kind]
