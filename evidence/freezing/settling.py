"""Checkpoint items follow what becomes known: an earlier first-bad step, a checkpoint verified or bad.

What was held stays held: an earlier choice of last good becomes a ladder checkpoint, and a new item
takes its place.
"""

from datetime import datetime

from django.utils import timezone

from evidence import custody
from evidence.freezing.checkpoints import Choice, choose
from evidence.freezing.holds import hold
from evidence.freezing.planned_items import copy_of, describe, point_at
from evidence.gates import live_allows
from evidence.kinds import VIEW_KINDS, WINDOW_KINDS, words
from evidence.models import Dossier, Item, StoredObject


def settle_checkpoints(dossier: Dossier) -> None:
    """Make the checkpoint items agree with what is known now; the run lock is held by the caller.

    Called when the first-bad step moves and when a checkpoint is committed, verified or found bad.
    """
    now = timezone.now()
    choice = choose(
        run=dossier.run,
        attempt=dossier.attempt,
        first_bad_step=dossier.first_bad_step,
        margin_steps=dossier.margin_steps,
        gone=live_allows(dossier.run, now),
    )
    items = list(Item.objects.select_for_update(no_key=True).filter(dossier=dossier).order_by("order", "id"))
    _settle_last_good(dossier, items, choice, now)
    _settle_first_bad(dossier, items, choice, now)
    _settle_ladder(dossier, items, choice, now)
    hold(dossier, [], choice.undecided, now)


def _settle_last_good(dossier: Dossier, items: list[Item], choice: Choice, now: datetime) -> None:
    item = next((one for one in reversed(items) if one.kind == "last_good_checkpoint"), None)
    if item is None:
        return
    chosen = choice.last_good.pk if choice.last_good else None
    if item.source.get("checkpoint") == chosen and not (chosen is None and item.state == Item.State.PLANNED):
        return
    has_bytes = item.held_at is not None or StoredObject.objects.filter(item=item).exists()
    if has_bytes and chosen is not None:
        # Bytes are held or stored for the old choice: it stays in the dossier under another kind, so that
        # each of them has a row that says what it is and until when it is kept.
        old_name = item.name
        Item.objects.filter(pk=item.pk).update(
            kind="checkpoint_ladder", name=f"no longer last good: {old_name}"[:200], required=False
        )
        custody.append(dossier, "superseded", item_name=old_name, data={"checkpoint": chosen or 0})
        fresh = copy_of(item, dossier)
        describe(fresh, choice)
        fresh.save()
        hold(dossier, [fresh], (), now)
        # What was sealed as its optimizer, RNG or loader is a view of the old one.
        _again(dossier, VIEW_KINDS, f"view of the {fresh.name}")
        return
    if chosen is None and has_bytes:
        return
    describe(item, choice)
    item.save()
    hold(dossier, [item], (), now)


def _settle_first_bad(dossier: Dossier, items: list[Item], choice: Choice, now: datetime) -> None:
    item = next((one for one in items if one.kind == "first_bad_checkpoint"), None)
    if item is None or choice.first_bad is None or item.held_at is not None or "checkpoint" in item.source:
        return
    point_at(item, choice.first_bad, "first bad checkpoint")
    item.state, item.why = Item.State.PLANNED, ""
    item.save()
    hold(dossier, [item], (), now)


def _settle_ladder(dossier: Dossier, items: list[Item], choice: Choice, now: datetime) -> None:
    known = {item.source.get("checkpoint") for item in items}
    like = next((one for one in items if one.kind == "checkpoint_ladder"), None)
    for rung in choice.ladder:
        if like is None or rung.pk in known or (choice.last_good and rung.pk == choice.last_good.pk):
            continue
        if like.state == Item.State.NOT_APPLICABLE and "checkpoint" not in like.source:
            item, like.state, like.why = like, Item.State.PLANNED, ""
        else:
            item = copy_of(like, dossier)
        point_at(item, rung, "ladder checkpoint")
        item.save()
        hold(dossier, [item], (), now)


def reopen_window_records(dossier: Dossier) -> None:
    """Ask again for what was written from the window around b, where it is sealed: b moved earlier."""
    _again(dossier, WINDOW_KINDS, f"from the window around step {dossier.first_bad_step}")


def _again(dossier: Dossier, kinds: frozenset[str], of_what: str) -> None:
    for item in Item.objects.filter(dossier=dossier, kind__in=kinds, state=Item.State.SEALED):
        again = copy_of(item, dossier)
        again.name = f"{words(item.kind)}, {of_what}"[:200]
        if not Item.objects.filter(dossier=dossier, kind=again.kind, name=again.name).exists():
            again.save()
