"""Writing, signing and revoking standing approvals: two people, limits, an end."""

from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from andon.canonical import sha256
from andon.signing import sign_document
from incidents import permits, roles
from incidents.models import Incident, Permit, ResumeRequest
from incidents.refused import Refused
from incidents.standing_approvals.granting import kinds as known_kinds
from incidents.standing_approvals.granting import used_today
from incidents.standing_approvals.models import StandingApproval
from runs.formatting import count
from runs.keys import server_key
from runs.locks import lock_run
from runs.models import Person, Project, Run

SCHEMA = "andon.standing-approval/1"
LONGEST = timedelta(days=14)
MOST_PER_DAY = 20


def create(
    *,
    project: Project,
    person: Person,
    kinds: list[str],
    per_day: int,
    furthest_steps: int,
    widest_skip: int,
    expires_at: datetime,
    why: str,
    run: Run | None = None,
) -> StandingApproval:
    """Write one down; nothing happens under it before somebody else has signed it.

    Args:
        kinds: of incidents it is for; see `granting.kinds`.
        per_day: permits per UTC day, over all its runs.
        furthest_steps: the most steps one rollback may run again.
        widest_skip: the most samples one rollback may leave out.
        run: the one run it is for; None: every run of the project.

    Raises:
        Refused: not-allowed, bad-standing, reason-needed.
    """
    roles.need_responder(person, project, "write a standing approval")
    now = timezone.now()
    unknown = sorted(set(kinds) - set(known_kinds()))
    problems = [
        (not kinds, "Choose at least one kind of incident."),
        (bool(unknown), f"No standing approval is valid for {', '.join(unknown)}."),
        (not 0 <= per_day <= MOST_PER_DAY, f"It allows 0 to {count(MOST_PER_DAY)} a day."),
        (furthest_steps < 0 or widest_skip < 0, "Limits are 0 or more."),
        (furthest_steps > 10**9 or widest_skip > 10**15, "A limit this wide is none."),
        (not now < expires_at <= now + LONGEST, f"It must end within {count(LONGEST.days)} days from now."),
        (run is not None and run.project_id != project.pk, "That run belongs to another project."),
    ]
    for wrong, says in problems:
        if wrong:
            raise Refused("bad-standing", says, status=422)
    if not why.strip():
        raise Refused("reason-needed", "Say what it is for: whoever signs has to judge it.")
    made = StandingApproval(
        project=project,
        run=run,
        kinds=sorted(set(kinds)),
        per_day=per_day,
        furthest_steps=furthest_steps,
        widest_skip=widest_skip,
        why=why.strip()[:4000],
        made_by=person,
        made_at=now,
        expires_at=expires_at,
    )
    made.digest = sha256(content(made))
    made.save(force_insert=True)
    return made


def sign(*, standing: StandingApproval, person: Person, digest: str) -> StandingApproval:
    """Sign what was shown; from now on it is in force. The caller has made sure that it is this person, now.

    Args:
        digest: of the content that the page showed.

    Raises:
        Refused: not-allowed, not-you (its writer), signed-already, revoked, expired, changed.
    """
    roles.need_approver(person, standing.project, "sign a standing approval")
    with transaction.atomic():
        fresh = StandingApproval.objects.select_for_update(no_key=True).get(pk=standing.pk)
        if fresh.made_by_id == person.pk:
            others = [one for one in roles.approvers(fresh.project) if one.pk != person.pk]
            raise Refused(
                "not-you",
                f"You wrote it. {roles.names_of(others) or 'Another approver'} may sign.",
                status=403,
            )
        if fresh.signed_at is not None:
            raise Refused("signed-already", "It is signed already.")
        if fresh.revoked_at is not None:
            raise Refused("revoked", "It was revoked: write another.")
        now = timezone.now()
        if fresh.expires_at <= now:
            raise Refused("expired", "Its end has passed: write another.", status=410)
        if digest != fresh.digest:
            raise Refused("changed", "That is not what it says: look again, then sign.")
        fresh.signed_by, fresh.signed_at = person, now
        said = content(fresh) | {
            "standing": str(fresh.pk),
            "digest": fresh.digest,
            "signed_by": str(person.opaque_id),
            "signed_at": permits.rfc3339(now),
        }
        fresh.document = sign_document(said, server_key())
        fresh.save(update_fields=["signed_by", "signed_at", "document"])
    return fresh


def revoke(*, standing: StandingApproval, person: Person, why: str) -> StandingApproval:
    """End one at once; permits under it that nobody has taken are void.

    Raises:
        Refused: not-allowed, reason-needed, revoked.
    """
    roles.need_responder(person, standing.project, "revoke a standing approval")
    if not why.strip():
        raise Refused("reason-needed", "Say why it ends.")
    with transaction.atomic():
        won = StandingApproval.objects.filter(pk=standing.pk, revoked_at=None).update(
            revoked_at=timezone.now(), revoked_by=person, revoked_why=why.strip()[:4000]
        )
    if not won:
        raise Refused("revoked", "It was revoked already.")
    standing.refresh_from_db()
    # Not in that transaction: the lock of a run comes before every other.
    issued = Permit.objects.filter(request__standing=standing, state=Permit.State.ISSUED)
    for run_id, incident_id in issued.values_list("run_id", "incident_id"):
        _void(run_id, incident_id, standing, person)
    return standing


def _void(run_id: int, incident_id: int, standing: StandingApproval, person: Person) -> None:
    with transaction.atomic():
        lock_run(run_id)
        incident = (
            Incident.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run", "dossier")
            .get(pk=incident_id)
        )
        live = permits.live_request(incident)
        taken = Permit.objects.filter(request=live, state=Permit.State.EXCHANGED).exists()
        if live is not None and live.kind == ResumeRequest.Kind.STANDING and not taken:
            said = f"standing approval {standing.pk} was revoked by {person.username}: {standing.revoked_why}"
            permits.void(incident, live, [said])


def content(standing: StandingApproval) -> dict[str, object]:
    """Return what is signed."""
    return {
        "schema": SCHEMA,
        "project": standing.project.slug,
        "run": standing.run.slug if standing.run else None,
        "kinds": standing.kinds,
        "per_day": standing.per_day,
        "furthest_steps": standing.furthest_steps,
        "widest_skip": standing.widest_skip,
        "regime_changes": False,
        "why": standing.why,
        "made_by": str(standing.made_by.opaque_id),
        "expires_at": permits.rfc3339(standing.expires_at),
    }


def document(row: StandingApproval) -> dict[str, object]:
    """Return one as JSON-ready data: what is signed, its digest, its state and its count of today."""
    return {
        "id": str(row.pk),
        "state": state(row),
        "used_today": used_today(row),
        "digest": row.digest,
        "signed_by": row.signed_by.username if row.signed_by else None,
        "content": content(row),
        "document": row.document,
    }


def state(row: StandingApproval) -> str:
    """Return where it stands: waits for a signature | in force | revoked | expired."""
    if row.revoked_at is not None:
        return "revoked"
    if row.expires_at <= timezone.now():
        return "expired"
    return "in force" if row.signed_at is not None else "waits for a signature"
