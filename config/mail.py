"""How mail leaves this server: by a relay an operator names, else printed by the worker.

Read from the environment like all settings, and taken in by `config.settings`.
"""

from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from config import env

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PORTS = {"smtp": 587, "smtps": 465}


def read(public_host: str) -> dict[str, Any]:
    """Return Django's settings of mail.

    Raises:
        ImproperlyConfigured: the relay's address is none.
    """
    address = env.text(
        "ANDON_MAIL_URL",
        shown="none: the worker prints mail",
        about="relay for mail, `smtp://USER:PASSWORD@HOST` (STARTTLS unless on this machine) or `smtps://…`",
    )
    sender = env.text(
        "ANDON_MAIL_FROM",
        f"Andon <andon@{public_host}>",
        shown="`andon@` and the host of ANDON_PUBLIC_URL",
        about="whom mail comes from",
    )
    common = {"DEFAULT_FROM_EMAIL": sender, "EMAIL_SUBJECT_PREFIX": "", "EMAIL_TIMEOUT": 10}
    if not address:
        return common | {"EMAIL_BACKEND": "django.core.mail.backends.console.EmailBackend"}
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/") or parts.query:
        # The value may hold a password, so it is not repeated.
        raise ImproperlyConfigured("ANDON_MAIL_URL: expected smtp[s]://[USER:PASSWORD@]HOST[:PORT]")
    return common | {
        "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": port or _PORTS[parts.scheme],
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": parts.scheme == "smtps",
        # What a link in a mail opens must not pass the network in clear.
        "EMAIL_USE_TLS": parts.scheme == "smtp" and parts.hostname not in _LOOPBACK,
    }
