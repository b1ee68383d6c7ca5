"""Who holds which role in a project: given and taken by its admins, every change a row of the log.

Nobody gives a role to themself, so an admin who wants to approve asks another admin, or the operator
(`manage.py create_person NAME --role approver`). A project keeps at least one admin who can sign in.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.db import transaction
from django.http import HttpRequest

from runs.access import project_member
from runs.accounts import audit
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Membership, Person, Project, Role

WORDS = {role.value: str(role.label).lower() for role in Role}


def of(project: Project) -> list[Membership]:
    """Return the members of a project by name."""
    rows = Membership.objects.filter(project=project).select_related("person")
    return list(rows.order_by("person__username"))


def add(
    *, project: Project, by: Person, username: str, roles: Iterable[str], request: HttpRequest | None = None
) -> Membership:
    """Make a person who can sign in already a member.

    Raises:
        Refused: not-allowed, no-role, unknown-person, member-already.
    """
    wanted = known(roles)
    with _admin(project, by):
        person = Person.objects.filter(username=username.strip(), is_active=True).first()
        if person is None:
            raise Refused("unknown-person", f"Nobody here is called “{username.strip()[:150]}”: invite them.")
        made, is_new = Membership.objects.get_or_create(
            project=project, person=person, defaults={"roles": wanted}
        )
        if not is_new:
            raise Refused("member-already", f"{person.username} is a member already: change their roles.")
        note(project, by, person, [], wanted, request)
    return made


def set_roles(
    *, project: Project, by: Person, person: Person, roles: Iterable[str], request: HttpRequest | None = None
) -> Membership:
    """Replace the roles of a member.

    Raises:
        Refused: not-allowed, no-role, not-a-member, not-yourself, last-admin.
    """
    wanted = known(roles)
    with _admin(project, by):
        member = _member(project, person)
        before = list(member.roles)
        if by.pk == person.pk and (more := sorted(set(wanted) - set(before))):
            named = ", ".join(WORDS[role] for role in more)
            raise Refused(
                "not-yourself", f"Nobody gives themself a role: another admin may make you {named}."
            )
        if Role.ADMIN in before and Role.ADMIN not in wanted:
            keep_an_admin(project, person)
        if sorted(before) != wanted:
            member.roles = wanted
            member.save(update_fields=["roles"])
            note(project, by, person, before, wanted, request)
    return member


def remove(*, project: Project, by: Person, person: Person, request: HttpRequest | None = None) -> None:
    """Take a person out of a project: from then on they see nothing of it.

    Raises:
        Refused: not-allowed, not-a-member, last-admin.
    """
    with _admin(project, by):
        member = _member(project, person)
        if Role.ADMIN in member.roles:
            keep_an_admin(project, person)
        before = list(member.roles)
        member.delete()
        note(project, by, person, before, [], request)


def note(
    project: Project,
    by: Person | None,
    person: Person,
    before: list[str],
    after: list[str],
    request: HttpRequest | None,
) -> None:
    """Write a change of roles into the log; `by` is None for a command on the server."""
    audit.note(
        AccountEvent.Kind.ROLES,
        request=request,
        by=by,
        about=person,
        project=project,
        before=sorted(before),
        after=sorted(after),
    )


@contextmanager
def _admin(project: Project, by: Person) -> Iterator[None]:
    """Hold the project's row, so that two admins do not take each other's role at once."""
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        need_admin(by, project, "change who holds which role")
        yield


def need_admin(person: Person, project: Project, to_do: str) -> None:
    """Let an admin of the project through.

    Raises:
        Refused: not-allowed.
    """
    if not project_member(person, project, Role.ADMIN):
        raise Refused(
            "not-allowed", f"Only an admin of {project.name or project.slug} may {to_do}.", status=403
        )


def known(roles: Iterable[str]) -> list[str]:
    """Return roles in order, each once.

    Raises:
        Refused: unknown-role, no-role.
    """
    wanted = sorted(set(roles))
    if unknown := [role for role in wanted if role not in Role.values]:
        raise Refused("unknown-role", f"There is no role “{unknown[0][:40]}”.")
    if not wanted:
        raise Refused("no-role", "Choose at least one role, or remove the person.")
    return wanted


def _member(project: Project, person: Person) -> Membership:
    found = Membership.objects.select_for_update(no_key=True).filter(project=project, person=person).first()
    if found is None:
        raise Refused("not-a-member", f"{person.username} is not a member any more.")
    return found


def keep_an_admin(project: Project, leaving: Person) -> None:
    """Make sure that somebody else is an admin who can sign in; the project's row is locked.

    Raises:
        Refused: last-admin.
    """
    others = Membership.objects.filter(
        project=project, roles__contains=[Role.ADMIN], person__is_active=True
    ).exclude(person=leaving)
    # Who never took up their invitation cannot give anybody a role.
    if not any(_can_sign_in(one.person) for one in others.select_related("person")):
        raise Refused(
            "last-admin",
            f"{leaving.username} is the last admin who can sign in: make somebody else an admin first.",
        )


def _can_sign_in(person: Person) -> bool:
    return (
        person.has_usable_password()
        or Authenticator.objects.filter(user=person, type=Authenticator.Type.WEBAUTHN).exists()
        or SocialAccount.objects.filter(user=person).exists()
    )
