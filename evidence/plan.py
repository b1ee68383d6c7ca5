"""The freeze plan: what is kept, decided in the transaction that opens a dossier.

Everything that protects is a row by the time the caller commits: the deletion gate refuses from then
on. Bytes move later, in work.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from andon.policy import EvidenceRule, Policy
from evidence import artifacts, custody
from evidence.checkpoints import Choice, choose
from evidence.gates import live_allows
from evidence.kinds import KINDS, Kind, words
from evidence.models import Dossier, Hold, Item
from evidence.uris import UnusableUri, normalise
from runs.models import Checkpoint, Run
from runs.work import enqueue

# The first date is short on purpose: a lock can always be extended at close-out, never shortened.
FIRST_RETENTION = timedelta(days=14)
SCHEMA = "andon.freeze-plan/1"
MANY_FILES = 256  # offered files of one item, above which their directories are held
START = "evidence.start"  # kind of the work that begins collecting a dossier


def freeze(
    *,
    run: Run,
    label: str,
    url: str,
    why: str,
    opened_by: str,
    attempt: int | None,
    first_bad_step: int | None,
    margin_steps: int,
    policy: Policy,
) -> Dossier:
    """Open a dossier: items and holds as rows, its first custody rows, and the work that collects.

    Runs inside the caller's transaction with the run lock held, and waits for nothing but the
    database.

    Args:
        label, url: what a higher app calls this dossier and where it shows it.
        opened_by: opaque id of a person, "" = Andon.
        first_bad_step: b, None when nothing is known to be bad.
        margin_steps: last good is at or before b - max(1, margin).
    """
    now = timezone.now()
    dossier = Dossier.objects.create(
        run=run,
        label=label,
        url=url,
        why=why,
        opened_by=opened_by,
        opened_at=now,
        attempt=attempt,
        first_bad_step=first_bad_step,
        margin_steps=margin_steps,
    )
    choice = choose(
        run=run,
        attempt=attempt,
        first_bad_step=first_bad_step,
        margin_steps=margin_steps,
        gone=live_allows(run, now),
    )
    items: list[Item] = []
    for rule in policy.evidence:
        items += _items_of(dossier, rule, choice, policy, now)
    items.sort(key=lambda item: item.order)
    Item.objects.bulk_create(items)
    _hold(dossier, items, choice.undecided, now)
    dossier.plan = _document(policy, choice, items)
    dossier.save(update_fields=["plan"])
    custody.append(
        dossier,
        "opened",
        who=opened_by or custody.ANDON,
        data={
            "run": run.slug,
            "label": label,
            "why": why,
            "attempt": attempt,
            "first_bad_step": first_bad_step,
            "margin_steps": margin_steps,
            "policy_digest": policy.digest(),
            "items": [{"kind": item.kind, "name": item.name, "required": item.required} for item in items],
        },
    )
    enqueue(kind=START, key=str(dossier.pk), payload={"dossier": dossier.pk})
    return dossier


def reconsider(dossier: Dossier, *, first_bad_step: int | None = None) -> Dossier:
    """Plan again because the first-bad step moved earlier; the run lock is held by the caller.

    What was already held stays held: an earlier choice of last good becomes a ladder checkpoint, and a
    new item takes its place. Window records that were sealed already stay, and a second item covers
    the earlier window.
    """
    dossier = Dossier.objects.select_for_update(no_key=True).select_related("run").get(pk=dossier.pk)
    if first_bad_step is not None and (
        dossier.first_bad_step is None or first_bad_step < dossier.first_bad_step
    ):
        before = dossier.first_bad_step
        dossier.first_bad_step = first_bad_step
        dossier.save(update_fields=["first_bad_step"])
        custody.append(dossier, "first bad step moved", data={"before": before, "after": first_bad_step})
        _reopen_window_records(dossier)
    settle_checkpoints(dossier)
    enqueue(kind=START, key=str(dossier.pk), payload={"dossier": dossier.pk})
    return dossier


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
    _hold(dossier, [], choice.undecided, now)


def _settle_last_good(dossier: Dossier, items: list[Item], choice: Choice, now: datetime) -> None:
    item = next((one for one in reversed(items) if one.kind == "last_good_checkpoint"), None)
    if item is None:
        return
    chosen = choice.last_good.pk if choice.last_good else None
    if item.source.get("checkpoint") == chosen and not (chosen is None and item.state == Item.State.PLANNED):
        return
    if item.held_at is not None and chosen is not None:
        # Bytes are held for the old choice: it stays in the dossier under another kind.
        old_name = item.name
        Item.objects.filter(pk=item.pk).update(
            kind="checkpoint_ladder", name=f"no longer last good: {old_name}"[:200], required=False
        )
        custody.append(dossier, "superseded", item_name=old_name, data={"checkpoint": chosen or 0})
        fresh = _copy_of(item, dossier)
        _describe(fresh, choice)
        fresh.save()
        _hold(dossier, [fresh], (), now)
        return
    if chosen is None and item.held_at is not None:
        return
    _describe(item, choice)
    item.save()
    _hold(dossier, [item], (), now)


def _settle_first_bad(dossier: Dossier, items: list[Item], choice: Choice, now: datetime) -> None:
    item = next((one for one in items if one.kind == "first_bad_checkpoint"), None)
    if item is None or choice.first_bad is None or item.held_at is not None or "checkpoint" in item.source:
        return
    _point_at(item, choice.first_bad, "first bad checkpoint")
    item.state, item.why = Item.State.PLANNED, ""
    item.save()
    _hold(dossier, [item], (), now)


def _settle_ladder(dossier: Dossier, items: list[Item], choice: Choice, now: datetime) -> None:
    known = {item.source.get("checkpoint") for item in items}
    like = next((one for one in items if one.kind == "checkpoint_ladder"), None)
    for rung in choice.ladder:
        if like is None or rung.pk in known or (choice.last_good and rung.pk == choice.last_good.pk):
            continue
        if like.state == Item.State.NOT_APPLICABLE and "checkpoint" not in like.source:
            item, like.state, like.why = like, Item.State.PLANNED, ""
        else:
            item = _copy_of(like, dossier)
        _point_at(item, rung, "ladder checkpoint")
        item.save()
        _hold(dossier, [item], (), now)


def _reopen_window_records(dossier: Dossier) -> None:
    kinds = ("norms", "schedule", "batch_ids", "event_log")
    for item in Item.objects.filter(dossier=dossier, kind__in=kinds, state=Item.State.SEALED):
        earlier = _copy_of(item, dossier)
        earlier.name = f"{words(item.kind)}, from the window around step {dossier.first_bad_step}"
        if not Item.objects.filter(dossier=dossier, kind=earlier.kind, name=earlier.name).exists():
            earlier.save()


def _copy_of(item: Item, dossier: Dossier) -> Item:
    return Item(
        dossier=dossier,
        kind=item.kind,
        name=item.name,
        required=item.required,
        order=item.order,
        lock=item.lock,
        retain_until=item.retain_until,
        deadline=item.deadline,
    )


def _items_of(
    dossier: Dossier, rule: EvidenceRule, choice: Choice, policy: Policy, now: datetime
) -> Iterable[Item]:
    item = Item(
        dossier=dossier,
        kind=rule.kind,
        name=words(rule.kind),
        required=rule.required,
        order=KINDS.get(rule.kind, Kind(9, rule.kind)).order,
        lock=_lock(rule),
        retain_until=now + min(FIRST_RETENTION, timedelta(days=rule.retain_days)),
        deadline=now + timedelta(seconds=rule.deadline_s),
        source={"window_steps": policy.event_window_steps},
    )
    if rule.kind == "last_good_checkpoint":
        _describe(item, choice)
    elif rule.kind == "first_bad_checkpoint":
        _describe_first_bad(item, dossier, choice)
    elif rule.kind == "checkpoint_ladder":
        return _ladder_items(item, dossier, choice)
    else:
        artifacts.attach(item, dossier)
        _by_directory_when_many(item)
    return [item]


def _ladder_items(item: Item, dossier: Dossier, choice: Choice) -> list[Item]:
    if not choice.ladder:
        item.state, item.why = Item.State.NOT_APPLICABLE, "no verified checkpoint older than last good exists"
        return [item]
    rungs = []
    for rung in choice.ladder:
        one = _copy_of(item, dossier)
        _point_at(one, rung, "ladder checkpoint")
        rungs.append(one)
    return rungs


def _lock(rule: EvidenceRule) -> str:
    # COMPLIANCE cannot be undone by anybody; until two people confirm it for these bytes, governance
    # holds them: it can be strengthened later, never the other way round.
    return "governance" if rule.lock == "compliance" else rule.lock


def _describe(item: Item, choice: Choice) -> None:
    """Point the last-good item at the choice, or say why there is none yet."""
    limit = "any step" if choice.limit_step is None else f"step {choice.limit_step} or earlier"
    gone = ", ".join(str(one.step) for one in choice.gone[:3])
    note = f"step {gone} was allowed to be deleted and counts as gone" if gone else ""
    waiting = [one.pk for one in choice.undecided]
    item.source = {name: item.source[name] for name in ("window_steps",) if name in item.source}
    if choice.last_good is not None and not waiting:
        _point_at(item, choice.last_good, "last good checkpoint")
        item.state, item.why = Item.State.PLANNED, note
        return
    item.name = words(item.kind)
    item.state = Item.State.PLANNED
    item.source["undecided"] = waiting
    if waiting:
        steps = ", ".join(str(one.step) for one in choice.undecided[:3])
        item.why = f"being verified: step {steps}"
        if choice.last_good is not None:
            item.why += f"; step {choice.last_good.step} is verified"
            item.source["verified"] = choice.last_good.pk
    else:
        item.state = Item.State.MISSING
        item.why = f"no verified checkpoint at {limit}"
    if note:
        item.why += f"; {note}"


def _describe_first_bad(item: Item, dossier: Dossier, choice: Choice) -> None:
    if choice.first_bad is not None:
        _point_at(item, choice.first_bad, "first bad checkpoint")
    elif dossier.first_bad_step is None:
        item.state, item.why = Item.State.NOT_APPLICABLE, "no step is known to be bad"
    else:
        item.why = (
            f"none of step {dossier.first_bad_step} or later is committed; waiting until the run is contained"
        )


def _point_at(item: Item, checkpoint: Checkpoint, called: str) -> None:
    item.name = f"{called}, step {checkpoint.step}"
    if checkpoint.attempt != item.dossier.attempt:
        item.name += f" of attempt {checkpoint.attempt}"
    item.source = item.source | {"checkpoint": checkpoint.pk, "uri": checkpoint.uri, "step": checkpoint.step}
    item.source.pop("undecided", None)
    item.source.pop("verified", None)
    item.bytes_total = checkpoint.bytes_total or None
    item.files, item.digest, item.protected_by = [], "", {}
    item.silent_since = None


def _hold(dossier: Dossier, items: Iterable[Item], undecided: Iterable[Checkpoint], now: datetime) -> None:
    """Write the hold rows of these items' sources; the deletion gate sees them from the commit on."""
    rows: list[Hold] = []
    for item in items:
        if item.state in {Item.State.NOT_APPLICABLE, Item.State.MISSING}:
            continue
        rows += [
            Hold(dossier=dossier, run_id=dossier.run_id, uri=uri, item=item, placed_at=now)
            for uri in _normal(_uris(item))
        ]
    rows += [
        Hold(dossier=dossier, run_id=dossier.run_id, uri=uri, placed_at=now)
        for checkpoint in undecided
        for uri in _normal([checkpoint.uri])
    ]
    Hold.objects.bulk_create(rows, ignore_conflicts=True)


def hold_uris(dossier: Dossier, item: Item) -> None:
    """Hold what an item came to name after the plan was made; the run lock is held by the caller."""
    _hold(dossier, [item], (), timezone.now())


def _uris(item: Item) -> list[str]:
    found = [item.source["uri"]] if "uri" in item.source else []
    found += item.source.get("directories", [])
    offered = [str(entry["uri"]) for entry in item.source.get("artifacts", [])]
    return found + (_directories(offered) if len(offered) > MANY_FILES else offered)


def _by_directory_when_many(item: Item) -> None:
    """Hold the directories of very many offered files instead of each file.

    The logs of 16,384 ranks would be as many rows in the transaction that a trainer's post waits for;
    collecting finds the files themselves again.
    """
    uris = [str(entry["uri"]) for entry in item.source.get("artifacts", [])]
    if len(uris) > MANY_FILES:
        item.source = {name: value for name, value in item.source.items() if name != "artifacts"}
        item.source["directories"] = _directories(uris)


def _directories(uris: Iterable[str]) -> list[str]:
    return sorted({uri.rstrip("/").rpartition("/")[0] or uri for uri in uris})


def _normal(uris: Iterable[str]) -> list[str]:
    names: dict[str, None] = {}
    for uri in uris:
        try:
            names[normalise(uri)] = None
        except UnusableUri:
            continue  # no deletion of it can be asked for either; collecting says what is wrong with it
    return list(names)


def _document(policy: Policy, choice: Choice, items: list[Item]) -> dict[str, Any]:
    asked_compliance = [rule.kind for rule in policy.evidence if rule.lock == "compliance"]
    return {
        "schema": SCHEMA,
        "policy_digest": policy.digest(),
        "limit_step": choice.limit_step,
        "window_steps": policy.event_window_steps,
        "gone": [one.step for one in choice.gone],
        "compliance_asked": asked_compliance,  # kept under governance until two people confirm
        "items": [
            {"kind": item.kind, "name": item.name, "required": item.required, "lock": item.lock}
            for item in items
        ],
    }
