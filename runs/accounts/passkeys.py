"""Passkeys: a challenge for one page of one session, used once, within two minutes.

What is signed is checked by python-fido2 (challenge, origin, host, that the device checked the person).
"""

import json
import struct
import time
from typing import Any

from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.forms import AuthenticateWebAuthnForm
from allauth.mfa.webauthn.internal import auth
from django.forms import Form
from django.http import HttpRequest

from runs.models import Person

CHALLENGE_S = 120.0
LONGEST = 20_000  # an assertion is about 1 kB, a registration up to a few
_ISSUED = "andon.passkey"


def challenge(request: HttpRequest, person: Person, purpose: str) -> dict[str, Any]:
    """Return what the browser signs to prove that it is this person, for the address `purpose` only."""
    options = _plain(auth.begin_authentication(person))
    request.session[_ISSUED] = {"at": time.time(), "for": purpose}
    return options


def proved(request: HttpRequest, person: Person, given: str) -> Authenticator | None:
    """Return the passkey that signed this session's challenge for this very address, None for anything else.

    The challenge is used up whatever the answer.
    """
    issued = request.session.pop(_ISSUED, None)
    is_for_this = (
        isinstance(issued, dict)
        and issued.get("for") == request.path
        and 0 <= time.time() - issued.get("at", 0) < CHALLENGE_S
    )
    try:
        form = AuthenticateWebAuthnForm(user=person, data={"credential": given})
        if not is_for_this or not fits(form):
            return None
    finally:
        auth.clear_state()
    found: Authenticator = form.cleaned_data["credential"]
    found.record_usage()
    return found


def read(given: str) -> dict[str, Any] | None:
    """Return what a browser sent as a credential, None when it has not the shape of one (WebAuthn JSON)."""
    if len(given) > LONGEST:
        return None
    try:
        document = json.loads(given)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(response := document.get("response"), dict):
        return None
    texts = [document.get(name) for name in ("id", "rawId", "type")]
    texts += [value for name, value in response.items() if name != "transports"]
    return document if all(isinstance(text, str) for text in texts) else None


def fits(form: Form) -> bool:
    """Return whether a form of allauth takes the credential it was given.

    Below it a parser of CBOR and DER reads what a stranger made up; whatever it stumbles over is a no.
    """
    if read(form.data.get("credential", "")) is None:
        return False
    try:
        return bool(form.is_valid())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error):
        return False


def for_sign_in(request: HttpRequest) -> dict[str, Any]:
    """Return what the browser signs to say who it is."""
    return _plain(auth.begin_authentication(None))


def for_adding(request: HttpRequest, person: Person) -> dict[str, Any]:
    """Return what the browser needs to make a passkey that signs in by itself."""
    return _plain(auth.begin_registration(person, True))


def _plain(options: Any) -> dict[str, Any]:
    """Return options as JSON-ready data; python-fido2 gives bytes as base64url already."""
    plain: dict[str, Any] = json.loads(json.dumps(options, default=dict))
    return plain
