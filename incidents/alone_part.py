"""What a page offers one person alone, and what a standing approval will do by itself."""

from dataclasses import dataclass
from datetime import datetime

from incidents import alone, subjects
from incidents.incident_page import IncidentPage
from incidents.models import Incident, ResumeRequest
from incidents.refused import Refused
from incidents.rulebook import breaker
from incidents.standing_approvals import granting as standing
from runs.formatting import count, duration, inert

K = ResumeRequest.Kind
S = Incident.State


@dataclass(frozen=True, slots=True)
class Alone:
    """Digests are "" where this person may not."""

    glass_digest: str  # break-glass signs this
    glass: str  # who broke the glass, and why
    solo_digest: str
    solo_delay: str
    solo_at: datetime | None  # when a sole approver's word takes effect
    standing: str  # what a standing approval says of this incident
    doubts: list[str]  # why Andon itself may be wrong
    may_withdraw: bool


def of(page: IncidentPage) -> Alone:
    """Return what may be done alone on a page; little is read where nothing waits."""
    incident, person, live = page.incident, page.person, page.live_request
    held = incident.holds and incident.state in (S.OPEN, S.APPROVED)
    plan = page.newest_plan
    complete = held and plan is not None and not page.plan_lacks
    glass = complete and not alone.why_not_break_glass(incident, person)
    sole = complete and incident.state == S.OPEN and live is None and _may_solo(page)
    solo_waits = live is not None and live.kind == K.SOLO and live.state == ResumeRequest.State.OPEN
    return Alone(
        glass_digest=_digest(page, K.BREAK_GLASS) if glass else "",
        glass=_glass(page),
        solo_digest=_digest(page, K.SOLO) if sole else "",
        solo_delay=duration(page.situation.policy.resume.solo_delay_s) if sole else "",
        solo_at=live.grants_at if live is not None and solo_waits else None,
        standing=_standing(incident) if held and live is None else "",
        doubts=[trip.why for trip in breaker.doubts(incident)] if held else [],
        may_withdraw=live is not None
        and live.state == ResumeRequest.State.OPEN
        and live.requested_by_id == person.pk,
    )


def _digest(page: IncidentPage, kind: ResumeRequest.Kind) -> str:
    return subjects.subject(
        page.incident, plan=page.newest_plan, kind=kind, first_bad=page.first_bad_document
    )[1]


def _glass(page: IncidentPage) -> str:
    broken = [one for one in page.requests if one.kind == K.BREAK_GLASS and one.state in ("approved", "used")]
    over = page.incident.state not in Incident.UNRESOLVED
    return f"{broken[0].by} broke the glass: {inert(broken[0].note, 200)}" if broken and not over else ""


def _may_solo(page: IncidentPage) -> bool:
    if not page.situation.policy.resume.solo:
        return False
    try:
        if alone.why_not_solo(page.incident, page.person):
            return False
    except Refused:
        return False
    return not alone.why_not_simple(page.incident, page.newest_plan)


def _standing(incident: Incident) -> str:
    one, why_not = standing.covering(incident)
    if one is None:
        return ""
    head = f"Standing approval {one.pk}, {count(standing.used_today(one))} of {count(one.per_day)} used today"
    if why_not:
        return f"{head}, does not cover this: {why_not}. A person must approve."
    return f"{head}, lets this plan run by itself once the evidence is safe and all ranks stopped."
