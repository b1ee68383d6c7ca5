"""Writes that people cause."""

from django.db import transaction
from django.utils import timezone

from evidence import custody
from evidence.models import Dossier, Item
from evidence.plan import freeze
from evidence.refused import Refused
from runs.access import project_member
from runs.locks import lock_run
from runs.models import Attempt, Person, Role, Run
from runs.policies import policy_for

__all__ = ["Refused", "note_access", "open_dossier", "waive"]

_MOST_STEPS = 2**31 - 1  # no run has more, and the margin's column holds no more


def waive(*, item: Item, person: Person, why: str) -> Item:
    """Let the resume gate open without this item, by a person's name and reason.

    Raises:
        Refused: not-allowed, reason-needed, not-required, satisfied, or already-waived.
    """
    why = why.strip()
    with transaction.atomic():
        dossier = Dossier.objects.select_related("run__project").get(pk=item.dossier_id)
        if not project_member(person, dossier.run.project, Role.RESPONDER, Role.APPROVER, Role.ADMIN):
            raise Refused("not-allowed", "Only a responder, approver or admin of the project may waive.")
        if not why:
            raise Refused("reason-needed", "Say why the run may go on without it.")
        lock_run(dossier.run_id)
        now = Item.objects.select_for_update(no_key=True).get(pk=item.pk)
        if not now.required:
            raise Refused("not-required", f"{now.name} is optional: the gate does not wait for it.")
        if now.state in {Item.State.SEALED, Item.State.NOT_APPLICABLE}:
            raise Refused("satisfied", f"{now.name} satisfies the gate already.")
        if now.waived_at is not None:
            raise Refused("already-waived", f"{now.name} is waived already: {now.waived_why}")
        now.waived_at, now.waived_by, now.waived_why = timezone.now(), str(person.opaque_id), why
        now.save(update_fields=["waived_at", "waived_by", "waived_why"])
        custody.append(
            dossier,
            "waived",
            who=str(person.opaque_id),
            item_name=now.name,
            data={"kind": now.kind, "why": why, "state": str(now.state)},
        )
    return now


def open_dossier(
    *,
    run: Run,
    person: Person,
    why: str,
    label: str = "",
    attempt: int | None = None,
    first_bad_step: int | None = None,
    margin_steps: int = 0,
) -> Dossier:
    """Freeze the evidence of a run by hand, without an incident.

    Args:
        attempt: whose evidence; None: the newest attempt's.
        first_bad_step: b, None when nothing is known to be bad: then the newest verified checkpoint is
            kept and the window ends at the newest step.
        margin_steps: last good is at or before b - max(1, margin); 100 is usual when nobody knows when a
            spike or a corruption began.

    Raises:
        Refused: not-allowed, reason-needed, unknown-attempt or no-such-step.
    """
    if not project_member(person, run.project, Role.RESPONDER, Role.APPROVER, Role.ADMIN):
        raise Refused("not-allowed", "Only a responder, approver or admin of the project may freeze.")
    if not why.strip():
        raise Refused("reason-needed", "Say why this is kept.")
    for name, step in (("first bad step", first_bad_step or 0), ("margin", margin_steps)):
        if not 0 <= step <= _MOST_STEPS:
            raise Refused("no-such-step", f"The {name} must be a whole number from 0 to {_MOST_STEPS:,}.")
    with transaction.atomic():
        locked = lock_run(run.pk)
        attempts = Attempt.objects.filter(run=locked).order_by("-number")
        newest = (attempts if attempt is None else attempts.filter(number=attempt)).first()
        if attempt is not None and newest is None:
            raise Refused("unknown-attempt", f"Run {run.slug} has no attempt {attempt}.")
        return freeze(
            run=locked,
            label=(label.strip() or f"frozen by hand: {why.strip()}")[:200],
            url="",
            why=why.strip(),
            opened_by=str(person.opaque_id),
            attempt=newest.number if newest else None,
            first_bad_step=first_bad_step,
            margin_steps=margin_steps,
            policy=policy_for(locked.pk),
        )


def note_access(
    *,
    dossier: Dossier,
    person: Person,
    what: str,
    item_name: str = "",
    object_sha256: str = "",
    path: str = "",
) -> None:
    """Record that a person took something out of the vault ("downloaded", "exported bag")."""
    with transaction.atomic():
        custody.append(
            dossier,
            what,
            who=str(person.opaque_id),
            item_name=item_name,
            object_sha256=object_sha256,
            data={"path": path} if path else {},
        )
