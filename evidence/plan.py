"""The freeze plan: what is kept, decided in the transaction that opens a dossier.

Everything that protects is a row by the time the caller commits: the deletion gate refuses from then
on. Bytes move later, in work.
"""

from typing import Any

from django.utils import timezone

from andon.policy import Policy
from evidence import custody
from evidence.freezing import holds
from evidence.freezing.checkpoints import Choice, choose
from evidence.freezing.planned_items import items_of
from evidence.freezing.settling import reopen_window_records, settle_checkpoints
from evidence.gates import live_allows
from evidence.models import Dossier, Item
from runs.inserting import insert, reserve
from runs.models import Run
from runs.work import enqueue

SCHEMA = "andon.freeze-plan/1"
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
    dossier = Dossier(
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
        items += items_of(dossier, rule, choice, policy, now)
    items.sort(key=lambda item: item.order)
    dossier.plan = _document(policy, choice, items)
    reserve(dossier, *items)
    for item in items:
        item.dossier = dossier  # by its key, which it has only now
    held = holds.rows_of(dossier, items, choice.undecided, now)
    opened = custody.first(
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
    insert(dossier, *items, *held, opened)
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
        reopen_window_records(dossier)
    settle_checkpoints(dossier)
    enqueue(kind=START, key=str(dossier.pk), payload={"dossier": dossier.pk})
    return dossier


def _document(policy: Policy, choice: Choice, items: list[Item]) -> dict[str, Any]:
    asked_compliance = [rule.kind for rule in policy.evidence if rule.lock == "compliance"]
    return {
        "schema": SCHEMA,
        "policy_digest": policy.digest(),
        "limit_step": choice.limit_step,
        "window_steps": policy.event_window_steps,
        "gone": [one.step for one in choice.gone],
        "compliance_asked": asked_compliance,  # under a legal hold until two people confirm
        "items": [
            {"kind": item.kind, "name": item.name, "required": item.required, "lock": item.lock}
            for item in items
        ],
    }
