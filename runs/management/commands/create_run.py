"""`manage.py create_run NAME`: a run and its webhook secret, as JSON."""

import json
from argparse import ArgumentParser

from django.core.management.base import BaseCommand, CommandError

from runs.accounts import audit
from runs.actions import create_run
from runs.models import AccountEvent


class Command(BaseCommand):
    """Print `{"run", "secret"}`; running it again prints the same."""

    help = "Create a run, or find it, and print its name and webhook secret as JSON."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the name and whether to rotate."""
        parser.add_argument("name", help="letters, digits, '-' and '_'; unique on this server")
        parser.add_argument("--project", default="default", help="slug of its project (default: default)")
        parser.add_argument("--rotate", action="store_true", help="add a secret; older ones expire in a day")

    def handle(self, *args: object, **options: object) -> None:
        """Create and print."""
        try:
            made = create_run(
                name=str(options["name"]), project=str(options["project"]), rotate=bool(options["rotate"])
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
        if options["rotate"]:
            audit.note(AccountEvent.Kind.SECRET_ROTATED, project=made.run.project, run=made.run.slug)
        self.stdout.write(json.dumps({"run": made.run.slug, "secret": made.secret}))
