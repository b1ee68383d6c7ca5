"""Erasing a person: names and addresses go, what they did stays under an id that says nothing.

Custody, ledger, approvals and bags name people by `opaque_id`, so every chain still verifies afterwards.
"""

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.db import transaction

from runs.accounts import audit, members, sessions
from runs.models import AccountEvent, Invitation, Membership, Person, Project, Role, Token


def erase(person: Person) -> Person:
    """Take everything that says who a person is out of the database, and every right they had.

    What people typed as reasons is evidence and stays as it is.

    Raises:
        Refused: last-admin.
    """
    with transaction.atomic():
        ruled = Membership.objects.filter(person=person, roles__contains=[Role.ADMIN]).values("project")
        for project in Project.objects.select_for_update(no_key=True).filter(pk__in=ruled).order_by("pk"):
            members.keep_an_admin(project, person)
        fresh = Person.objects.select_for_update(no_key=True).get(pk=person.pk)
        Token.objects.filter(person=fresh).delete()
        Membership.objects.filter(person=fresh).delete()
        Invitation.objects.filter(person=fresh).delete()
        for names_them in (Authenticator, SocialAccount, EmailAddress):
            names_them.objects.filter(user=fresh).delete()
        fresh.username = f"erased-{fresh.opaque_id.hex[:12]}"
        fresh.first_name = fresh.last_name = fresh.email = ""
        fresh.is_active = fresh.is_staff = fresh.is_superuser = False
        fresh.last_login = None
        fresh.set_unusable_password()
        sessions.end(fresh)
        fresh.save()
        audit.note(AccountEvent.Kind.ERASED, about=fresh)
    return fresh
