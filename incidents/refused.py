"""The one way in which an action on an incident says no."""

from collections.abc import Sequence


class Refused(Exception):
    """An action was refused.

    Args:
        code: stable name for machines ("requester", "changed-since-approval", ...).
        says: a sentence for the person who tried: what was wrong and what to do.
        changes: what changed, one sentence each, when that is the reason.
        status: HTTP status that fits when a machine asked.
    """

    def __init__(self, code: str, says: str, *, changes: Sequence[str] = (), status: int = 409) -> None:
        super().__init__(says)
        self.code = code
        self.says = says
        self.changes = list(changes)
        self.status = status
