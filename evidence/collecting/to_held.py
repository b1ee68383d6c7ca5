"""From planned to held: a stored checkpoint is held where it lies, and what is held is written down."""

from datetime import datetime
from typing import Any

from django.utils import timezone

from andon import chain
from evidence import custody
from evidence.agents import node_work
from evidence.collecting.gathering import manifest
from evidence.collecting.outcomes import NotYet
from evidence.collecting.turn import locked
from evidence.holding import held_before
from evidence.holding.places import Held, hold_tree
from evidence.models import Dossier, Hold, Item
from evidence.sources import lies_on_a_node
from runs.models import Checkpoint
from runs.work import Lease


def hold(item: Item, dossier: Dossier, lease: Lease) -> None:
    """Hold a stored checkpoint and note what was held; of two works the first one's note counts.

    Raises:
        NotYet: the item came to name another checkpoint meanwhile.
        OnNode: its node's agent is asked.
        SourceError: see `hold_tree`.
    """
    checkpoint = Checkpoint.objects.get(pk=item.source["checkpoint"])
    if lies_on_a_node(checkpoint.uri):
        held = node_work.held_of(node_work.hold(item, checkpoint.uri))
    else:
        held = hold_tree(
            item,
            dossier,
            checkpoint.uri,
            manifest(checkpoint),
            keep=lambda seen: _note_before(item, lease, seen),
        )
    now = timezone.now()
    with locked(item, lease) as fresh:
        # Holding and collecting are two works: the other one may have been first. Nor is what was held for
        # one checkpoint noted for another that the item came to name meanwhile.
        named = fresh.source.get("checkpoint") == checkpoint.pk
        if named and fresh.state == Item.State.PLANNED and not fresh.files:
            _note_held(fresh, dossier, held, now)
    # In either case: what is copied next is what was held, and by now it has files.
    item.refresh_from_db()
    if not named:
        raise NotYet("it came to name another checkpoint", after_s=0)


def _note_before(item: Item, lease: Lease, seen: dict[str, Any]) -> dict[str, Any]:
    """Write down which versions had a legal hold before ours, unless another try did; returns what counts."""
    with locked(item, lease) as fresh:
        noted = held_before.note_of(fresh, seen["uri"])
        if noted is None:
            noted = held_before.without_ours(fresh, seen)
            fresh.protected_by = fresh.protected_by | {"held_before": noted}
            fresh.save(update_fields=["protected_by"])
    return noted


def _note_held(fresh: Item, dossier: Dossier, held: Held, now: datetime) -> None:
    fresh.files, fresh.protected_by = held.files, held.by
    fresh.bytes_total = sum(entry["bytes"] for entry in held.files)
    known = all(entry["sha256"] for entry in held.files)
    fresh.digest = chain.file_table_digest(held.files) if known else ""
    fresh.silent_since, fresh.trouble_since, fresh.why = None, None, ""
    if held.is_safe:
        fresh.state, fresh.held_at = Item.State.HELD, now
    fresh.save()
    Hold.objects.filter(dossier=dossier, item=fresh).update(enforced_by=held.by)
    custody.append(
        dossier,
        "held" if held.is_safe else "not safe until copied",
        item_name=fresh.name,
        object_sha256=fresh.digest,
        data={"files": len(held.files), "bytes": fresh.bytes_total, "by": held.by["says"]},
    )
