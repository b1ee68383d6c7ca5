"""`manage.py create_person NAME --role responder`: a person who can sign in."""

import json
import secrets
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from runs.accounts import audit, mail, members
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Membership, Person, Project, Role


class Command(BaseCommand):
    """Create a person, or give one more roles; print `{"person", "password"}` once."""

    help = "Create a person with roles in a project and print a generated password as JSON."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="sign-in name")
        parser.add_argument(
            "--role", action="append", default=[], choices=Role.values, help="may be repeated"
        )
        parser.add_argument("--project", default="default")
        parser.add_argument(
            "--new-password", action="store_true", help="replace the password of a known person"
        )

        parser.add_argument(
            "--mail", help="address to which a lost password's link goes; you know it is theirs"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        with transaction.atomic():
            project = Project.objects.get(slug=options["project"])
            person, created = Person.objects.get_or_create(username=options["name"])
            password = secrets.token_urlsafe(12) if created or options["new_password"] else None
            if password:
                person.set_password(password)
                person.save(update_fields=["password"])
                if not created:
                    audit.note(AccountEvent.Kind.RESET, about=person, factors=False)
            if options["mail"]:
                try:
                    mail.give(person, options["mail"])
                except Refused as refused:
                    raise CommandError(refused.says) from refused
                audit.note(AccountEvent.Kind.MAIL_SET, about=person)
            membership, _ = Membership.objects.get_or_create(project=project, person=person)
            before = list(membership.roles)
            membership.roles = sorted({*before, *options["role"]})
            membership.save(update_fields=["roles"])
            if membership.roles != sorted(before):
                members.note(project, None, person, before, membership.roles, None)
        self.stdout.write(
            json.dumps({"person": person.username, "password": password, "roles": membership.roles})
        )
