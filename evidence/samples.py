"""Raw samples: kept only where a policy names them, and encrypted with the dossier's own key.

A lock or an exported bag cannot give bytes back. Erasing the key erases the samples wherever they lie,
under COMPLIANCE and in copies too, and leaves chain, seals and digests true.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from django.db import transaction
from django.utils import timezone

from evidence import custody, sources, two_people
from evidence.hashing import chunks
from evidence.models import Dossier, Item, SampleKey, StoredObject, VaultRequest
from evidence.outcomes import Nothing
from evidence.refused import Refused
from evidence.two_people import Reason
from evidence.vault import vault
from runs.models import Person, Role

MAGIC = b"andon-samples/1\n"
_CHUNK_BYTES = 1 << 20
_PREFIX_BYTES = 8  # of the nonce; the number of the chunk is the rest
_TAG_BYTES = 16
_KIND = VaultRequest.Kind.ERASURE


class Erased(Exception):
    """The key of these samples was erased, or these are not samples of this dossier."""


def encrypt_offer(uri: str, target: Path, dossier: Dossier) -> None:
    """Write an offered file to `target`, encrypted (AES-256-GCM by chunks of 1 MiB).

    Raises:
        Nothing: it lies on a node, or the key was erased: it is never stored as it is.
        SourceError: it does not give its bytes.
    """
    if not sources.is_readable_here(uri):
        raise Nothing("raw samples are taken only where this server reads them itself, to encrypt them first")
    key = _key_for(dossier)
    source = sources.open_uri(uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open() as file, target.open("wb") as out:
        for block in _encrypted(file, source.bytes_total, key):
            out.write(block)


def read_samples(*, one: StoredObject, person: Person, why: str) -> Iterator[bytes]:
    """Return the plain bytes of a stored sample file, chunk by chunk; reading is a custody row.

    Raises:
        Refused: not-allowed, reason-needed, erased.
        Erased: while reading, when a chunk was changed or cut.
    """
    dossier = Dossier.objects.select_related("run__project").get(items=one.item_id)
    two_people.need_role(dossier, person, "read raw samples", Role.VAULT_OFFICER)
    if not why.strip():
        raise Refused("reason-needed", "Say why they are read.")
    kept = SampleKey.objects.filter(dossier=dossier).first()
    if kept is None or kept.key is None:
        raise Refused("erased", "The key of these samples was erased: nobody can read them any more.")
    with transaction.atomic():
        custody.append(
            dossier,
            "samples read",
            who=str(person.opaque_id),
            item_name=one.item.name,
            object_sha256=one.sha256,
            data={"path": one.path, "why": why.strip()},
        )
    return _decrypted(vault().open(one.key, one.version_id), bytes(kept.key))


def why_not_erase(dossier: Dossier) -> Reason:
    """Return what stands in the way of erasing a dossier's raw samples, None when nothing does."""
    if not SampleKey.objects.filter(dossier=dossier, key__isnull=False).exists():
        return "nothing", "This dossier holds no raw samples, or their key is erased."
    return None


def request_erasure(*, dossier: Dossier, person: Person, why: str) -> VaultRequest:
    """Ask that a dossier's raw samples be erased, at any date: that is what their key is for.

    Raises:
        Refused: not-allowed, reason-needed, asked-already, nothing.
    """
    return two_people.ask(
        dossier=dossier, kind=_KIND, person=person, why=why, judge=why_not_erase, subject=subject
    )


def approve_erasure(*, request: VaultRequest, person: Person) -> VaultRequest:
    """Agree to it: the key is gone when this commits.

    Raises:
        Refused: not-allowed, over, not-you, changed, nothing.
    """
    return two_people.agree(
        request=request, kind=_KIND, person=person, judge=why_not_erase, subject=subject, then=_erase
    )


def subject(dossier: Dossier) -> dict[str, Any]:
    """Return what is erased: how many files of raw samples."""
    items = Item.objects.filter(dossier=dossier, kind="raw_samples")
    return {"files": StoredObject.objects.filter(item__in=items).count()}


def _erase(dossier: Dossier, request: VaultRequest) -> None:
    now = timezone.now()
    SampleKey.objects.filter(dossier=dossier).update(key=None, erased_at=now)
    request.state, request.done_at = VaultRequest.State.DONE, now
    request.save(update_fields=["state", "done_at"])


def _key_for(dossier: Dossier) -> bytes:
    made = {"key": AESGCM.generate_key(256), "made_at": timezone.now()}
    kept, _ = SampleKey.objects.get_or_create(dossier=dossier, defaults=made)
    if kept.key is None:
        raise Nothing("the key of this dossier's raw samples was erased")
    return bytes(kept.key)


def _encrypted(file: IO[bytes], bytes_total: int, key: bytes) -> Iterator[bytes]:
    cipher, prefix = AESGCM(key), os.urandom(_PREFIX_BYTES)
    yield MAGIC + prefix
    left, number = bytes_total, 0
    while True:
        plain = b"".join(chunks(file, min(_CHUNK_BYTES, left)))
        left -= len(plain)
        last = left <= 0 or not plain
        # Which chunk is the last is authenticated: a file that was cut does not read as a shorter one.
        yield cipher.encrypt(_nonce(prefix, number), plain, b"last" if last else b"more")
        if last:
            return
        number += 1


def _decrypted(file: IO[bytes], key: bytes) -> Iterator[bytes]:
    cipher = AESGCM(key)
    with file:
        head = b"".join(chunks(file, len(MAGIC) + _PREFIX_BYTES))
        if not head.startswith(MAGIC):
            raise Erased("these are no samples that Andon encrypted")
        block, number = _block(file), 0
        while True:
            after = _block(file)
            try:
                nonce = _nonce(head[len(MAGIC) :], number)
                yield cipher.decrypt(nonce, block, b"more" if after else b"last")
            except InvalidTag as error:
                raise Erased(f"chunk {number} is not what was stored, or belongs to another key") from error
            if not after:
                return
            block, number = after, number + 1


def _block(file: IO[bytes]) -> bytes:
    return b"".join(chunks(file, _CHUNK_BYTES + _TAG_BYTES))


def _nonce(prefix: bytes, number: int) -> bytes:
    return prefix + number.to_bytes(4, "big")
