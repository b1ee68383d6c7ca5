"""Writes that people cause."""

from django.db import transaction
from django.utils import timezone

from evidence import custody
from evidence.models import Dossier, Item
from evidence.plan import freeze
from runs.access import project_member
from runs.locks import lock_run
from runs.models import Attempt, Person, Role, Run
from runs.policies import policy_for


class Refused(Exception):
    """An action that may not be done. `code` is for machines, `says` for people."""

    def __init__(self, code: str, says: str) -> None:
        super().__init__(says)
        self.code = code
        self.says = says


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
    *, run: Run, person: Person, why: str, label: str = "", first_bad_step: int | None = None
) -> Dossier:
    """Freeze the evidence of a run by hand, without an incident.

    Raises:
        Refused: not-allowed or reason-needed.
    """
    if not project_member(person, run.project, Role.RESPONDER, Role.APPROVER, Role.ADMIN):
        raise Refused("not-allowed", "Only a responder, approver or admin of the project may freeze.")
    if not why.strip():
        raise Refused("reason-needed", "Say why this is kept.")
    with transaction.atomic():
        locked = lock_run(run.pk)
        attempt = Attempt.objects.filter(run=locked).order_by("-number").first()
        return freeze(
            run=locked,
            label=label or f"frozen by hand: {why.strip()}"[:200],
            url="",
            why=why.strip(),
            opened_by=str(person.opaque_id),
            attempt=attempt.number if attempt else None,
            first_bad_step=first_bad_step,
            margin_steps=0,
            policy=policy_for(locked.pk),
        )


def note_access(
    *, dossier: Dossier, person: Person, what: str, object_sha256: str = "", path: str = ""
) -> None:
    """Record that a person took something out of the vault ("downloaded", "exported bag")."""
    with transaction.atomic():
        custody.append(
            dossier,
            what,
            who=str(person.opaque_id),
            object_sha256=object_sha256,
            data={"path": path} if path else {},
        )
