"""`manage.py create_token USER`: a personal API token on standard output."""

from argparse import ArgumentParser
from datetime import timedelta

from django.core.management.base import BaseCommand, CommandError

from runs.accounts import audit
from runs.actions import create_person, create_token
from runs.models import AccountEvent, Person, Role, Scope


class Command(BaseCommand):
    """Print a new personal API token; it is shown this once."""

    help = "Print a new personal API token of a person."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the person, and whether and as what to create them."""
        parser.add_argument("user", help="the person's user name")
        parser.add_argument("--create", action="store_true", help="create them as a member of `default`")
        parser.add_argument(
            "--role", action="append", default=[], choices=Role.values, help="a role in `default`; repeatable"
        )
        parser.add_argument("--name", default="command line", help="what the token is for")
        parser.add_argument("--days", type=int, default=0, help="valid for so many days; 0 = until revoked")
        parser.add_argument(
            "--scope", action="append", default=[], choices=Scope.values, help="what it may do; default: all"
        )

    def handle(self, *args: object, **options: object) -> None:
        """Create and print."""
        username, roles = str(options["user"]), list(options["role"])  # type: ignore[call-overload]
        if roles and not options["create"]:
            raise CommandError(
                "--role needs --create: roles of an existing person are not changed in passing"
            )
        try:
            if options["create"]:
                person = create_person(username=username, roles=roles)
            else:
                found = Person.objects.filter(username=username).first()
                if found is None:
                    raise CommandError(f"there is no person {username!r}: add --create")
                person = found
            scopes = list(options["scope"]) or list(Scope.values)  # type: ignore[call-overload]
            days = int(str(options["days"]))
            token = create_token(
                person=person,
                name=str(options["name"]),
                expires_in=timedelta(days=days) if days > 0 else None,
                scopes=scopes,
            )
            audit.note(AccountEvent.Kind.TOKEN_MADE, about=person, name=str(options["name"]), scopes=scopes)
            self.stdout.write(token)
        except ValueError as error:
            raise CommandError(str(error)) from error
