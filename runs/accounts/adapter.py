"""What allauth asks of the product: who may become a person, how it proves somebody, what it keeps secret."""

import base64
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

from runs import proof
from runs.accounts import audit
from runs.accounts.address import client_address
from runs.models import AccountEvent, Person


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth has no types
    """Sign-in by our own pages, and one way to prove it is still the same person."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Nobody becomes a person by a form; `SocialAdapter` decides for SSO."""
        return False

    def add_message(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing: our pages say what happened, in the product's words."""

    def send_notification_mail(self, *args: Any, **kwargs: Any) -> None:
        """Send nothing: the account's own page and the log of accounts tell of every change."""

    def get_client_ip(self, request: HttpRequest) -> str:
        """Return the address that brakes count by."""
        return client_address(request) or "0.0.0.0"  # noqa: S104  (no address is one bucket)

    def is_reauthentication_required(self, *, app: str, **kwargs: Any) -> bool:
        """Ask for a proof unless there is a recent one; `runs.proof` decides what that is."""
        person = self.request.user
        return not (isinstance(person, Person) and proof.recent(self.request, person))

    def get_reauthentication_methods(self, user: Any) -> list[dict[str, Any]]:
        """Send people to the one page where they prove who they are."""
        return [{"id": "prove", "description": "", "url": reverse("prove")}] if user.is_authenticated else []


class FactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]
    """Passkeys for the public host, seeds encrypted at rest."""

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        """Return whose passkeys these are: the host of ANDON_PUBLIC_URL, whatever a proxy calls us."""
        return {"id": settings.PUBLIC_HOST, "name": "Andon"}

    def get_public_key_credential_user_entity(self, user: Person) -> dict[str, Any]:
        """Return how a passkey's chooser names a person."""
        entity: dict[str, Any] = super().get_public_key_credential_user_entity(user)
        return entity | {"name": user.username, "display_name": user.username}

    def get_totp_label(self, user: Person) -> str:
        """Return how an app of codes names a person here."""
        return user.username

    def encrypt(self, text: str) -> str:
        """Return a seed as the database keeps it: a dump alone makes no codes."""
        return _box().encrypt(text.encode()).decode("ascii")

    def decrypt(self, encrypted_text: str) -> str:
        """Return a seed as it was."""
        return _box().decrypt(encrypted_text.encode("ascii")).decode()


def _box() -> Fernet:
    derived = HKDF(SHA256(), 32, salt=None, info=b"andon seeds of codes").derive(settings.SECRET_KEY.encode())
    return Fernet(base64.urlsafe_b64encode(derived))


class SocialAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]
    """The one OIDC provider: identity by its subject, never by an address."""

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        """Let an unknown person in when the operator said so; they belong to nothing yet."""
        return bool(settings.SIGN_UP == "sso")

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Drop the addresses a provider tells: they link no accounts and need no verification here."""
        sociallogin.email_addresses = []

    def save_user(self, request: HttpRequest, sociallogin: Any, form: Any = None) -> Person:
        """Make the person, and say so in the log."""
        person: Person = super().save_user(request, sociallogin, form)
        audit.note(AccountEvent.Kind.SIGNED_UP, request=request, by=person)
        return person

    def get_connect_redirect_url(self, request: HttpRequest, socialaccount: Any) -> str:
        """Return to the account's page."""
        return reverse("account")
