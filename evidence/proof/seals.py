"""Seals: signed manifests of a dossier, each naming the one before it (DSSE, in-toto Statement v1)."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.utils import timezone

from andon import chain
from andon.signing import SignatureError, open_envelope, seal_envelope
from andon.wire_times import parse_time
from evidence import custody
from evidence.models import Dossier, Item, Seal, StoredObject
from runs import keys
from runs.keys import server_key, trusted_keys

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:andon:evidence-seal:1"
SCHEMA = "andon.seal/1"
FINAL = frozenset({Item.State.SEALED, Item.State.NOT_APPLICABLE, Item.State.MISSING})


def seal(dossier: Dossier, newly: Iterable[Item] = ()) -> Seal | None:
    """Sign what the dossier holds now; the caller holds the dossier's row lock.

    A seal lists every item, and the objects of `newly` sealed ones; once all items are final it lists
    all objects. None when there is nothing to sign: no new item, and not complete.
    """
    items = list(Item.objects.filter(dossier=dossier).defer("files", "source").order_by("order", "id"))
    complete = all(item.state in FINAL for item in items)
    fresh = {item.pk for item in newly}
    if not fresh and not complete:
        return None
    listed = {item.pk for item in items if item.state == Item.State.SEALED and (complete or item.pk in fresh)}
    last = Seal.objects.filter(dossier=dossier).order_by("-number").first()
    head = dossier.custody.order_by("-seq").first()
    payload = chain.canonical(
        _statement(
            dossier,
            items,
            list(
                StoredObject.objects.filter(item__in=listed)
                .select_related("item")
                .order_by("item_id", "path")
            ),
            number=1 if last is None else last.number + 1,
            previous="" if last is None else last.digest,
            complete=complete,
            head=None if head is None else {"seq": head.seq, "digest": head.digest},
        )
    )
    key = server_key()
    made = Seal.objects.create(
        dossier=dossier,
        number=1 if last is None else last.number + 1,
        made_at=timezone.now(),
        envelope=seal_envelope(PAYLOAD_TYPE, payload, key),
        digest=hashlib.sha256(payload).hexdigest(),
        previous="" if last is None else last.digest,
        key_id=key.key_id,
    )
    custody.append(
        dossier,
        "seal",
        object_sha256=made.digest,
        data={"seal": made.number, "complete": complete, "key_id": key.key_id},
    )
    return made


def public_keys(seals: Iterable[Seal]) -> list[bytes]:
    """Return the raw public keys that signed these seals, and the server's own.

    Only keys this server trusts: what is signed by another must fail wherever it is checked.
    """
    signed_by = {row["keyid"] for one in seals for row in one.envelope["signatures"]}
    return keys.public_keys({server_key().key_id, *signed_by})


def handovers() -> list[list[dict[str, Any]]]:
    """Return how the server's keys followed each other, the oldest first, as they signed it.

    Of the keys that this server trusts: no other handover proves anything to whoever pinned one of them.
    """
    trusted = trusted_keys(for_evidence=True)
    rows = [row for row in keys.published()["keys"] if row["handover"] and row["key_id"] in trusted]
    return [row["handover"] for row in reversed(rows)]


def bag_path(item: Item, path: str) -> str:
    """Return where an object lies in an exported bag, relative to `data/`.

    By the item's number: its kind and name change when another checkpoint becomes last good, and a seal
    that names the object must stay true.
    """
    return f"items/{item.pk}/{path}"


def _statement(
    dossier: Dossier,
    items: Sequence[Item],
    objects: Sequence[StoredObject],
    *,
    number: int,
    previous: str,
    complete: bool,
    head: dict[str, Any] | None,
) -> dict[str, Any]:
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": bag_path(one.item, one.path), "digest": {"sha256": one.sha256}} for one in objects
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "schema": SCHEMA,
            "dossier": str(dossier.uid),
            "run": dossier.run.slug,
            "attempt": dossier.attempt,
            "first_bad_step": dossier.first_bad_step,
            "number": number,
            "previous": previous,
            "made_at": custody.stamp(timezone.now()),
            "complete": complete,
            "custody": head,
            "items": [_item(item) for item in items],
            "objects": [
                {
                    "name": bag_path(one.item, one.path),
                    "key": one.key,
                    "version_id": one.version_id,
                    "bytes": one.bytes_total,
                    "sha256": one.sha256,
                    "part_bytes": one.part_bytes,
                    "part_sha256": one.part_sha256,
                    "protected_by": one.protected_by,
                }
                for one in objects
            ],
        },
    }


def _item(item: Item) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "name": item.name,
        "directory": bag_path(item, "").rstrip("/"),
        "required": item.required,
        "state": str(item.state),
        "why": item.why,
        "digest": item.digest,
        "bytes": item.bytes_total,
        "waived": None if item.waived_at is None else {"by": item.waived_by, "why": item.waived_why},
    }


def verify_seals(dossier: Dossier, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check every seal of a dossier against its key, its chain, and the rows of stored objects.

    Args:
        rows: the custody chain, as `evidence.custody.document` gives it.
    """
    wrong: list[str] = []
    previous = ""
    trusted = trusted_keys(for_evidence=True)
    stored = {
        bag_path(one.item, one.path): one
        for one in StoredObject.objects.filter(item__dossier=dossier).select_related("item")
    }
    named = {row["data"].get("seal"): row["object_sha256"] for row in rows if row["what"] == "seal"}
    listed: set[str] = set()
    for number, made in enumerate(Seal.objects.filter(dossier=dossier).order_by("number"), start=1):
        where = f"seal {number}"
        try:
            payload = open_envelope(made.envelope, trusted)
            statement = chain.parse_canonical(payload, where)
            predicate = statement["predicate"]
            trusted.check_time(made.key_id, parse_time(predicate["made_at"])[0])
        except (SignatureError, ValueError, KeyError, TypeError) as error:
            wrong.append(f"{where}: {error}")
            continue
        digest = hashlib.sha256(payload).hexdigest()
        if (made.number, predicate["number"]) != (number, number):
            wrong.append(f"{where}: a seal is missing or moved")
        if digest != made.digest or named.get(number) != digest:
            wrong.append(f"{where}: the custody chain does not name it")
        if predicate["previous"] != previous or made.previous != previous:
            wrong.append(f"{where}: does not name the seal before it")
        if predicate["dossier"] != str(dossier.uid):
            wrong.append(f"{where}: belongs to another dossier")
        head = predicate["custody"]
        if head is not None and (
            head["seq"] > len(rows) or rows[head["seq"] - 1]["digest"] != head["digest"]
        ):
            wrong.append(f"{where}: the custody chain has changed since it was made")
        for one in predicate["objects"]:
            listed.add(one["name"])
            row = stored.get(one["name"])
            if row is None or (row.sha256, row.key, row.version_id) != (
                one["sha256"],
                one["key"],
                one["version_id"],
            ):
                wrong.append(f"{where}: {one['name']} is not stored as it was sealed")
        previous = digest
    wrong += [
        f"{name}: belongs to a sealed item and is in no seal"
        for name, one in stored.items()
        if one.item.state == Item.State.SEALED and name not in listed
    ]
    return wrong
