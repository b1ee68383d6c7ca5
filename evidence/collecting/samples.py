"""Raw samples: kept only where a policy names them, and encrypted to the dossier's own key.

A lock or an exported bag cannot give bytes back. Erasing the key erases the samples wherever they lie,
under COMPLIANCE and in copies too, and leaves chain, seals and digests true. Where only a node can read
them, its agent gets the public half and encrypts them before they leave it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.db import transaction
from django.utils import timezone

from andon.sample_cipher import NotReadable, decrypted, encrypted, new_secret, public_of
from evidence import custody, sources
from evidence.collecting.outcomes import Nothing
from evidence.models import Dossier, Item, SampleKey, StoredObject, VaultRequest
from evidence.refused import Refused
from evidence.retention import two_people
from evidence.retention.two_people import Reason
from evidence.vault import vault
from runs.models import Person, Role

_KIND = VaultRequest.Kind.ERASURE


class Erased(Exception):
    """The key of these samples was erased, or these are not samples of this dossier."""


def public_key(dossier: Dossier) -> bytes:
    """Return the public half of a dossier's key; made the first time.

    Raises:
        Nothing: the key was erased: raw samples are never stored as they are.
    """
    made = {"key": new_secret(), "made_at": timezone.now()}
    kept, _ = SampleKey.objects.get_or_create(dossier=dossier, defaults=made)
    if kept.key is None:
        raise Nothing("the key of this dossier's raw samples was erased")
    return public_of(bytes(kept.key))


def encrypt_offer(uri: str, target: Path, dossier: Dossier) -> None:
    """Write an offered file that this server may read to `target`, encrypted.

    Raises:
        Nothing: the key was erased.
        SourceError: it does not give its bytes.
    """
    public = public_key(dossier)
    source = sources.open_uri(uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open() as file, target.open("wb") as out:
        for block in encrypted(file, source.bytes_total, public):
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
    return _plain(one, bytes(kept.key))


def _plain(one: StoredObject, secret: bytes) -> Iterator[bytes]:
    try:
        yield from decrypted(vault().open(one.key, one.version_id), secret)
    except NotReadable as error:
        raise Erased(str(error)) from error


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
