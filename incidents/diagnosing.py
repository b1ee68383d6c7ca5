"""What people do on a diagnosis board: take a family, run a probe, record its result, close the cause.

Each is one transaction under the incident's row lock, and one row of the board's history. The cause may
be closed, or opened again, at any time: most causes are found after the run goes on.
"""

from typing import Any

from django.db import transaction
from django.utils import timezone

from andon.diagnose.board import FAMILIES
from andon.diagnose.families import Family
from andon.diagnose.probes import OWN, own, probe_of
from andon.diagnose.probes import Probe as Known
from incidents import board, review, roles, states
from incidents.models import BoardChange, Incident, Probe
from incidents.refused import Refused
from runs.models import Person

CERTAINTIES = ("known", "probable", "unknown")
_TEXT = 4_000
K = BoardChange.Kind


def take(*, incident: Incident, person: Person, family: str) -> None:
    """Say who looks after a family; from somebody else, too, which the history says.

    Raises:
        Refused: not-allowed, no-family, yours-already.
    """
    about = _family(family)
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "take a family")
        owner = board.owners(fresh).get(about)
        if owner is not None and owner.pk == person.pk:
            raise Refused("yours-already", f"You have {about} already.")
        said = f"took {about}" + (f" from {owner.username}" if owner else "")
        _change(fresh, person, K.TAKE, said, family=about)


def release(*, incident: Incident, person: Person, family: str) -> None:
    """Give a family back.

    Raises:
        Refused: not-allowed, no-family, not-yours.
    """
    about = _family(family)
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "give a family back")
        owner = board.owners(fresh).get(about)
        if owner is None or owner.pk != person.pk:
            who = f"{owner.username} has it" if owner else "nobody has it"
            raise Refused("not-yours", f"You do not have {about}: {who}.")
        _change(fresh, person, K.RELEASE, f"gave {about} back", family=about)


def start(
    *,
    incident: Incident,
    person: Person,
    family: str,
    key: str,
    name: str = "",
    condition: str = "",
    instead_of: int | None = None,
) -> Probe:
    """Start a probe. While one runs, another starts only instead of it.

    Args:
        key: of `andon.diagnose.probes`, or "own" with a name and the one condition it changes.
        instead_of: number of the running probe that is stopped for it, as the person saw it.

    Raises:
        Refused: not-allowed, no-family, no-probe, nothing-said, probe-running.
    """
    about = _family(family)
    known = _known(about, key, name, condition)
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "start a probe")
        running = fresh.probes.filter(state=Probe.State.RUNNING).select_related("owner").first()
        if running is not None and running.number != instead_of:
            raise Refused(
                "probe-running",
                f"H-{running.number} “{running.name}” by {running.owner.username} is running. Two conditions "
                "changed at once tell nothing about either: stop it first, or start this one instead of it.",
            )
        if running is not None:
            _end(fresh, running, person, f"stopped for “{known.name}”")
        command = known.command(board.record(fresh))
        made = Probe.objects.create(
            incident=fresh,
            number=fresh.probes.count() + 1,
            family=about,
            key=known.key,
            name=known.name,
            condition=known.condition,
            command=command or "",
            owner=person,
            started_at=timezone.now(),
        )
        _change(fresh, person, K.START, f"started {made}", family=about, probe=made)
    return made


def stop(*, incident: Incident, person: Person, number: int, why: str = "") -> None:
    """Stop a running probe without a result.

    Raises:
        Refused: not-allowed, no-probe, not-running.
    """
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "stop a probe")
        _end(fresh, _running(fresh, number), person, why.strip()[:_TEXT])


def record(*, incident: Incident, person: Person, number: int, result: str, note: str = "") -> Probe:
    """Write down how a running probe came out: what it rules out is ruled out from here on.

    Raises:
        Refused: not-allowed, no-probe, not-running, no-result.
    """
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "record a result")
        probe = _running(fresh, number)
        known = board.known(probe)
        said = known.result(result)
        if said is None:
            choices = ", ".join(f"“{one.words}”" for one in known.results)
            raise Refused("no-result", f"Choose how it came out: {choices}, or that it could not be told.")
        probe.state, probe.ended_at = Probe.State.DONE, timezone.now()
        probe.result, probe.note, probe.recorded_by = said.key, note.strip()[:_TEXT], person
        probe.save()
        text = f"{probe}: {said.words}" + (f". {probe.note}" if probe.note else "")
        _change(fresh, person, K.RESULT, text, family=probe.family, probe=probe)
        review.ask(fresh)  # another family may lead now, and Andon's own plan follows it
    return probe


def close_cause(
    *, incident: Incident, person: Person, certainty: str, family: str = "", ids: list[str], why: str
) -> None:
    """Close the cause as known, probable or unknown, or open it again ("open").

    Args:
        family: the cause's; none for unknown and open.
        ids: of the lines and results that carry it; a known or probable cause names at least one.
        why: in the person's own words.

    Raises:
        Refused: not-allowed, no-certainty, no-family, ruled-out, no-id, nothing-said.
    """
    if certainty not in (*CERTAINTIES, "open"):
        raise Refused("no-certainty", "A cause is known, probable or unknown.", status=422)
    named = certainty in ("known", "probable")
    about = _family(family) if named else ""
    if not why.strip():
        raise Refused("nothing-said", "Say in your own words what the cause is, or what was looked at.")
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "close the cause")
        carried = sorted(set(ids)) if named else []
        if named:
            shown = board.of(fresh)
            row = shown.row(about)
            if row.standing == "ruled out":
                raise Refused("ruled-out", f"{row.by} ruled {about} out. Another probe can bring it back.")
            unknown = [one for one in carried if one not in row.carries]
            if unknown or not carried:
                which = ", ".join(unknown) or "none was chosen"
                raise Refused("no-id", f"Choose lines or results of {about} that carry the cause: {which}.")
        words = f"cause {certainty}" + (f": {about}" if about else "")
        data = {"certainty": certainty, "ids": carried}
        text = f"{words}. {why.strip()[:_TEXT]}"
        _change(fresh, person, K.CAUSE, text, family=about, data=data, own=why.strip()[:_TEXT])
        review.ask(fresh)


def _family(name: str) -> str:
    try:
        family = Family(name)
    except ValueError:
        family = Family.UNKNOWN
    if family not in FAMILIES:
        raise Refused("no-family", f"“{name[:40]}” is none of the failure families.", status=422)
    return str(family)


def _known(family: str, key: str, name: str, condition: str) -> Known:
    if key == OWN:
        if not name.strip() or not condition.strip():
            raise Refused("nothing-said", "Say what is done and the one condition that differs.")
        return own(Family(family), name.strip()[:300], condition.strip()[:120])
    known = probe_of(key)
    if known is None:
        raise Refused("no-probe", f"There is no probe “{key[:40]}”.", status=422)
    return known


def _running(incident: Incident, number: int) -> Probe:
    probe = incident.probes.filter(number=number).first()
    if probe is None:
        raise Refused("no-probe", f"This incident has no probe H-{number}.", status=404)
    if probe.state != Probe.State.RUNNING:
        raise Refused("not-running", f"H-{number} is {probe.state} already.")
    return probe


def _end(incident: Incident, probe: Probe, person: Person, why: str) -> None:
    probe.state, probe.ended_at = Probe.State.STOPPED, timezone.now()
    probe.save(update_fields=["state", "ended_at"])
    text = f"stopped {probe}" + (f": {why}" if why else "")
    _change(incident, person, K.STOP, text, family=probe.family, probe=probe)


def _change(
    incident: Incident,
    person: Person,
    kind: str,
    text: str,
    *,
    family: str = "",
    probe: Probe | None = None,
    data: dict[str, Any] | None = None,
    own: str = "",
) -> None:
    """Write one row of the board's history, and the same on the timeline."""
    change = BoardChange.objects.create(
        incident=incident,
        at=timezone.now(),
        person=person,
        kind=kind,
        family=family,
        probe=probe,
        text=own or text,
        data=data or {},
    )
    states.record(incident, kind="diagnosis", text=text, person=person, data={"board": change.pk})
