"""Roles from groups of the OIDC provider: at each sign-in by SSO a table decides who holds what.

The table is the operator's (`ANDON_OIDC_ROLES`). In a project it names, it decides over the roles it names,
gives and takes; other roles stay as people gave them. Who keeps no role is no member any more. Where the
provider tells no groups at all nothing changes, since that is a provider set up wrongly, or one that left a
long list out; and the last admin who can sign in stays one.
"""

import logging
from collections.abc import Mapping
from typing import Any

from allauth.account.signals import user_logged_in
from django.conf import settings
from django.db import transaction
from django.dispatch import receiver
from django.http import HttpRequest

from runs.accounts import audit, members
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Membership, Person, Project, Role

log = logging.getLogger(__name__)
_SHOWN = 20  # groups that a row of the log names


@receiver(user_logged_in, dispatch_uid="runs.accounts.groups")
def _signed_in(request: HttpRequest, user: Person, sociallogin: Any = None, **_: Any) -> None:
    if sociallogin is None or not settings.SSO_ROLES:
        return
    groups = told(sociallogin.account.extra_data, settings.SSO_GROUPS_CLAIM)
    if groups is None:
        log.warning("the provider told no %r: roles stay as they are", settings.SSO_GROUPS_CLAIM)
        return
    apply(person=user, groups=groups, request=request)


def told(data: Mapping[str, Any], claim: str) -> set[str] | None:
    """Return the groups that userinfo, or else the ID token, names; None where neither does.

    Args:
        data: {"userinfo": {...}, "id_token": {...}}, either may be missing.
        claim: its name; a dot leads into an object ("realm_access.roles") where no claim has the whole name.
    """
    for part in ("userinfo", "id_token"):
        claims = data.get(part)
        value = _at(claims, claim) if isinstance(claims, dict) else None
        if isinstance(value, str):
            return {value}
        if isinstance(value, list):
            return {one for one in value if isinstance(one, str)}
    return None


def _at(claims: Mapping[str, Any], claim: str) -> Any:
    if claim in claims:
        return claims[claim]
    value: Any = claims
    for name in claim.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def apply(*, person: Person, groups: set[str], request: HttpRequest | None = None) -> None:
    """Give and take the roles that the table names."""
    for slug, table in settings.SSO_ROLES.items():
        with transaction.atomic():
            project = Project.objects.select_for_update(no_key=True).filter(slug=slug).first()
            if project is None:
                log.warning("ANDON_OIDC_ROLES names project %r, which is not here", slug)
                continue
            _apply(project, person, groups, table, request)


def _apply(
    project: Project,
    person: Person,
    groups: set[str],
    table: Mapping[str, list[str]],
    request: HttpRequest | None,
) -> None:
    """Do so in one project, whose row is locked."""
    member = Membership.objects.select_for_update(no_key=True).filter(project=project, person=person).first()
    before = set(member.roles) if member is not None else set()
    after = (before - set(table)) | {role for role, names in table.items() if not groups.isdisjoint(names)}
    kept = Role.ADMIN in before - after and not _may_lose_admin(project, person)
    if kept:
        after.add(Role.ADMIN.value)
    if after == before and not kept:
        return
    if after:
        Membership.objects.update_or_create(project=project, person=person, defaults={"roles": sorted(after)})
    elif member is not None:
        member.delete()
    named = sorted(groups & {name for names in table.values() for name in names})
    more: dict[str, Any] = {"kept": "admin, as the last one"} if kept else {}
    audit.note(
        AccountEvent.Kind.ROLES,
        request=request,
        about=person,
        project=project,
        before=sorted(before),
        after=sorted(after),
        groups=named[:_SHOWN],
        **more,
    )


def _may_lose_admin(project: Project, person: Person) -> bool:
    try:
        members.keep_an_admin(project, person)
    except Refused:
        return False
    return True
