"""Exports a dossier as an evidence bag that a stranger can check."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from andon import __version__, chain
from andon.bag_writing import BagWriter, keys_file, open_sink
from andon.signing import seal_envelope
from evidence import custody
from evidence.hashing import chunks
from evidence.models import CustodyRow, Dossier, Item, Seal, StoredObject
from evidence.proof.seals import bag_path, handovers, public_keys
from evidence.signals import bag_exporting
from evidence.vault import vault
from runs.keys import server_key

# Larger objects are named in fetch.txt by version: a checkpoint does not belong in a mail.
INLINE_BYTES = 64 << 20


def exported(dossier: Dossier) -> QuerySet[StoredObject]:
    """Return the objects that a dossier's bag holds or names: those of sealed items."""
    return StoredObject.objects.filter(item__dossier=dossier, item__state=Item.State.SEALED)


def export_bag(
    dossier: Dossier,
    path: Path,
    *,
    who: str = custody.ANDON,
    inline_bytes: int = INLINE_BYTES,
    named_kinds: Collection[str] = (),
) -> None:
    """Write the dossier's bag to `path` (a directory, or an archive when it ends in .zip).

    The export is itself a custody row, the last one in the bag.

    Args:
        who: opaque id of the person who exports.
        inline_bytes: objects up to this size are inside; larger ones are in fetch.txt.
        named_kinds: kinds whose objects are in fetch.txt whatever their size.

    Raises:
        FileExistsError: something is at `path` already.
        ValueError: an object in the vault is not what was sealed.
        VaultError: the vault does not give an object.
        andon.bag_zip.ZipLimit: too large for an archive.
    """
    with open_sink(path) as sink:
        bag = BagWriter(sink)
        with transaction.atomic():
            data: dict[str, Any] = {"inline_bytes": inline_bytes}
            if named_kinds:
                data["named_kinds"] = sorted(named_kinds)
            custody.append(dossier, "exported bag", who=who, data=data)
            # One moment of the chain and of the seals: nothing is appended between the two reads.
            rows = [custody.document(row, dossier) for row in CustodyRow.objects.filter(dossier=dossier)]
            seals = list(Seal.objects.filter(dossier=dossier))
            objects = list(exported(dossier).select_related("item").order_by("item_id", "path"))
        # Copying stands outside the transaction: it may take hours.
        store = vault()
        for one in objects:
            name = bag_path(one.item, one.path)
            # What was deleted is still named, as sealed: the bag says that it was there.
            inside = one.bytes_total <= inline_bytes and one.deleted_at is None
            if inside and one.item.kind not in named_kinds:
                bag.add_payload(name, _read(one), one.sha256)
            else:
                url = store.uri(one.key, one.version_id)
                bag.add_fetch(name, url=url, bytes_total=one.bytes_total, sha256=one.sha256)
        bag.add_payload("dossier.json", [chain.canonical(_about(dossier)) + b"\n"])
        bag.add_tag("andon/custody.ndjson", b"".join(chain.canonical(row) + b"\n" for row in rows))
        for seal in seals:
            bag.add_tag(f"andon/seals/{seal.number:04d}.json", chain.canonical(seal.envelope) + b"\n")
        bag.add_tag("andon/keys.json", keys_file(public_keys(seals), handovers()))
        bag_exporting.send(sender=Dossier, dossier=dossier, bag=bag)
        bag.finish(
            info={
                "Bag-Software-Agent": f"Andon {__version__}",
                "Bagging-Date": f"{timezone.now():%Y-%m-%d}",
                "External-Identifier": str(dossier.uid),
                "Bag-Group-Identifier": dossier.run.slug,
            },
            facts={
                "dossier": str(dossier.uid),
                "run": dossier.run.slug,
                "exported_at": custody.stamp(timezone.now()),
                "custody": {"seq": rows[-1]["seq"], "digest": rows[-1]["digest"]},
                "seal": seals[-1].digest if seals else "",
            },
            sign=lambda kind, payload: seal_envelope(kind, payload, server_key()),
        )


def _read(stored: StoredObject) -> Iterator[bytes]:
    with vault().open(stored.key, stored.version_id) as file:
        yield from chunks(file)


def _about(dossier: Dossier) -> dict[str, object]:
    return {
        "schema": "andon.dossier/1",
        "dossier": str(dossier.uid),
        "label": dossier.label,
        "why": dossier.why,
        "run": dossier.run.slug,
        "attempt": dossier.attempt,
        "first_bad_step": dossier.first_bad_step,
        "margin_steps": dossier.margin_steps,
        "opened_at": custody.stamp(dossier.opened_at),
        "plan": dossier.plan,
        "items": [
            {
                "kind": item.kind,
                "name": item.name,
                "required": item.required,
                "state": str(item.state),
                "why": item.why,
                "digest": item.digest,
                "bytes": item.bytes_total,
            }
            for item in Item.objects.filter(dossier=dossier).defer("files", "source")
        ],
    }
