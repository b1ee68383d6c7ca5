"""Which pages there must be: made from what is true of an incident now, and raised by name for the rest.

An incident has one page of its own, however many ranks time out after it; a request to resume has one,
which ends when it is answered. What must page is in the hold rules.
"""

import logging
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet
from django.dispatch import receiver
from django.utils import timezone

from evidence.models import Dossier
from evidence.signals import vault_alarm
from incidents import duties, roles
from incidents.models import Incident, ResumeRequest
from incidents.paging import asking, escalating, texts
from incidents.paging.ladder import paging
from incidents.paging.models import Delivery, Page
from incidents.refused import Refused
from incidents.standing_approvals import granting as standing
from runs import formatting as words
from runs.models import Person, Project, RunProgress, Work
from runs.work import Lease, Payload, Retry, handler

log = logging.getLogger(__name__)

K = Page.Kind
# A worker that cannot do it now tries again soon: the back-off of work would reach five minutes.
AGAIN_S = 5.0
FORGET_AFTER = timedelta(days=90)


@handler(asking.KIND)
def do(payload: Payload, lease: Lease) -> None:
    """Bring the pages of an incident, or one page, up to date, and send what is due."""
    try:
        following = look(payload)
    except Exception as error:
        log.exception("the pages of %s could not be brought up to date", payload)
        raise Retry(AGAIN_S, f"{type(error).__name__}: {error}"[:300]) from error
    if following is not None:
        raise Retry(max(1.0, (following - timezone.now()).total_seconds()), "until somebody has it")


def look(payload: Payload) -> datetime | None:
    """Do what `do` does; returns when to look again, None when nothing is to come."""
    now = timezone.now()
    if "incident" in payload:
        keys = _of_incident(int(str(payload["incident"])), now)
    else:
        keys = [str(payload["page"])]
    times = [_escalate(key, now) for key in keys]
    if "incident" in payload:
        times.append(_until_woken(int(str(payload["incident"])), now))
    return min((at for at in times if at is not None), default=None)


def _escalate(key: str, now: datetime) -> datetime | None:
    with transaction.atomic():
        page = Page.objects.select_for_update(of=("self",)).filter(key=key).first()
        return None if page is None else escalating.escalate(page, now)


# --- of an incident


def _of_incident(pk: int, now: datetime) -> list[str]:
    """Make, raise again, acknowledge or end the pages of one incident; returns the keys of all."""
    with transaction.atomic():
        # Not the run's lock: whoever waits for people must not wait for this.
        incident = Incident.objects.select_related("run__project", "acknowledged_by").filter(pk=pk).first()
        if incident is None:
            return []
        _incident_page(incident, now)
        _approval_pages(incident, now)
        if incident.state not in Incident.UNRESOLVED:
            _end(Page.objects.filter(incident=incident), _how_it_ended(incident), now)
    return list(Page.objects.filter(incident=incident).order_by("id").values_list("key", flat=True))


def _until_woken(pk: int, now: datetime) -> datetime | None:
    """Return when a run that a standing approval would let go on becomes a person's matter after all."""
    incident = Incident.objects.select_related("run__project").filter(pk=pk).first()
    if incident is None or not standing.waits(incident, now):
        return None
    return incident.opened_at + standing.PATIENCE


def _how_it_ended(incident: Incident) -> str:
    last = incident.changes.order_by("-id").values_list("why", flat=True).first()
    said = f"Incident {incident.pk} is {incident.state.replace('_', ' ')}"
    return f"{said}: {words.inert(last, 120)}" if last else f"{said}."


def _incident_page(incident: Incident, now: datetime) -> None:
    if incident.state not in Incident.UNRESOLVED:
        return
    title, says = texts.of_incident(incident)
    # Nobody is woken for what goes on by itself within what an approver signed in advance.
    urgent = incident.holds and not standing.waits(incident, now)
    page, made = Page.objects.select_for_update(of=("self",)).get_or_create(
        key=f"incident-{incident.pk}",
        defaults={
            "group": f"incident-{incident.pk}",
            "kind": K.INCIDENT,
            "project": incident.run.project,
            "incident": incident,
            "title": title,
            "says": says,
            "link": f"/incidents/{incident.pk}",
            "urgent": urgent,
            "raised_at": incident.opened_at,
            "escalating_since": incident.opened_at,
        },
    )
    taken = incident.acknowledged_at
    # Raised anew when the acknowledgement was taken back (it recurred, or was launched without a permit),
    # and when a warning became a hold. A run that is no longer held still has its one page.
    anew = (page.acknowledged_at is not None and taken is None) or (urgent and not page.urgent)
    page.title, page.says = title, says
    page.urgent = page.urgent or urgent
    page.acknowledged_at = taken
    page.acknowledged_by = incident.acknowledged_by.username if incident.acknowledged_by else ""
    if anew and not made:
        page.round, page.escalating_since = page.round + 1, now
    page.save()


def _approval_pages(incident: Incident, now: datetime) -> None:
    live = incident.requests.filter(
        state=ResumeRequest.State.OPEN, kind__in=[ResumeRequest.Kind.RESUME, ResumeRequest.Kind.SOLO]
    ).select_related("requested_by", "plan")
    key = ""
    for request in live:
        key = f"approval-{request.pk}"
        _approval_page(incident, request, key, now)
    over = Page.objects.filter(incident=incident, kind=K.APPROVAL).exclude(key=key)
    _end(over, "The request was answered, changed, or ran out.", now)


def _approval_page(incident: Incident, request: ResumeRequest, key: str, now: datetime) -> None:
    given = list(request.approvals.select_related("approver").order_by("id"))
    asked = request.requested_by.username if request.requested_by else "Andon"
    free = [
        one.username
        for one in roles.free_approvers(incident, request.requested_by)
        if all(approval.approver_id != one.pk for approval in given)
    ]
    says = f"{asked} asks to resume incident {incident.pk} by plan: {request.plan.get_kind_display()}."
    what = "approval waiting"
    if request.grants_at is not None:
        # Its one signature is there; who is paged may stop it.
        at = f"{words.clock(request.grants_at, now)} UTC"
        what = "one person resumes it"
        says = (
            f"{asked} resumes incident {incident.pk} as sole approver on duty at {at} by plan: "
            f"{request.plan.get_kind_display()}. Reject it to stop it."
        )
    elif given:
        says += f" {len(given)} of {request.approvers_needed} approved; another approver is needed."
    page, made = Page.objects.select_for_update(of=("self",)).get_or_create(
        key=key,
        defaults={
            "group": f"incident-{incident.pk}",
            "kind": K.APPROVAL,
            "project": incident.run.project,
            "incident": incident,
            "about": str(request.pk),
            "title": f"{words.inert(incident.run.slug, 60)}: {what}",
            "says": says,
            "link": f"/incidents/{incident.pk}/approve",
            "raised_at": request.requested_at,
            "escalating_since": request.requested_at,
        },
    )
    if not made and page.round <= len(given):
        # One has approved: the ten minutes of the next begin now.
        page.round, page.escalating_since = len(given) + 1, given[-1].at
    page.says, page.to_people = says, free
    page.save()


def _end(pages: QuerySet[Page], why: str, now: datetime) -> None:
    pages.filter(ended_at=None).update(ended_at=now, ended_why=why[:200])


def again(incident: Incident) -> None:
    """Start the escalation of an incident again, in the caller's transaction, until it is taken anew."""
    now = timezone.now()
    Incident.objects.filter(pk=incident.pk).update(acknowledged_at=None, acknowledged_by=None)
    incident.acknowledged_at = incident.acknowledged_by = None
    page = Page.objects.select_for_update(of=("self",)).filter(key=f"incident-{incident.pk}").first()
    if page is not None:
        page.round, page.escalating_since = page.round + 1, now
        page.acknowledged_at, page.acknowledged_by = None, ""
        page.save()
    asking.ask(incident.pk)


# --- raised by name


def raise_page(
    *,
    key: str,
    kind: str,
    title: str,
    says: str,
    link: str,
    project: Project | None = None,
    incident: Incident | None = None,
    about: str = "",
    to_people: list[str] | None = None,
) -> Page:
    """Page for something that has no page of its own accord; the same key twice is one page.

    A key that ended, or that somebody acknowledged, is raised anew.

    Args:
        key: stable name of the trouble, without time or step: `vault-12-fixity-mismatch`.
        kind: one of `Page.Kind`.
        link: path on this server.
    """
    now = timezone.now()
    with transaction.atomic():
        page, made = Page.objects.select_for_update(of=("self",)).get_or_create(
            key=key[:160],
            defaults={
                "group": f"incident-{incident.pk}" if incident is not None else key[:64],
                "kind": kind,
                "project": project,
                "incident": incident,
                "about": about[:100],
                "title": title[:200],
                "says": says,
                "link": link[:200],
                "to_people": to_people or [],
                "raised_at": now,
                "escalating_since": now,
            },
        )
        if not made:
            if page.ended_at is not None or page.acknowledged_at is not None:
                page.round, page.escalating_since = page.round + 1, now
                if page.ended_at is not None:
                    page.raised_at = now
            page.title, page.says, page.to_people = title[:200], says, to_people or []
            page.ended_at, page.ended_why = None, ""
            page.acknowledged_at, page.acknowledged_by = None, ""
            page.save()
        asking.ask_page(page.key)
    return page


def end_page(key: str, why: str) -> bool:
    """End a page that was raised by name; False when it is not up."""
    with transaction.atomic():
        ended = Page.objects.filter(key=key, ended_at=None).update(
            ended_at=timezone.now(), ended_why=why[:200]
        )
        if ended:
            asking.ask_page(key)
    return bool(ended)


def break_glass(incident: Incident, person: Person, why: str) -> None:
    """Tell everybody, over every channel, that somebody broke the glass on an incident."""
    run = words.inert(incident.run.slug, 60)
    raise_page(
        key=f"break-glass-{incident.pk}",
        kind=K.BREAK_GLASS,
        title=f"{run}: break-glass by {person.username}",
        says=f"{person.username} resumes incident {incident.pk} without the usual approval: "
        f"{words.inert(why, 300)}",
        link=f"/incidents/{incident.pk}",
        project=incident.run.project,
        incident=incident,
    )


def page_person(*, incident: Incident, person: Person, who: str, why: str) -> Page:
    """Page one member of the project about an incident, because a person asks for them.

    Raises:
        Refused: not-allowed, no-such-person, no-channel.
    """
    roles.need_responder(person, incident.run.project, "page someone")
    if who not in {one.username for one in duties.holders(incident)}:
        raise Refused("no-such-person", "Choose a responder, approver or admin of the project.", status=422)
    if not paging().of_person(who):
        raise Refused("no-channel", f"{who} has no channel in the paging file: nothing was sent.")
    title = f"{words.inert(incident.run.slug, 60)}: {person.username} asks for you"
    return raise_page(
        key=f"person-{incident.pk}-{who}",
        kind=K.PERSON,
        title=title,
        says=words.inert(why, 300) or f"Incident {incident.pk}: {words.inert(incident.title, 120)}",
        link=f"/incidents/{incident.pk}",
        project=incident.run.project,
        incident=incident,
        to_people=[who],
    )


@receiver(vault_alarm, dispatch_uid="incidents.paging.vault")
def on_vault_alarm(sender: object, dossier: Dossier | None, what: str, says: str, **kwargs: object) -> None:
    """Page that stored evidence is damaged or no longer protected, or that a promise to it is overdue."""
    name = "".join(one if one.isalnum() else "-" for one in what.lower())[:60]
    whose = "store" if dossier is None else str(dossier.pk)
    raise_page(
        key=f"vault-{whose}-{name}",
        kind=K.VAULT,
        title=f"Vault: {words.inert(what, 80)}" + ("" if dossier is None else f", dossier {dossier.pk}"),
        says=words.inert(says, 500),
        link="/vault" if dossier is None else f"/vault/{dossier.pk}",
        project=None if dossier is None else dossier.run.project,
        about="" if dossier is None else str(dossier.pk),
    )


def acknowledge(*, page: Page, person: Person) -> None:
    """Take a page that belongs to no incident's own acknowledgement.

    Raises:
        Refused: not-allowed, over, acknowledged-already.
    """
    # What is of no project is everybody's: a responder of any may take it.
    of = Project.objects.filter(
        memberships__person=person, memberships__roles__overlap=list(roles.RESPONDERS)
    )
    project = page.project or of.first()
    if project is None:
        raise Refused("not-allowed", "Only a responder, approver or admin may acknowledge.", status=403)
    roles.need_responder(person, project, "acknowledge")
    if page.ended_at is not None:
        raise Refused("over", "It is over already.")
    with transaction.atomic():
        won = Page.objects.filter(pk=page.pk, acknowledged_at=None).update(
            acknowledged_at=timezone.now(), acknowledged_by=person.username
        )
        if not won:
            raise Refused("acknowledged-already", f"{page.acknowledged_by or 'Somebody'} has it.")
        asking.ask_page(page.key)


# --- swept


def sweep() -> int:
    """Page for runs nobody watches, and look after what has no work; returns how many were asked.

    Safe to run twice. Work is never lost with a broker; this is for rows that came from a backup without it.
    """
    asked = _not_watched()
    waiting = _worked_on(asking.KIND)
    for pk in Incident.objects.filter(state__in=Incident.UNRESOLVED, pages=None).values_list("pk", flat=True):
        if f"incident-{pk}" not in waiting:
            asking.ask(pk)
            asked += 1
    now = timezone.now()
    for page in Page.objects.filter(ended_at=None, acknowledged_at=None).select_related("project"):
        worked = {page.key, f"incident-{page.incident_id}"} & waiting
        if not worked and escalating.is_unfinished(page, now):
            asking.ask_page(page.key)
            asked += 1
    due = set(Delivery.objects.filter(state=Delivery.State.DUE).values_list("pk", flat=True))
    for pk in due - {int(key) for key in _worked_on(escalating.DELIVER)} if due else ():
        escalating.ask_delivery(pk)
        asked += 1
    return asked


def _worked_on(kind: str) -> set[str]:
    rows = Work.objects.filter(kind=kind, state__in=[Work.State.DUE, Work.State.CLAIMED])
    return set(rows.values_list("key", flat=True))


def _not_watched() -> int:
    unwatched = RunProgress.objects.filter(not_watched_since__isnull=False).select_related("run__project")
    keys = set()
    for progress in unwatched:
        key = f"not-watched-{progress.run_id}"
        keys.add(key)
        if not Page.objects.filter(key=key, ended_at=None).exists():
            title, says = texts.of_not_watched(progress)
            raise_page(
                key=key,
                kind=K.NOT_WATCHED,
                title=title,
                says=says,
                link=f"/runs/{progress.run.slug}",
                project=progress.run.project,
                about=str(progress.run_id),
            )
    over = Page.objects.filter(kind=K.NOT_WATCHED, ended_at=None).exclude(key__in=keys)
    for key in over.values_list("key", flat=True):
        end_page(key, "The run is watched again.")
    return len(keys)


def forget() -> int:
    """Delete pages that ended long ago, with what was sent; returns how many."""
    old = Page.objects.filter(ended_at__lt=timezone.now() - FORGET_AFTER)
    return old.delete()[1].get(Page._meta.label, 0)
