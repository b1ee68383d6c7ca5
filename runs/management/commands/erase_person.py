"""`manage.py erase_person USERNAME`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from runs.accounts.refused import Refused
from runs.erasing import erase
from runs.models import Person


class Command(BaseCommand):
    """Erase a person's name, address and rights; it cannot be taken back."""

    help = "Erase who a person is. What they did stays, under an id that says nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments."""
        parser.add_argument("username")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        person = Person.objects.filter(username=options["username"]).first()
        if person is None:
            raise CommandError(f"there is no {options['username']!r}")
        try:
            erased = erase(person)
        except Refused as refused:
            raise CommandError(refused.says) from refused
        self.stdout.write(f"erased; what they did is named by {erased.opaque_id}")
