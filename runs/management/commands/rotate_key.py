"""`manage.py rotate_key [--to FILE | --from FILE] [--stolen]`."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from runs.keys import rotate
from runs.signing_anew import sign_directives_anew


class Command(BaseCommand):
    """Hand over from the server's signing key to a new one."""

    help = "Sign with a new key from now on; what the old one signed still verifies."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments."""
        where = parser.add_mutually_exclusive_group()
        where.add_argument(
            "--to",
            type=Path,
            metavar="FILE",
            help="put the new key there (or take it from there) and leave the key file to be replaced by "
            "hand, as where it is a mounted secret",
        )
        where.add_argument(
            "--from",
            type=Path,
            dest="old",
            metavar="FILE",
            help="the key file was replaced already: hand over from the old key in FILE",
        )

        parser.add_argument(
            "--stolen",
            action="store_true",
            help="the old key is in other hands: nobody follows it, what it sealed until now stays, and "
            "directives in force are signed anew",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        own = Path(settings.SIGNING_KEY_FILE)
        if options["stolen"] and options["to"]:
            raise CommandError("a stolen key must not sign on: swap the file first, then --from OLD --stolen")
        old, new = options["old"] or own, options["to"] or own
        try:
            made = rotate(old, new, is_stolen=options["stolen"])
        except (OSError, ValueError) as error:
            raise CommandError(f"not rotated: {error}") from error
        self.stdout.write(f"signs from now on: {made.key_id}")
        if options["stolen"]:
            self.stdout.write(
                f"{sign_directives_anew()} directives were signed anew; pin this key at every job"
            )
        if options["to"]:
            self.stdout.write(f"put {new} in the place of {own} now: until then the old key still signs")
