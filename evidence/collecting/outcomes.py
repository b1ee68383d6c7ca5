"""What looking for an item's content may find instead of files."""

from typing import Any


class NotYet(Exception):
    """The item's content is not there yet; `after_s` is when to look again."""

    def __init__(self, says: str, after_s: float = 2.0) -> None:
        super().__init__(says)
        self.says = says
        self.after_s = after_s


class Nothing(Exception):
    """There is no such evidence and there will be none: the item is missing, and says why."""


class DoesNotApply(Exception):
    """The item is not applicable, and says why; that satisfies the gate.

    `shown_by` is the proof, kept in the custody row: directive and acknowledgements, events, or parts.
    """

    def __init__(self, says: str, shown_by: dict[str, Any] | None = None) -> None:
        super().__init__(says)
        self.shown_by = shown_by or {}
