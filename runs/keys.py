"""The server's signing key, the keys before it, and how one follows another."""

import base64
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from andon import keys
from andon.keys import KeyRing
from andon.signing import SigningKey, fsync_directory
from runs.models import Directive, ServerKey

# Advisory locks share one number space (see runs.locks): the first key names the use.
_HANDOVER = 0x0B01
_read: dict[Path, tuple[tuple[int, int], SigningKey]] = {}


def server_key() -> SigningKey:
    """Return the key that signs directives, permits and seals; made on first use.

    The file is looked at every time, so that every process takes a new key as soon as it is there.

    Raises:
        OSError: the key file cannot be read or written.
        ValueError: it holds no Ed25519 key.
    """
    path = Path(settings.SIGNING_KEY_FILE)
    try:
        stamp = _stamp(path)
    except FileNotFoundError:
        SigningKey.load_or_create(path)
        stamp = _stamp(path)
    known = _read.get(path)
    if known is None or known[0] != stamp:
        known = _read[path] = (stamp, SigningKey.load(path))
    return known[1]


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_ino, about.st_mtime_ns


def published() -> dict[str, Any]:
    """Return `/.well-known/andon-keys.json`: the key in use, then those before it."""
    current = server_key()
    rows = list(ServerKey.objects.all())
    if all(row.key_id != current.key_id for row in rows):
        rows.append(_first(current))
    given: dict[str, datetime] = {}
    stolen: set[str] = set()
    for row in rows:
        for one in row.handover or []:
            given[one["from"]] = row.since
            stolen |= {one["from"]} if one.get("stolen") else set()
    shown = [
        keys.PublicKey(
            key_id=row.key_id,
            public_key=base64.b64encode(bytes(row.public_key)).decode("ascii"),
            since=_rfc3339(row.since),
            until=None if row.key_id == current.key_id else _until(given.get(row.key_id), row),
            handover=row.handover,
            is_stolen=row.key_id in stolen,
        )
        for row in reversed(rows)
    ]
    return keys.document(sorted(shown, key=lambda key: key.until is not None))


def _until(given: datetime | None, row: ServerKey) -> str:
    # A key that was never handed over and is not in the file signs nothing: from then on, never.
    return _rfc3339(given or row.since)


def trusted_keys(*, for_evidence: bool = False) -> KeyRing:
    """Return the keys whose signatures this server accepts: its own, and those that led to it.

    A row of the table counts only through handovers that end at the key in the key file.

    Args:
        for_evidence: also a key that was stolen, for what it sealed until it was given up.
    """
    return keys.follow(published(), [server_key().key_id], for_evidence=for_evidence)


def public_keys(key_ids: set[str]) -> list[bytes]:
    """Return the raw public keys of trusted fingerprints among `key_ids`."""
    wanted = key_ids & set(trusted_keys(for_evidence=True))
    rows = {row.key_id: bytes(row.public_key) for row in ServerKey.objects.filter(key_id__in=wanted)}
    rows |= {server_key().key_id: server_key().public_bytes} if server_key().key_id in wanted else {}
    return sorted(rows.values())


def rotate(old_file: Path, new_file: Path, *, is_stolen: bool = False) -> SigningKey:
    """Hand over from the key in `old_file` to the one in `new_file`, made when it is not there.

    Both may be the server's key file: the new key then takes its place, and the old private key is gone.

    Args:
        is_stolen: the old key is given up: what it sealed until now stays, and nobody follows it.

    Raises:
        OSError, ValueError: a file holds no key, or cannot be written. Nothing has changed.
    """
    old = SigningKey.load(old_file)
    replaces = new_file.resolve() == old_file.resolve()
    # Beside the key: a rename is whole or not at all. A name that stays the same, so that a command that
    # was killed before it is finished by the next one.
    target = new_file.with_name(f"{new_file.name}.next") if replaces else new_file
    new = SigningKey.load_or_create(target)
    if new.key_id == old.key_id:
        raise ValueError(f"{new_file}: holds the same key as {old_file}")
    with transaction.atomic():
        _record(old, new, is_stolen)
    if replaces:
        os.replace(target, new_file)
        fsync_directory(new_file.parent)
    return new


def _record(old: SigningKey, new: SigningKey, is_stolen: bool) -> None:
    with connection.cursor() as cursor:  # of two commands at once, one hands over
        cursor.execute("SELECT pg_advisory_xact_lock(%s, 0)", [_HANDOVER])
    if not ServerKey.objects.filter(key_id=old.key_id).exists():
        _first(old).save()
    known = ServerKey.objects.filter(key_id=new.key_id).first()
    if known is not None:
        if (known.handover or [{}])[0].get("from") != old.key_id:
            raise ValueError(f"key {new.key_id} is known already, and does not follow {old.key_id}")
        return
    if any((row.handover or [{}])[0].get("from") == old.key_id for row in ServerKey.objects.all()):
        raise ValueError(f"key {old.key_id} was handed over already; a key hands over once")
    at = timezone.now()
    ServerKey.objects.create(
        key_id=new.key_id,
        public_key=new.public_bytes,
        since=at,
        handover=keys.given_up(old.key_id, new, _rfc3339(at))
        if is_stolen
        else keys.handover(old, new, _rfc3339(at)),
    )


def _first(key: SigningKey) -> ServerKey:
    """Return the row of the first key: since its file was written, or since the first thing it signed."""
    times = [timezone.now()]
    oldest = Directive.objects.order_by("id").values_list("since", flat=True).first()
    times += [oldest] if oldest is not None else []
    path = Path(settings.SIGNING_KEY_FILE)
    if path.exists():
        times.append(datetime.fromtimestamp(path.stat().st_mtime, UTC))
    return ServerKey(key_id=key.key_id, public_key=key.public_bytes, since=min(times))


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
