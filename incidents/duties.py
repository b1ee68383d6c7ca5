"""Who does what in the first hour: lead, evidence, communications; what the channel is told; handing over."""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from incidents import roles, states
from incidents.models import Incident, Note
from incidents.refused import Refused
from runs.access import members
from runs.models import Person

DUTIES = {"lead": "lead", "evidence_owner": "evidence", "communications": "comms"}
NEXT_UPDATE_MIN = (15, 30, 60)  # a channel that waits longer asks by itself
_MOST_CHARS = 4_000


def holders(incident: Incident) -> list[Person]:
    """Return who may be given a duty: active responders, approvers and admins of the project, by name."""
    return members(incident.run.project, *roles.RESPONDERS)


def give(*, incident: Incident, duty: str, person: Person, to: str) -> Incident:
    """Give a duty to a member of the project by name, or to nobody.

    Args:
        duty: one of `DUTIES`.
        to: a username; "" takes it from whoever has it.

    Raises:
        Refused: not-allowed, no-duty, no-such-person.
    """
    roles.need_responder(person, incident.run.project, "give out who does what")
    if duty not in DUTIES:
        raise Refused("no-duty", f"There is no duty “{duty[:40]}”.", status=422)
    chosen = _member(incident, to) if to else None
    with transaction.atomic():
        # The last word counts: two people who take it at once see the second name, and the timeline both.
        Incident.objects.filter(pk=incident.pk).update(**{duty: chosen})
        said = f"{DUTIES[duty]} {chosen.username}" if chosen else f"{DUTIES[duty]} nobody"
        states.record(incident, kind="duty", text=said, person=person, data={"duty": duty})
    incident.refresh_from_db()
    return incident


def _member(incident: Incident, name: str) -> Person:
    chosen = next((one for one in holders(incident) if one.username == name), None)
    if chosen is None:
        raise Refused("no-such-person", "Choose a responder, approver or admin of the project.", status=422)
    return chosen


def say_status(*, incident: Incident, person: Person, text: str, next_min: int) -> Incident:
    """Keep what the channel was told, and when it was promised to hear again.

    Args:
        next_min: minutes to the next update, one of `NEXT_UPDATE_MIN`; 0 = none is promised.

    Raises:
        Refused: not-allowed, no-text, bad-time.
    """
    roles.need_responder(person, incident.run.project, "tell the channel")
    text = text.strip()[:_MOST_CHARS]
    if not text:
        raise Refused("no-text", "The status text is empty.", status=422)
    if next_min not in (0, *NEXT_UPDATE_MIN):
        raise Refused("bad-time", "The next update is in 15, 30 or 60 minutes, or not promised.", status=422)
    now = timezone.now()
    promised = now + timedelta(minutes=next_min) if next_min else None
    with transaction.atomic():
        Incident.objects.filter(pk=incident.pk).update(next_update_at=promised)
        states.record(
            incident,
            kind="status",
            text=f"told the channel: {text}",
            person=person,
            data={"next_min": next_min},
        )
    incident.refresh_from_db()
    return incident


def hand_over(*, incident: Incident, person: Person, to: str, text: str) -> Note:
    """Write a hand-over note and give the lead on.

    Raises:
        Refused: not-allowed, no-text, no-such-person.
    """
    roles.need_responder(person, incident.run.project, "hand over")
    text = text.strip()[:_MOST_CHARS]
    if not text:
        raise Refused("no-text", "Say what the next lead must know.", status=422)
    chosen = _member(incident, to)
    with transaction.atomic():
        note = Note.objects.create(
            incident=incident,
            person=person,
            at=timezone.now(),
            text=f"**Hand-over to {chosen.username}**\n\n{text}",
        )
        Incident.objects.filter(pk=incident.pk).update(lead=chosen)
        states.record(
            incident,
            kind="handover",
            text=f"handed over to {chosen.username}",
            person=person,
            data={"note": note.pk},
        )
    incident.refresh_from_db()
    return note
