"""Raw samples as they are kept: encrypted to a public key, so that who encrypts needs no secret.

The node that has the samples gets the public half of its dossier's key; the private half never leaves the
server, and erasing it there erases the samples wherever they lie. Each file has a key of its own, agreed
between that public key and a throw-away one whose public half stands in the file:

    magic (16) · throw-away public key, X25519 (32) · nonce prefix (8) · chunks, AES-256-GCM, 1 MiB and a tag
"""

import os
from collections.abc import Iterator
from typing import IO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from andon.hashing import chunks

MAGIC = b"andon-samples/2\n"
KEY_BYTES = 32
_PREFIX_BYTES = 8  # of the nonce; the number of the chunk is the rest
_CHUNK_BYTES = 1 << 20
_TAG_BYTES = 16
HEAD_BYTES = len(MAGIC) + KEY_BYTES + _PREFIX_BYTES


class NotReadable(Exception):
    """A chunk was changed, cut or moved, or the file belongs to another key."""


def new_secret() -> bytes:
    """Return the private half of a new key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(secret: bytes) -> bytes:
    """Return the public half of a key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def encrypted(file: IO[bytes], bytes_total: int, public: bytes) -> Iterator[bytes]:
    """Return the first `bytes_total` bytes of a file, encrypted to a public key.

    Raises:
        ValueError: `public` is no key.
        OSError: the file became shorter.
    """
    mine = X25519PrivateKey.generate()
    told = mine.public_key().public_bytes_raw()
    cipher = _cipher(mine, public, told + public)
    prefix = os.urandom(_PREFIX_BYTES)
    yield MAGIC + told + prefix
    left, number = bytes_total, 0
    while True:
        plain = b"".join(chunks(file, min(_CHUNK_BYTES, left)))
        if len(plain) < min(_CHUNK_BYTES, left):
            raise OSError("became shorter while it was read")
        left -= len(plain)
        # Which chunk is the last is authenticated: a file that was cut does not read as a shorter one.
        yield cipher.encrypt(_nonce(prefix, number), plain, b"more" if left else b"last")
        if not left:
            return
        number += 1


def decrypted(file: IO[bytes], secret: bytes) -> Iterator[bytes]:
    """Return the plain bytes of an encrypted file, chunk by chunk; closes it.

    Raises:
        NotReadable: while reading, at the first chunk that is not as it was written.
    """
    with file:
        head = b"".join(chunks(file, HEAD_BYTES))
        if not head.startswith(MAGIC) or len(head) < HEAD_BYTES:
            raise NotReadable("these are no samples that Andon encrypted")
        told, prefix = head[len(MAGIC) : -_PREFIX_BYTES], head[-_PREFIX_BYTES:]
        try:
            cipher = _cipher(X25519PrivateKey.from_private_bytes(secret), told, told + public_of(secret))
        except ValueError as error:
            raise NotReadable("its head was changed") from error
        block, number = _block(file), 0
        while True:
            after = _block(file)
            try:
                yield cipher.decrypt(_nonce(prefix, number), block, b"more" if after else b"last")
            except InvalidTag as error:
                says = f"chunk {number} is not what was stored, or belongs to another key"
                raise NotReadable(says) from error
            if not after:
                return
            block, number = after, number + 1


def _cipher(mine: X25519PrivateKey, theirs: bytes, salt: bytes) -> AESGCM:
    shared = mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    return AESGCM(HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=MAGIC).derive(shared))


def _block(file: IO[bytes]) -> bytes:
    return b"".join(chunks(file, _CHUNK_BYTES + _TAG_BYTES))


def _nonce(prefix: bytes, number: int) -> bytes:
    return prefix + number.to_bytes(4, "big")
