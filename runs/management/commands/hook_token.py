"""`manage.py hook_token NAME --source alertmanager`: a project's token for `/api/v1/hooks/`."""

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from andon.readers.hooks import SOURCES
from runs.accounts import audit
from runs.hooks import create_token, revoke
from runs.models import AccountEvent, HookToken, Project


class Command(BaseCommand):
    """Make, list or revoke hook tokens; a token is printed this once."""

    help = "Print a new hook token of a project; or list them, or revoke one by its id."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take what to do."""
        parser.add_argument("name", nargs="?", default="", help="what the token is for")
        parser.add_argument("--source", choices=sorted(SOURCES), default="generic", help="what it may post")
        parser.add_argument("--project", default="default", help="slug of the project")
        parser.add_argument("--days", type=int, default=0, help="valid for so many days; 0 = until revoked")
        parser.add_argument("--list", action="store_true", help="list the project's tokens")
        parser.add_argument("--revoke", type=int, default=0, metavar="ID", help="revoke a token")

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it."""
        project = Project.objects.filter(slug=str(options["project"])).first()
        if project is None:
            raise CommandError(f"there is no project {options['project']!r}")
        rows = HookToken.objects.filter(project=project).order_by("id")
        if options["list"]:
            for row in rows:
                used = (
                    f"last used {row.last_used_at:%Y-%m-%d %H:%M} UTC" if row.last_used_at else "never used"
                )
                state = "revoked" if row.revoked_at else used
                self.stdout.write(f"{row.pk} {row.source} {row.name}: {state}")
            return
        if options["revoke"]:
            found = rows.filter(pk=options["revoke"]).first()
            if found is None or not revoke(found):
                raise CommandError(f"{options['project']}: there is no live token {options['revoke']}")
            audit.note(AccountEvent.Kind.HOOK_REVOKED, project=project, name=found.name)
            return
        if not options["name"]:
            raise CommandError("give the token a name: what it is for")
        days = int(str(options["days"]))
        _, token = create_token(
            project=project,
            source=str(options["source"]),
            name=str(options["name"]),
            expires_in=timedelta(days=days) if days > 0 else None,
        )
        audit.note(
            AccountEvent.Kind.HOOK_MADE,
            project=project,
            name=str(options["name"]),
            source=str(options["source"]),
        )
        self.stdout.write(token)
