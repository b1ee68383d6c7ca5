"""What people do to an incident, apart from resuming (see `incidents.approval`). One transaction each."""

from incidents.models import Incident, Note, Plan
from runs.models import Person, Run


def acknowledge(*, incident: Incident, person: Person) -> Incident:
    """Say that somebody has it; the first to say so becomes the lead.

    Raises:
        Refused: not a responder of the project, or the incident is over.
    """
    raise NotImplementedError


def hold_by_hand(*, run: Run, person: Person, why: str) -> Incident:
    """Hold a run because a person says so; opens an incident of kind "held by hand".

    Raises:
        Refused: not a responder, no reason, or the run is held already.
    """
    raise NotImplementedError


def change_plan(
    *,
    incident: Incident,
    person: Person,
    kind: str | None = None,
    checkpoint_step: int | None = None,
    skip_from: int | None = None,
    skip_to: int | None = None,
    exclusions: dict[str, list[object]] | None = None,
    changes: list[dict[str, object]] | None = None,
    why: str = "",
) -> Plan:
    """Make a new version of the plan; what is not given stays or follows from what is.

    A live request is voided and says what changed.

    Raises:
        Refused: not a responder, the incident is over, the permit was taken, or the plan contradicts itself.
    """
    raise NotImplementedError


def add_note(*, incident: Incident, person: Person, text: str, replaces: Note | None = None) -> Note:
    """Add a note, or a new text of one of the person's own.

    Raises:
        Refused: no member, or no text.
    """
    raise NotImplementedError


def resolve(*, incident: Incident, person: Person, why: str) -> Incident:
    """Close an incident that does not hold its run.

    Raises:
        Refused: not a responder, no reason, or the incident holds the run.
    """
    raise NotImplementedError
