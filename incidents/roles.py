"""Who may do what to an incident, in words for those who may not."""

from evidence.models import Item
from incidents.models import Incident
from incidents.refused import Refused
from runs.access import members, project_member
from runs.models import Person, Project, Role

RESPONDERS = (Role.RESPONDER, Role.APPROVER, Role.ADMIN)
APPROVERS = (Role.APPROVER,)


def need_responder(person: Person, project: Project, to_do: str) -> None:
    """Let a responder, approver or admin through.

    Raises:
        Refused: not-allowed.
    """
    if not project_member(person, project, *RESPONDERS):
        raise Refused(
            "not-allowed",
            f"Only a responder, approver or admin of {project.name or project.slug} may {to_do}.",
            status=403,
        )


def locked_for(incident: Incident, person: Person, to_do: str) -> Incident:
    """Lock an incident until the transaction ends, for what any responder may do, and return it fresh.

    Raises:
        Refused: not-allowed.
    """
    need_responder(person, incident.run.project, to_do)
    return (
        Incident.objects.select_for_update(no_key=True, of=("self",))
        .select_related("run", "run__project", "dossier")
        .get(pk=incident.pk)
    )


def need_approver(person: Person, project: Project, to_do: str) -> None:
    """Let an approver through.

    Raises:
        Refused: not-allowed, naming who may.
    """
    if not project_member(person, project, *APPROVERS):
        who = names_of(approvers(project))
        may = f"{who} may." if who else "Nobody has this role yet: an admin can give it."
        raise Refused("not-allowed", f"Only an approver may {to_do}. {may}", status=403)


def approvers(project: Project) -> list[Person]:
    """Return the active approvers of a project by name."""
    return members(project, *APPROVERS)


def why_not_approver(incident: Incident, person: Person, requester: Person | None) -> str:
    """Return why this approver may not approve on this incident, "" when they may.

    On one incident nobody approves what they requested, edited or waived for.
    """
    others = [one for one in approvers(incident.run.project) if not _has_a_part(incident, one, requester)]
    who = (
        f" {names_of(others)} may approve." if others else " No other approver is left: an admin can add one."
    )
    if requester is not None and requester.pk == person.pk:
        return f"You asked.{who}"
    if edited(incident, person):
        return f"You edited the plan.{who}"
    if waived(incident, person):
        return f"You waived evidence.{who}"
    return ""


def edited(incident: Incident, person: Person) -> bool:
    """Return whether a person made any version of the plan."""
    return incident.plans.filter(made_by=person).exists()


def waived(incident: Incident, person: Person) -> bool:
    """Return whether a person waived any item of this incident's evidence."""
    dossiers = [incident.dossier_id, *incident.earlier_dossiers]
    return Item.objects.filter(dossier_id__in=dossiers, waived_by=str(person.opaque_id)).exists()


def requested(incident: Incident, person: Person) -> bool:
    """Return whether a person ever asked to resume on this incident."""
    return incident.requests.filter(requested_by=person).exists()


def free_approvers(incident: Incident, requester: Person | None) -> list[Person]:
    """Return the approvers who have no part in what is to be approved."""
    return [one for one in approvers(incident.run.project) if not _has_a_part(incident, one, requester)]


def names_of(people: list[Person]) -> str:
    """Return "jonas.w or priya.n"."""
    names = [person.username for person in people]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _has_a_part(incident: Incident, person: Person, requester: Person | None) -> bool:
    asked = requester is not None and requester.pk == person.pk
    return asked or edited(incident, person) or waived(incident, person)
