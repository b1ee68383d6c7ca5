"""How people sign in: settings of django-allauth, and of the one OIDC provider an operator may name.

Read from the environment like all settings, and taken in by `config.settings`.
"""

import tomllib
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

from config import env

PROVIDER = "sso"  # its name in addresses: the callback is /sign-in/sso/callback, whoever the provider is
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
# Those of `runs.models.Role`, which cannot be read before the settings are; a test holds the two equal.
ROLES = ("viewer", "responder", "approver", "vault_officer", "admin")


def _oidc() -> dict[str, Any] | None:
    """Return the provider as allauth takes it, None when none is named.

    Raises:
        ImproperlyConfigured: half of it is set, or the issuer is not reached by TLS.
    """
    issuer = env.text(
        "ANDON_OIDC_ISSUER",
        about="issuer of the OIDC provider people may sign in by (accounts.md)",
    ).rstrip("/")
    client = env.text("ANDON_OIDC_CLIENT_ID", about="this server's client id at the provider")
    secret = env.text(
        "ANDON_OIDC_CLIENT_SECRET", about="its client secret; better ANDON_OIDC_CLIENT_SECRET_FILE"
    )
    name = env.text("ANDON_OIDC_NAME", "SSO", about="what the button says: “Sign in with NAME”")
    scopes = env.words(
        "ANDON_OIDC_SCOPES", ["openid", "profile", "email"], about="what the provider is asked for"
    )
    given = {
        "ANDON_OIDC_ISSUER": issuer,
        "ANDON_OIDC_CLIENT_ID": client,
        "ANDON_OIDC_CLIENT_SECRET": secret,
    }
    if not any(given.values()):
        return None
    if missing := [variable for variable, value in given.items() if not value]:
        raise ImproperlyConfigured(
            f"{' and '.join(missing)} not set: an OIDC provider needs issuer, client id and secret"
        )
    parts = urlsplit(issuer)
    plain = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if not (parts.scheme == "https" or plain) or not parts.hostname or parts.query or parts.fragment:
        raise ImproperlyConfigured(
            f"ANDON_OIDC_ISSUER={issuer!r}: expected https://HOST[/PATH], as its discovery document says"
        )
    if "openid" not in scopes:
        raise ImproperlyConfigured("ANDON_OIDC_SCOPES: openid is missing; without it there is no identity")
    return {
        "provider_id": PROVIDER,
        "name": name,
        "client_id": client,
        "secret": secret,
        "settings": {"server_url": issuer, "oauth_pkce_enabled": True, "scope": scopes},
    }


def _roles() -> dict[str, dict[str, list[str]]]:
    """Return project → role → groups of the provider.

    Raises:
        ImproperlyConfigured: it is no such table.
    """
    given = env.text(
        "ANDON_OIDC_ROLES",
        about="TOML: which groups of the provider hold which role, by project (accounts.md)",
    )
    try:
        table = tomllib.loads(given)
    except tomllib.TOMLDecodeError as error:
        raise ImproperlyConfigured(f"ANDON_OIDC_ROLES: not TOML: {error}") from error
    for project, by_role in table.items():
        if not isinstance(by_role, dict):
            raise ImproperlyConfigured(f'ANDON_OIDC_ROLES: expected {project}.ROLE = ["GROUP", …]')
        for role, groups in by_role.items():
            if role not in ROLES:
                raise ImproperlyConfigured(
                    f"ANDON_OIDC_ROLES: {project}.{role} is no role; the roles are {', '.join(ROLES)}"
                )
            if not isinstance(groups, list) or not all(isinstance(one, str) for one in groups):
                raise ImproperlyConfigured(f'ANDON_OIDC_ROLES: {project}.{role}: expected ["GROUP", …]')
    return table


SIGN_UP = env.choice(
    "ANDON_SIGN_UP",
    "off",
    ("off", "sso"),
    about="who becomes a person uninvited: nobody, or whom the OIDC provider lets in (without a role)",
)
OIDC = _oidc()
SSO_ROLES = _roles()
SSO_GROUPS_CLAIM = env.text(
    "ANDON_OIDC_GROUPS", "groups", about="the claim in which the provider tells a person's groups"
)
for _variable, _given in (("ANDON_SIGN_UP=sso", SIGN_UP == "sso"), ("ANDON_OIDC_ROLES", bool(SSO_ROLES))):
    if _given and OIDC is None:
        raise ImproperlyConfigured(f"{_variable} needs ANDON_OIDC_ISSUER, its client id and its secret")

# How long a proof of who one is (password, passkey, code) counts for what is dangerous. Approvals, releases
# and deletions want one on the very request, whatever this says.
PROOF_LASTS = timedelta(minutes=5)
INVITATION_LASTS = timedelta(days=7)

ALLAUTH: dict[str, Any] = {
    "ACCOUNT_ADAPTER": "runs.accounts.adapter.AccountAdapter",
    "ACCOUNT_LOGIN_METHODS": {"username"},
    "ACCOUNT_SIGNUP_FIELDS": ["username*", "password1*"],
    "ACCOUNT_EMAIL_VERIFICATION": "none",
    "ACCOUNT_UNIQUE_EMAIL": False,
    "ACCOUNT_USERNAME_MIN_LENGTH": 1,
    "ACCOUNT_LOGIN_TIMEOUT": 600,  # between the password and the code
    "ACCOUNT_REAUTHENTICATION_REQUIRED": True,
    "ACCOUNT_REAUTHENTICATION_TIMEOUT": int(PROOF_LASTS.total_seconds()),
    # Wrong passwords are counted by `runs.throttle`, per name *and* address, so that nobody locks out
    # another. Codes are counted here per person: only who holds a session or the password may try one.
    # A six-digit code with one step either way is guessed with probability 3e-6 a try: 3e-4 a day at most.
    "ACCOUNT_RATE_LIMITS": {
        "login_failed": "60/m/ip,10/5m/key,100/d/key",
        "reauthenticate": "30/m/user",
        "reset_password": "10/m/ip",
        "mail_to": "3/15m/key",  # to one address, whoever asks
    },
    "ACCOUNT_EMAIL_CONFIRMATION_EXPIRE_DAYS": 1,
    "MFA_ADAPTER": "runs.accounts.adapter.FactorAdapter",
    "MFA_SUPPORTED_TYPES": ["totp", "webauthn", "recovery_codes"],
    "MFA_PASSKEY_LOGIN_ENABLED": True,
    "MFA_WEBAUTHN_USER_VERIFICATION": "required",
    "MFA_TOTP_ISSUER": "Andon",
    "MFA_TOTP_TOLERANCE": 1,
    "MFA_RATE_LIMITS": {"webauthn_login": "60/m/ip"},  # an office behind one address; nothing to guess
    "SOCIALACCOUNT_ADAPTER": "runs.accounts.adapter.SocialAdapter",
    "SOCIALACCOUNT_REAUTHENTICATION_REQUIRED": True,
    "SOCIALACCOUNT_EMAIL_AUTHENTICATION": False,  # an address proves nothing: people link SSO themselves
    "SOCIALACCOUNT_LOGIN_ON_GET": False,
    "SOCIALACCOUNT_STORE_TOKENS": False,
    "SOCIALACCOUNT_PROVIDERS": {"openid_connect": {"APPS": [OIDC] if OIDC else []}},
}
