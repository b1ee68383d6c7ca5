"""How evidence says no to a person."""


class Refused(Exception):
    """An action that may not be done. `code` is for machines, `says` for people."""

    def __init__(self, code: str, says: str) -> None:
        super().__init__(says)
        self.code = code
        self.says = says

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return 403 if self.code in {"not-allowed", "not-you"} else 409
