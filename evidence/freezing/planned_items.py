"""The items of a freeze plan: one rule of the policy and one choice of checkpoints make each."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.utils import timezone

from andon.policy import EvidenceRule, Policy
from evidence.collecting import artifacts
from evidence.freezing.checkpoints import Choice
from evidence.freezing.holds import by_directory_when_many
from evidence.kinds import KINDS, Kind, words
from evidence.models import Dossier, Item
from evidence.retention.dates import first_date
from runs.models import Checkpoint


def items_of(
    dossier: Dossier, rule: EvidenceRule, choice: Choice, policy: Policy, now: datetime
) -> Iterable[Item]:
    """Return the items (not saved) that one rule of the policy asks for."""
    item = Item(
        dossier=dossier,
        kind=rule.kind,
        name=words(rule.kind),
        required=rule.required,
        order=KINDS.get(rule.kind, Kind(9, rule.kind)).order,
        lock=_lock(rule.lock),
        retain_days=rule.retain_days,
        retain_until=first_date(rule.retain_days, now),
        deadline=now + timedelta(seconds=rule.deadline_s),
        source={"window_steps": policy.event_window_steps},
    )
    if rule.kind == "last_good_checkpoint":
        describe(item, choice)
    elif rule.kind == "first_bad_checkpoint":
        _describe_first_bad(item, dossier, choice)
    elif rule.kind == "checkpoint_ladder":
        return _ladder_items(item, dossier, choice)
    else:
        artifacts.attach(item, dossier)
        by_directory_when_many(item)
    return [item]


def _ladder_items(item: Item, dossier: Dossier, choice: Choice) -> list[Item]:
    if not choice.ladder:
        item.state, item.why = Item.State.NOT_APPLICABLE, "no verified checkpoint older than last good exists"
        return [item]
    rungs = []
    for rung in choice.ladder:
        one = copy_of(item, dossier)
        point_at(one, rung, "ladder checkpoint")
        rungs.append(one)
    return rungs


def _lock(asked: str) -> str:
    # COMPLIANCE cannot be undone by anybody. Until two people confirm it a legal hold protects the bytes,
    # which has no date: stores do not let a GOVERNANCE lock become COMPLIANCE without a bypass.
    return "legal_hold" if asked == "compliance" else asked


def describe(item: Item, choice: Choice) -> None:
    """Point the last-good item at the choice, or say why there is none yet."""
    limit = "any step" if choice.limit_step is None else f"step {choice.limit_step} or earlier"
    gone = ", ".join(str(one.step) for one in choice.gone[:3])
    note = f"step {gone} was allowed to be deleted and counts as gone" if gone else ""
    waiting = [one.pk for one in choice.undecided]
    item.source = {name: item.source[name] for name in ("window_steps",) if name in item.source}
    if choice.last_good is not None and not waiting:
        point_at(item, choice.last_good, "last good checkpoint")
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
        if item.dossier.margin_steps > 1 and choice.limit_step is not None:
            item.why += f", {item.dossier.margin_steps} steps before the first bad one"
    if note:
        item.why += f"; {note}"


def _describe_first_bad(item: Item, dossier: Dossier, choice: Choice) -> None:
    if choice.first_bad is not None:
        point_at(item, choice.first_bad, "first bad checkpoint")
    elif dossier.first_bad_step is None:
        item.state, item.why = Item.State.NOT_APPLICABLE, "no step is known to be bad"
    else:
        item.why = (
            f"none of step {dossier.first_bad_step} or later is committed; waiting until the run is contained"
        )


def point_at(item: Item, checkpoint: Checkpoint, called: str) -> None:
    """Make `checkpoint` the item's source; nothing of another one may be held by it yet."""
    item.name = f"{called}, step {checkpoint.step}"
    if checkpoint.attempt != item.dossier.attempt:
        item.name += f" of attempt {checkpoint.attempt}"
    item.source = item.source | {"checkpoint": checkpoint.pk, "uri": checkpoint.uri, "step": checkpoint.step}
    item.source.pop("undecided", None)
    item.source.pop("verified", None)
    item.bytes_total = checkpoint.bytes_total or None
    item.files, item.digest, item.protected_by = [], "", {}
    item.silent_since = item.trouble_since = None


def copy_of(item: Item, dossier: Dossier) -> Item:
    """Return a new item (not saved) under the same rule, with nothing collected and its time ahead."""
    now = timezone.now()
    patience = None if item.deadline is None else item.deadline - dossier.opened_at
    return Item(
        dossier=dossier,
        kind=item.kind,
        name=item.name,
        required=item.required,
        order=item.order,
        lock=_lock(item.lock),
        retain_days=item.retain_days,
        retain_until=first_date(item.retain_days, now),
        deadline=None if patience is None else now + patience,
        source={name: item.source[name] for name in ("window_steps",) if name in item.source},
    )
