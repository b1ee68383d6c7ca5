"""`manage.py invite NAME`: a link by which somebody sets how they sign in."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from runs.accounts import invitations
from runs.actions import create_person
from runs.models import Person, Role


class Command(BaseCommand):
    """Print a link that works once: for somebody new, or for who lost their password or passkey."""

    help = "Print a link by which a person sets a password, once. Send it to nobody else."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take whom, as what, and whether to take away what they had."""
        parser.add_argument("name", help="sign-in name")
        parser.add_argument(
            "--role", action="append", default=[], choices=Role.values, help="for somebody new; repeatable"
        )
        parser.add_argument("--project", default="default", help="slug of the project of the roles")
        parser.add_argument(
            "--reset", action="store_true", help="take away password, passkeys and codes at once"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Make it and print it."""
        name, roles = str(options["name"]), list(options["role"])
        person = Person.objects.filter(username=name, is_active=True).first()
        if person is not None and roles:
            raise CommandError(f"{name} is a person already: create_person gives roles")
        if person is None:
            try:
                person = create_person(username=name, roles=roles, project=str(options["project"]))
            except ValueError as error:
                raise CommandError(str(error)) from error
        _, address = invitations.reset(person=person, factors=bool(options["reset"]))
        self.stdout.write(address)
