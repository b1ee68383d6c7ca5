"""Images that people attach to what they write: kept in the dossier like any other evidence.

One image is one item, sealed when it is stored: what a person saw at three in the morning must be what the
postmortem shows. A screenshot may hold anything, so nothing locks it for good.
"""

import hashlib
import tempfile
from pathlib import Path

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from andon import chain
from andon.images import Image, identify
from evidence import custody
from evidence.models import Dossier, Item, StoredObject
from evidence.proof import seals
from evidence.refused import Refused
from evidence.retention.dates import first_date
from evidence.sources import FileSource
from evidence.vault import VaultError, key_for, vault
from runs.access import project_member
from runs.formatting import size
from runs.models import Person

KIND = "note_image"
RETAIN_DAYS = 30  # after close-out, as most items
_ORDER = 5
_MOST_BYTES = 200 << 20  # of all images of one dossier


def keep_image(*, dossier: Dossier, person: Person, body: bytes) -> StoredObject:
    """Store an image in a dossier and seal it; the same bytes again are the same object.

    Raises:
        Refused: not-allowed, no-image (with what it is), closed, too-much, or store (it does not answer).
    """
    if not project_member(person, dossier.run.project):
        raise Refused("not-allowed", "Only members of the project may attach an image.")
    if dossier.released_at is not None:
        raise Refused("closed", "This dossier was released: nothing is added to it.")
    try:
        image = identify(body)
    except ValueError as error:
        raise Refused("no-image", f"Not attached: {error}.") from error
    sha256 = hashlib.sha256(body).hexdigest()
    known = image_of([dossier.pk], sha256)
    if known is not None:
        return known
    have = sum(
        StoredObject.objects.filter(item__dossier=dossier, item__kind=KIND).values_list(
            "bytes_total", flat=True
        )
    )
    if have + len(body) > _MOST_BYTES:
        raise Refused(
            "too-much", f"The images of one dossier may take {size(_MOST_BYTES)}; {size(have)} are kept."
        )
    item = Item(
        pk=_next_item_id(),
        dossier=dossier,
        kind=KIND,
        name=f"image of a note, {sha256[:16]}",
        required=False,
        order=_ORDER,
        lock="none",
        retain_days=RETAIN_DAYS,
        retain_until=first_date(RETAIN_DAYS, timezone.now()),
    )
    return _seal(item, person, image, sha256, _store(item, body, sha256, image), len(body))


def image_of(dossiers: list[int], sha256: str) -> StoredObject | None:
    """Return an image kept in any of these dossiers by its digest."""
    found = StoredObject.objects.filter(
        item__dossier__in=dossiers, item__kind=KIND, sha256=sha256, deleted_at=None
    )
    return found.order_by("pk").first()


def read_image(one: StoredObject) -> tuple[bytes, Image]:
    """Return the bytes of an image as they were sealed, and what they are.

    Raises:
        VaultError: the store does not give them, or gives others.
    """
    with vault().open(one.key, one.version_id) as file:
        body = file.read(one.bytes_total + 1)
    if hashlib.sha256(body).hexdigest() != one.sha256:
        raise VaultError(f"{one.key}: what was read is not what was sealed", permanent=True)
    return body, identify(body)


def _next_item_id() -> int:
    # The key in the store names the item, and the bytes lie there before the row does: a store that fails
    # leaves no item that somebody would have to collect.
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence('evidence_item', 'id'))")
        return int(cursor.fetchone()[0])


def _store(item: Item, body: bytes, sha256: str, image: Image) -> dict[str, object]:
    root = Path(settings.DATA_DIR) / "spool"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=root, prefix="image-", suffix=image.suffix) as spooled:
        spooled.write(body)
        spooled.flush()
        try:
            stored = vault().store(
                key_for(item.dossier.uid, item.pk, sha256),
                FileSource(Path(spooled.name), len(body)),
                sha256=sha256,
                lock=item.lock,
                until=item.retain_until,
                progress=lambda _: None,
                first=True,
            )
        except VaultError as error:
            raise Refused(
                "store", "Not attached: the vault does not answer. Try again in a minute."
            ) from error
    return stored.row(timezone.now())


def _seal(
    item: Item, person: Person, image: Image, sha256: str, row: dict[str, object], bytes_total: int
) -> StoredObject:
    path = f"{sha256}{image.suffix}"
    table = [{"path": path, "bytes": bytes_total, "sha256": sha256}]
    with transaction.atomic():
        dossier = (
            Dossier.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run__project")
            .get(pk=item.dossier_id)
        )
        known = image_of([dossier.pk], sha256)
        if known is not None:  # attached twice at once
            return known
        now = timezone.now()
        item.files, item.digest = table, chain.file_table_digest(table)
        item.bytes_total = item.bytes_done = bytes_total
        item.state, item.held_at, item.sealed_at = Item.State.SEALED, now, now
        item.save(force_insert=True)
        one = StoredObject.objects.create(item=item, path=path, **row)
        custody.append(
            dossier,
            "sealed",
            who=str(person.opaque_id),
            item_name=item.name,
            object_sha256=item.digest,
            data={
                "kind": KIND,
                "objects": 1,
                "bytes": bytes_total,
                "type": image.media_type,
                "vault": vault().name,
            },
        )
        seals.seal(dossier, [item])
    return one
