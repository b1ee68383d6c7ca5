"""What people do to an incident, apart from resuming (see `incidents.approval`). One transaction each."""

from collections.abc import Callable
from typing import Any, TypeVar

from django.db import transaction
from django.utils import timezone

from incidents import opening, permits, plans, roles, states, worsening
from incidents.models import Incident, Note, Plan
from incidents.notes import MOST_CHARS
from incidents.refused import Refused
from runs.access import project_member
from runs.formatting import count
from runs.locks import lock_run
from runs.models import Checkpoint, Person, Run
from runs.policies import policy_for

T = TypeVar("T")
S = Incident.State
EXCLUDABLE = ("nodes", "ranks", "gpus")


def acknowledge(*, incident: Incident, person: Person) -> Incident:
    """Say that somebody has it; the first to say so becomes the lead.

    Raises:
        Refused: not-allowed, over, acknowledged-already.
    """
    roles.need_responder(person, incident.run.project, "acknowledge")
    with transaction.atomic():
        # Compare-and-set: two people press at once, one has it, the other learns who.
        won = Incident.objects.filter(
            pk=incident.pk, acknowledged_at=None, state__in=Incident.UNRESOLVED
        ).update(acknowledged_at=timezone.now(), acknowledged_by=person)
        if won:
            Incident.objects.filter(pk=incident.pk, lead=None).update(lead=person)
            states.record(incident, kind="acknowledged", text="acknowledged", person=person)
    incident.refresh_from_db()
    if not won:
        if incident.state not in Incident.UNRESOLVED:
            raise Refused("over", f"Incident {incident.pk} is {incident.state}.")
        by = incident.acknowledged_by.username if incident.acknowledged_by else "somebody"
        raise Refused(
            "acknowledged-already", f"{by} acknowledged at {incident.acknowledged_at:%H:%M:%S} UTC."
        )
    return incident


def hold_by_hand(*, run: Run, person: Person, why: str) -> Incident:
    """Hold a run because a person says so.

    Opens an incident of kind "held by hand"; an open incident that holds nothing becomes one that does.

    Raises:
        Refused: not-allowed, reason-needed, held-already (an incident holds it, or watches its resume).
    """
    roles.need_responder(person, run.project, "hold the run")
    why = why.strip()
    if not why:
        raise Refused("reason-needed", "Say why: everybody who is woken by it will ask.")
    with transaction.atomic():
        run = lock_run(run.pk)
        known = states.unresolved(run.pk)
        if known is not None and known.state == S.OPEN and not known.holds:
            return worsening.hold_open(known, person=person, why=why)
        if known is not None:
            raise Refused("held-already", f"Incident {known.pk} of {run.slug} is {known.state} already.")
        return opening.open_incident(run, [], person=person, why=why)


def change_plan(
    *,
    incident: Incident,
    person: Person,
    kind: str | None = None,
    checkpoint_step: int | None = None,
    skip_from: int | None = None,
    skip_to: int | None = None,
    exclusions: dict[str, list[Any]] | None = None,
    changes: list[dict[str, Any]] | None = None,
    why: str = "",
) -> Plan:
    """Make a new version of the plan; what is not given stays or follows from what is.

    A live request is voided and says what changed.

    Args:
        kind: one of `Plan.Kind`.
        checkpoint_step: a verified checkpoint before the first bad step.
        skip_from, skip_to: absolute samples, half open; both or none.
        exclusions: what the next attempt must at least leave out: nodes, ranks, gpus.
        changes: [{"what", "was", "to", "changes_regime"}].

    Raises:
        Refused: not-allowed, over, taken (the permit is out), bad-plan.
    """
    roles.need_responder(person, incident.run.project, "change the plan")

    def change(fresh: Incident) -> Plan:
        if fresh.state in (S.WATCHING, S.RESOLVED, S.FALSE_ALARM):
            raise Refused("over", f"Incident {fresh.pk} is {fresh.state}: the plan was carried out.")
        if fresh.state == S.RESUMING:
            raise Refused(
                "taken",
                "The permit for this plan was taken and is valid offline: it cannot be taken back.",
            )
        made = _changed(
            fresh,
            kind=kind,
            checkpoint_step=checkpoint_step,
            skip=(skip_from, skip_to),
            exclusions=exclusions,
            changes=changes,
            why=why,
        )
        plan = plans.store(fresh, made, person=person)
        permits.revalidate(fresh)
        return plan

    return _locked(incident, change)


def add_note(*, incident: Incident, person: Person, text: str, replaces: Note | None = None) -> Note:
    """Add a note, or a new text of one of the person's own.

    Raises:
        Refused: not-allowed, no-text, too-long, not-yours, changed-meanwhile.
    """
    if not project_member(person, incident.run.project):
        raise Refused("not-allowed", "Only members of the project may add a note.", status=403)
    if not text.strip():
        raise Refused("no-text", "The note is empty.")
    if len(text) > MOST_CHARS:
        raise Refused("too-long", f"A note has at most {count(MOST_CHARS)} characters.", status=422)
    if replaces is not None and (replaces.person_id != person.pk or replaces.incident_id != incident.pk):
        raise Refused("not-yours", "Only who wrote a note may change it.", status=403)
    with transaction.atomic():
        if replaces is not None:
            Note.objects.select_for_update(no_key=True).get(pk=replaces.pk)
            if Note.objects.filter(replaces=replaces).exists():
                raise Refused(
                    "changed-meanwhile", "You changed this note meanwhile: look at its newest text first."
                )
        note = Note.objects.create(
            incident=incident, person=person, at=timezone.now(), text=text.strip(), replaces=replaces
        )
        states.record(
            incident,
            kind="note",
            text="note changed" if replaces else "note added",
            person=person,
            data={"note": note.pk},
        )
    return note


def resolve(*, incident: Incident, person: Person, why: str) -> Incident:
    """Close an incident that does not hold its run.

    Raises:
        Refused: not-allowed, reason-needed, over, held.
    """
    roles.need_responder(person, incident.run.project, "close an incident")
    if not why.strip():
        raise Refused("reason-needed", "Say why it can be closed.")

    def close(fresh: Incident) -> Incident:
        if fresh.state != S.OPEN:
            raise Refused("over", f"Incident {fresh.pk} is {fresh.state}.")
        if fresh.holds:
            raise Refused("held", "The run is held: only an approved resume, or a false alarm, ends it.")
        states.move(fresh, S.RESOLVED, person=person, why=why.strip())
        return fresh

    return _locked(incident, close)


def _locked(incident: Incident, do: Callable[[Incident], T]) -> T:
    with transaction.atomic():
        lock_run(incident.run_id)
        fresh = (
            Incident.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run", "run__project", "dossier")
            .get(pk=incident.pk)
        )
        result = do(fresh)
    incident.refresh_from_db()
    return result


def _changed(
    incident: Incident,
    *,
    kind: str | None,
    checkpoint_step: int | None,
    skip: tuple[int | None, int | None],
    exclusions: dict[str, list[Any]] | None,
    changes: list[dict[str, Any]] | None,
    why: str,
) -> plans.Draft:
    known = plans.newest(incident)
    wanted = kind or (known.kind if known else "")
    if wanted not in Plan.Kind.values:
        raise Refused("bad-plan", f"“{wanted}” is no kind of plan.", status=422)
    checkpoint = _checkpoint(incident, checkpoint_step)
    if checkpoint is None and known is not None and known.checkpoint and kind in (None, known.kind):
        checkpoint = Checkpoint.objects.filter(
            run_id=incident.run_id, step=known.checkpoint["step"], uri=known.checkpoint["uri"]
        ).first()
    made = plans.Draft(kind=wanted, why=why.strip())
    kept = known.exclusions if known else {}
    plans.complete(
        incident,
        made,
        policy=policy_for(incident.run_id),
        checkpoint=checkpoint,
        exclusions=_exclusions(exclusions) if exclusions is not None else kept,
    )
    made.changes = _changes(changes) if changes is not None else (known.changes if known else [])
    _set_window(made, *skip)
    return made


def _checkpoint(incident: Incident, step: int | None) -> Checkpoint | None:
    if step is None:
        return None
    first = incident.first_bad.get("step")
    if first is not None and step >= first:
        raise Refused(
            "bad-plan",
            f"Checkpoint {count(step)} holds what step {count(first)} did: choose one before it.",
            status=422,
        )
    found = (
        Checkpoint.objects.filter(run_id=incident.run_id, step=step, state=Checkpoint.State.VERIFIED)
        .order_by("-attempt")
        .first()
    )
    if found is None:
        raise Refused("bad-plan", f"There is no verified checkpoint of step {count(step)}.", status=422)
    return found


def _set_window(made: plans.Draft, skip_from: int | None, skip_to: int | None) -> None:
    if skip_from is None and skip_to is None:
        return
    if skip_from is None or skip_to is None or not 0 <= skip_from < skip_to:
        raise Refused("bad-plan", "A skip window needs 0 ≤ from < to, in absolute samples.", status=422)
    if made.kind not in (Plan.Kind.ROLLBACK_AND_SKIP, Plan.Kind.SKIP_AND_CONTINUE):
        raise Refused("bad-plan", f"A plan to {made.kind.replace('_', ' ')} skips nothing.", status=422)
    made.skip = {"from": skip_from, "to": skip_to}
    made.numbers["samples_skipped"] = skip_to - skip_from
    made.numbers.pop("skipped_batches", None)
    made.lacks = [] if made.checkpoint or made.kind not in plans.ROLLBACKS else made.lacks[:1]


def _exclusions(given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    unknown = sorted(set(given) - set(EXCLUDABLE))
    if unknown:
        raise Refused(
            "bad-plan", f"Exclusions are nodes, ranks or gpus, not {', '.join(unknown)}.", status=422
        )
    kept: dict[str, list[Any]] = {}
    for name, values in given.items():
        wanted = int if name == "ranks" else str
        if any(not isinstance(value, wanted) or isinstance(value, bool) for value in values):
            raise Refused(
                "bad-plan",
                f"Exclusions: {name} must be {'numbers' if wanted is int else 'names'}.",
                status=422,
            )
        if values:
            kept[name] = sorted(set(values))
    return kept


def _changes(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = []
    for change in given:
        what = str(change.get("what") or "").strip()
        if not what:
            raise Refused("bad-plan", "Each change names what is changed.", status=422)
        kept.append(
            {
                "what": what,
                "was": change.get("was"),
                "to": change.get("to"),
                "changes_regime": bool(change.get("changes_regime")),
            }
        )
    return kept
