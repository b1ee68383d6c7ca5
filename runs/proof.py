"""A person proves again who they are: one mechanism for everything dangerous.

`prove_again` wants the proof on the very request that decides (approval, release, deletion): a session left
open must not approve. `prove_recently` also takes one given in this session in the last five minutes
(roles, tokens, secrets). A proof is the password, a passkey with its own check of the person, or a code.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from allauth.account.internal.flows.login import get_authentication_records, record_authentication
from allauth.mfa.base.forms import ReauthenticateForm
from allauth.mfa.models import Authenticator
from django.conf import settings
from django.http import HttpRequest

from runs import throttle
from runs.accounts import audit, passkeys
from runs.models import AccountEvent, Person

NOTHING_GIVEN = "Not done: give your password, a code, or your passkey. Nothing was changed."
NOT_PROVEN = "Not done: the password does not fit. Nothing was changed."
CODE_WRONG = "Not done: the code does not fit, or was used already. Nothing was changed."
PASSKEY_WRONG = "Not done: the passkey was not taken. Try it again. Nothing was changed."
NO_WAY = (
    "Not done: you sign in by SSO only, which proves nothing here. "
    "Sign in again and add a passkey on your account's page."
)
LONGEST_PASSWORD = 4096  # hashing more than this would only cost time


class NotAgain(Exception):
    """The person did not prove again who they are; `says` is for them."""

    def __init__(self, says: str, status: int) -> None:
        super().__init__(says)
        self.says, self.status = says, status


@dataclass(frozen=True, slots=True)
class Ways:
    """By what a person can prove who they are."""

    password: bool
    passkey: bool
    code: bool

    @property
    def count(self) -> int:
        """How many there are."""
        return self.password + self.passkey + self.code


def ways(person: Person) -> Ways:
    """Return by what a person can prove who they are; all False for one who signs in by SSO only."""
    kinds = set(Authenticator.objects.filter(user=person).values_list("type", flat=True))
    return Ways(
        password=person.has_usable_password(),
        passkey=Authenticator.Type.WEBAUTHN in kinds,
        code=bool(kinds & {Authenticator.Type.TOTP, Authenticator.Type.RECOVERY_CODES}),
    )


def recent(request: HttpRequest, person: Person) -> datetime | None:
    """Return when this session last saw a proof, None when that is too long ago.

    Signing in by password or passkey is one. Signing in by SSO counts only for who has no other way, so
    that they can add a passkey: the provider may have asked them nothing.
    """
    counted = {"password", "mfa", "invitation"}
    if not ways(person).count:
        counted.add("socialaccount")
    moments = [
        float(one["at"]) for one in get_authentication_records(request, person) if one["method"] in counted
    ]
    last = max(moments, default=0.0)
    lasts_s: float = settings.PROOF_LASTS.total_seconds()
    return datetime.fromtimestamp(last, UTC) if time.time() - last < lasts_s else None


def prove_recently(request: HttpRequest, person: Person) -> None:
    """Take a proof of the last minutes, else want one on this request.

    Raises:
        NotAgain: wrong, missing, or too many tries.
    """
    given = any(request.POST.get(name) for name in ("password", "code", "passkey"))
    if given or not recent(request, person):
        prove_again(request, person)


def prove_again(request: HttpRequest, person: Person) -> None:
    """Check the proof on the very request that decides, and remember it in the session.

    Raises:
        NotAgain: wrong, missing, or too many tries.
    """
    post = request.POST
    if post.get("passkey"):
        how = _by_passkey(request, person, post["passkey"])
    else:
        how = prove_by_words(request, person, password=post.get("password", ""), code=post.get("code", ""))
    extra = {} if how == "password" else {"type": how}
    record_authentication(
        request, person, "password" if how == "password" else "mfa", reauthenticated=True, **extra
    )
    # Sessions end up in the database; a hundred approvals must not grow this one.
    kept = get_authentication_records(request, person)[-5:]
    request.session["account_authentication_methods"] = kept


def prove_by_words(request: HttpRequest, person: Person, *, password: str = "", code: str = "") -> str:
    """Check a password or a code, for callers without a session too; returns what it was.

    Raises:
        NotAgain: wrong, missing, or too many tries.
    """
    if not (password or code):
        raise NotAgain(NOTHING_GIVEN if ways(person).count else NO_WAY, 403)
    if wait := throttle.wait_s(request, person.username):
        raise NotAgain(f"Too many tries. Try again in {wait} s.", 429)
    if password:
        right = len(password) <= LONGEST_PASSWORD and person.check_password(password)
        how, wrong = "password", NOT_PROVEN
    else:
        form = ReauthenticateForm(user=person, data={"code": code[:32]})
        right, wrong = form.is_valid(), CODE_WRONG
        how = str(form.authenticator.type) if right else "code"
        if right:
            form.authenticator.record_usage()
    if not right:
        throttle.failed(request, person.username)
        _failed(request, person, how)
        raise NotAgain(wrong, 403)
    throttle.forget(request, person.username)
    _proved(request, person, how)
    return how


def _by_passkey(request: HttpRequest, person: Person, given: str) -> str:
    if passkeys.proved(request, person, given) is None:
        _failed(request, person, "passkey")
        raise NotAgain(PASSKEY_WRONG, 403)
    _proved(request, person, "passkey")
    return "passkey"


def _proved(request: HttpRequest, person: Person, how: str) -> None:
    audit.note(AccountEvent.Kind.PROOF, request=request, by=person, method=how, at=request.path[:200])


def _failed(request: HttpRequest, person: Person, how: str) -> None:
    audit.note(
        AccountEvent.Kind.PROOF_FAILED, request=request, about=person, method=how, at=request.path[:200]
    )
