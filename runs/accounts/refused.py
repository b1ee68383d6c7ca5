"""What an action on accounts answers when it does not do what was asked."""


class Refused(Exception):
    """Nothing was changed; `says` is a sentence for the person, `status` the HTTP status of the page."""

    def __init__(self, code: str, says: str, *, status: int = 409) -> None:
        super().__init__(says)
        self.code, self.says, self.status = code, says, status
