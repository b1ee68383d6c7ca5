"""Signatures: signed posts (Standard Webhooks 1.0), signed documents (Ed25519), sealed envelopes (DSSE).

Every verifier here works on bytes, compares in constant time, and turns anything malformed into
`SignatureError`: a hostile header or document is a refusal, never another exception.

Sources: standard-webhooks/standard-webhooks spec/standard-webhooks.md 1.0.0; RFC 8032 (Ed25519);
RFC 8785 (canonical JSON); secure-systems-lab/dsse protocol.md (envelope and PAE).
"""

import base64
import binascii
import hashlib
import hmac
import os
import secrets as random_secrets
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

TOLERANCE_S = 300  # both ways, as the reference library: a symmetric window is 600 s wide in all
SECRET_PREFIX = "whsec_"  # noqa: S105  (a prefix, not a secret)
SECRET_BYTES = 32  # the specification asks for 24 to 64
MAX_SIGNATURES = 32  # rotation needs two or three; more is somebody making us hash


class SignatureError(Exception):
    """Something is not signed as it should be. The message says what; it never holds a secret.

    `timestamp_only` is true when the signature itself is right and only its time is outside the
    tolerance: the sender's clock is off, and it may be told the server's time.
    """

    def __init__(self, detail: str, *, timestamp_only: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.timestamp_only = timestamp_only


# --- signed posts ---------------------------------------------------------------------------------


def new_secret() -> str:
    """Return a new run secret: `whsec_` and 32 random bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(random_secrets.token_bytes(SECRET_BYTES)).decode("ascii")


def _secret_bytes(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("a secret must be 'whsec_' followed by base64") from error
    if not key:
        raise ValueError("a secret must not be empty")
    return key


def _mac(key: bytes, webhook_id: str, timestamp: str, body: bytes) -> bytes:
    digest = hmac.new(key, f"{webhook_id}.{timestamp}.".encode("ascii"), hashlib.sha256)
    digest.update(body)
    return digest.digest()


def _check_token(webhook_id: str) -> None:
    # The signed bytes are joined by dots, so an id with a dot could move bytes between id and time.
    if not 1 <= len(webhook_id) <= 256 or "." in webhook_id:
        raise SignatureError("webhook-id: must be 1 to 256 characters without '.'")
    if not all("!" <= character <= "~" for character in webhook_id):
        raise SignatureError("webhook-id: must be printable ASCII without spaces")


def sign_webhook(secret: str, webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """Return the `webhook-signature` entry (`v1,…`) for the body bytes exactly as they are sent.

    Raises:
        ValueError: the secret is not `whsec_` + base64.
        SignatureError: the id may not be signed (a dot, a space, not ASCII, too long).
    """
    _check_token(webhook_id)
    mac = _mac(_secret_bytes(secret), webhook_id, str(int(timestamp_s)), body)
    return "v1," + base64.b64encode(mac).decode("ascii")


def verify_webhook(
    secrets: Sequence[str],
    webhook_id: str | None,
    timestamp: str | None,
    signature: str | None,
    body: bytes,
    now_s: float,
) -> None:
    """Check one signed post against every valid secret of the run.

    Args:
        secrets: `whsec_…`, several while a secret is being rotated. A broken one is skipped.
        webhook_id, timestamp, signature: the three headers as received, None when absent.
        body: the bytes as received, before decompression.
        now_s: the server's clock, Unix seconds.

    Raises:
        SignatureError: anything at all is wrong; `timestamp_only` as its docstring says.
    """
    if not webhook_id or not timestamp or not signature:
        missing = [
            name
            for name, value in (
                ("webhook-id", webhook_id),
                ("webhook-timestamp", timestamp),
                ("webhook-signature", signature),
            )
            if not value
        ]
        raise SignatureError(f"missing header: {', '.join(missing)}")
    _check_token(webhook_id)
    # Digits only: the reference library also takes '1e9' and '1.5', which other verifiers refuse.
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise SignatureError("webhook-timestamp: must be whole Unix seconds, digits only")
    given = list(_v1_signatures(signature))
    if not given:
        raise SignatureError("webhook-signature: has no readable 'v1,' entry")
    if not _any_match(secrets, webhook_id, timestamp, given, body):
        raise SignatureError("webhook-signature: matches no valid secret of this run")
    # Only now the time: a stranger must not learn from the answer that a timestamp was the problem.
    if abs(now_s - int(timestamp)) > TOLERANCE_S:
        raise SignatureError(
            f"webhook-timestamp: {timestamp} is more than {TOLERANCE_S} s from the server's clock",
            timestamp_only=True,
        )


def _v1_signatures(header: str) -> Iterable[bytes]:
    for entry in header.split(" ", MAX_SIGNATURES)[:MAX_SIGNATURES]:
        version, comma, text = entry.partition(",")
        if version != "v1" or not comma:
            continue  # other versions are other people's business, as the specification says
        try:
            yield base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue


def _any_match(
    secrets: Sequence[str], webhook_id: str, timestamp: str, given: list[bytes], body: bytes
) -> bool:
    matched = False
    for secret in secrets:
        try:
            expected = _mac(_secret_bytes(secret), webhook_id, timestamp, body)
        except ValueError:
            continue
        for candidate in given:
            matched |= hmac.compare_digest(expected, candidate)
    return matched


def _get_bytes(method: str, path: str) -> bytes:
    return f"{method.upper()} {path}".encode()


def sign_get(secret: str, webhook_id: str, timestamp_s: int, method: str, path: str) -> str:
    """Sign a request without a body: the signed text is `{id}.{ts}.{METHOD} {path?query}`."""
    return sign_webhook(secret, webhook_id, timestamp_s, _get_bytes(method, path))


def verify_get(
    secrets: Sequence[str],
    webhook_id: str | None,
    timestamp: str | None,
    signature: str | None,
    method: str,
    path: str,
    now_s: float,
) -> None:
    """Check a signed request without a body. Raises as `verify_webhook`."""
    try:
        signed = _get_bytes(method, path)
    except UnicodeEncodeError as error:
        raise SignatureError("path: is not valid text") from error
    verify_webhook(secrets, webhook_id, timestamp, signature, signed, now_s)


# --- Ed25519 keys ---------------------------------------------------------------------------------


def fingerprint(public_bytes: bytes) -> str:
    """Return the key's name: lower-case hex SHA-256 of the 32 raw public bytes."""
    return hashlib.sha256(public_bytes).hexdigest()


class SigningKey:
    """One Ed25519 private key and its name."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_bytes: bytes = private.public_key().public_bytes_raw()
        self.key_id: str = fingerprint(self.public_bytes)

    @classmethod
    def generate(cls) -> "SigningKey":
        """Return a new key that is stored nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SigningKey":
        """Read a PKCS #8 PEM file.

        Raises:
            ValueError: the file holds no unencrypted Ed25519 key.
            OSError: it cannot be read.
        """
        try:
            private = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"{path}: is not an unencrypted PEM private key") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError(f"{path}: holds another kind of key, Ed25519 is needed")
        return cls(private)

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> "SigningKey":
        """Read the key file, or make one (mode 0600). Processes that race end with the same key.

        The new key is written whole under another name and then linked: whoever links first has
        made the key, everyone else reads that one, and nobody ever sees half a file.
        """
        target = Path(path)
        if target.exists():
            return cls.load(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        pem = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, target)
            except FileExistsError:
                pass
            else:
                fsync_directory(target.parent)
        finally:
            os.unlink(temporary)
        return cls.load(target)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""
        return self._private.sign(message)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make a new or renamed name in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _base64_exact(value: object, length: int | None, where: str) -> bytes:
    """Decode base64 in its one canonical spelling, so that a signed text has one form only."""
    if not isinstance(value, str):
        raise SignatureError(f"{where}: must be base64 text")
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SignatureError(f"{where}: is not base64") from error
    if base64.b64encode(raw).decode("ascii") != value:
        raise SignatureError(f"{where}: is not canonical base64")
    if length is not None and len(raw) != length:
        raise SignatureError(f"{where}: must be {length} bytes, is {len(raw)}")
    return raw


def _check_ed25519(public: bytes, signature: bytes, message: bytes, where: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"{where}: does not fit the content and the key") from error


# --- signed documents -----------------------------------------------------------------------------

_ENVELOPE_FIELDS = ("key_id", "public_key", "signature")


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the RFC 8785 form.

    Raises:
        ValueError: the document has no canonical form (NaN, an integer beyond 2^53, a lone
            surrogate, something that is not JSON).
    """
    try:
        return rfc8785.dumps(dict(document))
    except (rfc8785.CanonicalizationError, UnicodeError, RecursionError, TypeError) as error:
        raise ValueError(f"has no canonical JSON form: {error}") from error


def sign_document(document: Mapping[str, Any], key: SigningKey) -> dict[str, Any]:
    """Return a copy with `key_id`, `public_key` and `signature` added.

    The signature covers the RFC 8785 form of everything but `signature` itself, the key's name
    included.

    Raises:
        ValueError: the document has no canonical form.
    """
    signed = {name: value for name, value in document.items() if name not in _ENVELOPE_FIELDS}
    signed["key_id"] = key.key_id
    signed["public_key"] = base64.b64encode(key.public_bytes).decode("ascii")
    signed["signature"] = base64.b64encode(key.sign(canonical(signed))).decode("ascii")
    return signed


def verify_document(document: object, trusted: Collection[str] | None) -> dict[str, Any]:
    """Check a document made by `sign_document` and return its content without the three added fields.

    Args:
        document: decoded JSON, from anybody.
        trusted: fingerprints (`SigningKey.key_id`) of pinned keys. None: only consistent with the
            key it names itself, which proves nothing about who signed.

    Raises:
        SignatureError: altered, unsigned, or signed by a key that is not trusted.
    """
    if not isinstance(document, Mapping):
        raise SignatureError("document: must be a JSON object")
    public = _base64_exact(document.get("public_key"), 32, "public_key")
    signature = _base64_exact(document.get("signature"), 64, "signature")
    key_id = document.get("key_id")
    if key_id != fingerprint(public):
        raise SignatureError("key_id: is not the fingerprint of public_key")
    if trusted is not None and key_id not in trusted:
        raise SignatureError(f"key_id: {key_id} is not a trusted key")
    signed = {name: value for name, value in document.items() if name != "signature"}
    try:
        message = canonical(signed)
    except ValueError as error:
        raise SignatureError(f"document: {error}") from error
    _check_ed25519(public, signature, message, "signature")
    return {name: value for name, value in document.items() if name not in _ENVELOPE_FIELDS}


# --- DSSE -----------------------------------------------------------------------------------------


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return what DSSE signs: `DSSEv1 SP len(type) SP type SP len(body) SP body`, lengths in bytes."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def seal_envelope(payload_type: str, payload: bytes, key: SigningKey) -> dict[str, Any]:
    """Return a DSSE envelope over exactly these payload bytes.

    Each signature carries `public_key` beside DSSE's own `keyid` and `sig`, so that a reader
    without our key list can still check that the envelope is consistent.
    """
    signature = key.sign(pre_authentication_encoding(payload_type, payload))
    return {
        "payloadType": payload_type,
        "payload": base64.b64encode(payload).decode("ascii"),
        "signatures": [
            {
                "keyid": key.key_id,
                "sig": base64.b64encode(signature).decode("ascii"),
                "public_key": base64.b64encode(key.public_bytes).decode("ascii"),
            }
        ],
    }


def open_envelope(envelope: object, trusted: Collection[str] | None) -> bytes:
    """Return the payload of a DSSE envelope, once one of its signatures has been checked.

    Args:
        envelope: decoded JSON, from anybody.
        trusted: fingerprints of pinned keys; None accepts any key the envelope names itself.

    Raises:
        SignatureError: no signature by a (trusted) key fits these bytes.
    """
    if not isinstance(envelope, Mapping):
        raise SignatureError("envelope: must be a JSON object")
    kind, rows = envelope.get("payloadType"), envelope.get("signatures")
    if not isinstance(kind, str) or not isinstance(rows, list) or not 1 <= len(rows) <= MAX_SIGNATURES:
        raise SignatureError("envelope: needs payloadType and signatures")
    payload = _base64_exact(envelope.get("payload"), None, "payload")
    try:
        message = pre_authentication_encoding(kind, payload)
    except UnicodeEncodeError as error:
        raise SignatureError("payloadType: is not valid text") from error
    problem = SignatureError("signatures: none is by a trusted key")
    for number, row in enumerate(rows):
        where = f"signatures[{number}]"
        try:
            if not isinstance(row, Mapping):
                raise SignatureError(f"{where}: must be an object")
            public = _base64_exact(row.get("public_key"), 32, f"{where}.public_key")
            signature = _base64_exact(row.get("sig"), 64, f"{where}.sig")
            if row.get("keyid") != fingerprint(public):
                raise SignatureError(f"{where}.keyid: is not the fingerprint of public_key")
            if trusted is not None and row["keyid"] not in trusted:
                raise SignatureError(f"{where}.keyid: {row['keyid']} is not a trusted key")
            _check_ed25519(public, signature, message, where)
        except SignatureError as error:
            problem = error
        else:
            return payload
    raise problem
