"""The server's signing key."""

from functools import cache

from django.conf import settings

from andon.signing import SigningKey


@cache
def server_key() -> SigningKey:
    """Return the key that signs directives, permits and manifests; made on first use.

    Raises:
        OSError: the key file cannot be read or written.
    """
    return SigningKey.load_or_create(settings.SIGNING_KEY_FILE)


def trusted_keys() -> list[str]:
    """Return the fingerprints (`key_id`) whose signatures this server accepts."""
    return [server_key().key_id]
