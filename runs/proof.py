"""A person proves again who they are, on the very request that decides."""

from django.http import HttpRequest

from runs import throttle
from runs.models import Person

NOT_PROVEN = "Not done: the password does not fit. Nothing was changed."


class NotAgain(Exception):
    """The person did not prove again who they are; `says` is for them."""

    def __init__(self, says: str, status: int) -> None:
        super().__init__(says)
        self.says, self.status = says, status


def prove_again(request: HttpRequest, person: Person) -> None:
    """Check the password on the very request that decides: a session left open must not approve.

    Raises:
        NotAgain: wrong, missing, or too many tries.
    """
    if wait := throttle.wait_s(request, person.username):
        raise NotAgain(f"Too many tries. Try again in {wait} s.", 429)
    if not person.check_password(request.POST.get("password", "")):
        throttle.failed(request, person.username)
        raise NotAgain(NOT_PROVEN, 403)
    throttle.forget(request, person.username)
