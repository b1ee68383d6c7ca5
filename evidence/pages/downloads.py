"""What may leave the vault by a browser: a bag of a size it can take, and single objects.

Every one is a row of the dossier's custody. Checkpoint bytes never leave this way: a bag names them by
version, and who may read the store fetches them there.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from django.db.models import Count, Q, QuerySet, Sum

from evidence import actions
from evidence.hashing import chunks
from evidence.kinds import CHECKPOINT_KINDS
from evidence.models import Dossier, StoredObject
from evidence.proof.exporting import INLINE_BYTES, export_bag, exported
from evidence.refused import Refused
from evidence.retention.two_people import Reason, need_role
from evidence.stores import spool
from evidence.vault import BytesDiffer, vault
from runs.formatting import inert
from runs.models import Person, Role

TAKERS = (Role.RESPONDER, Role.APPROVER, Role.VAULT_OFFICER, Role.ADMIN)
WHO = "A responder, approver, vault officer or admin of the project may take evidence out."
# A browser keeps half a gigabyte without trouble, and this server spools it while it is sent.
BAG_BYTES = 512 << 20
BAG_FILES = 20_000
_NAME_CHARS = 120
# What a file system or a shell would read as more than a name.
_NOT_IN_A_NAME = re.compile(r'[/\\:*?"<>|;\ufffd]+')


@dataclass(frozen=True, slots=True)
class BagSize:
    """What a bag for the browser holds, and what it only names in fetch.txt."""

    inline_bytes: int  # objects up to this size are inside
    files: int
    bytes_total: int
    named: int


def bag_size(dossier: Dossier) -> BagSize:
    """Return how large a dossier's bag is: the largest objects are left out until a browser can take it."""
    rows = exported(dossier)
    limit = INLINE_BYTES
    while True:
        inside = Q(bytes_total__lte=limit, deleted_at=None) & ~Q(item__kind__in=CHECKPOINT_KINDS)
        seen = rows.aggregate(
            n=Count("id", filter=inside), total=Sum("bytes_total", filter=inside), every=Count("id")
        )
        files, total = seen["n"], seen["total"] or 0
        if limit == 0 or (total <= BAG_BYTES and files <= BAG_FILES):
            return BagSize(limit, files, total, seen["every"] - files)
        limit //= 8


def why_no_bag(dossier: Dossier, wrong: tuple[str, ...]) -> Reason:
    """Return why a dossier's bag is not given to a browser, None when it is.

    Args:
        wrong: what the check of its chain and seals found.
    """
    if wrong:
        return "broken", f"The chain of custody is broken: {wrong[0]}. A bag of it would not verify."
    if not exported(dossier).exists():
        return "nothing", "Nothing is sealed yet."
    return None


def why_not_kind(kind: str) -> str:
    """Return why no object of a kind is given to a browser, "" when they are."""
    if kind in CHECKPOINT_KINDS:
        return "Checkpoint bytes do not leave by the browser; a vault officer reads them by a token."
    if kind == "raw_samples":
        return "Raw samples are encrypted with their dossier's key; only a vault officer reads them."
    return ""


def why_not_bytes(one: StoredObject) -> str:
    """Return why the bytes of one object cannot be given, "" when they can."""
    if one.deleted_at is not None:
        return f"Its bytes were deleted on {one.deleted_at:%d %b %Y}."
    if one.mismatch:
        return "What the store holds is not what was sealed."
    return ""


def why_not_object(one: StoredObject) -> str:
    """Return why an object is not given to a browser, "" when it is."""
    return why_not_kind(one.item.kind) or why_not_bytes(one)


def take_bag(*, dossier: Dossier, person: Person, wrong: tuple[str, ...]) -> IO[bytes]:
    """Write a dossier's bag below the data directory and return it open; the name on disk is gone already.

    It is whole before its first byte is sent: a store that fails gives a page, not half an archive.

    Raises:
        Refused: not-allowed, or a code of `why_no_bag`.
        VaultError, ValueError, OSError, andon.bag_zip.ZipLimit: see `export_bag`.
    """
    need_role(dossier, person, "export its bag", *TAKERS)
    if reason := why_no_bag(dossier, wrong):
        raise Refused(*reason)
    vault().check()  # before the custody says that something left
    with spool.directory(f"bag-{dossier.pk}") as place:
        path = place / bag_name(dossier)
        try:
            export_bag(
                dossier,
                path,
                who=str(person.opaque_id),
                inline_bytes=bag_size(dossier).inline_bytes,
                named_kinds=CHECKPOINT_KINDS,
            )
        except Exception:
            # The bag's own row says that it was exported, and has to stand in it before it is whole.
            actions.note_access(dossier=dossier, person=person, what="export failed")
            raise
        return path.open("rb")


def take_object(*, one: StoredObject, dossier: Dossier, person: Person) -> Iterator[bytes]:
    """Return the bytes of a stored object as they come from the store; what is stored is masked already.

    Raises:
        Refused: not-allowed, not-given.
        VaultError: the store does not give it; then nothing was taken.
        BytesDiffer: while reading, before the last bytes: they are not what was sealed.
    """
    need_role(dossier, person, "download its objects", *TAKERS)
    if reason := why_not_object(one):
        raise Refused("not-given", reason)
    file = vault().open(one.key, one.version_id)
    try:
        actions.note_access(
            dossier=dossier,
            person=person,
            what="downloaded",
            item_name=one.item.name,
            object_sha256=one.sha256,
            path=one.path,
        )
    except BaseException:
        file.close()
        raise
    return _checked(file, one)


def _checked(file: IO[bytes], one: StoredObject) -> Iterator[bytes]:
    """Yield a stream one chunk late: the last is held back until all of it has the sealed digest."""
    digest, held, total = hashlib.sha256(), b"", 0
    with file:
        for data in chunks(file):
            digest.update(data)
            total += len(data)
            if held:
                yield held
            held = data
    if (total, digest.hexdigest()) != (one.bytes_total, one.sha256):
        raise BytesDiffer(f"{one.key}: what was read is not what was sealed")
    yield held


def object_of(dossier: Dossier, object_id: int) -> StoredObject | None:
    """Return one of a dossier's stored objects."""
    found: QuerySet[StoredObject] = StoredObject.objects.select_related("item")
    return found.filter(item__dossier=dossier, pk=object_id).first()


def bag_name(dossier: Dossier) -> str:
    """Return the name of a dossier's bag as a file."""
    return f"{file_name(f'andon-{dossier.run.slug}-dossier-{dossier.pk}')}.zip"


def file_name(path: str) -> str:
    """Return the last name of a path, safe to save under: no separators, controls, leading dots or dashes.

    A long name keeps its end, where its kind stands.
    """
    name = _NOT_IN_A_NAME.sub("_", inert(path.rstrip("/").rsplit("/", 1)[-1], len(path)))
    name = name.lstrip(".- \u00a0").rstrip(". \u00a0")
    return (name if len(name) <= _NAME_CHARS else f"{name[:80]}_{name[-39:]}") or "object"
