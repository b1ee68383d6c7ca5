"""`manage.py standing_approval list|create|sign|revoke`: what may go on by itself, from a shell."""

import getpass
import json
import sys
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from incidents.refused import Refused
from incidents.standing_approvals import actions, granting
from incidents.standing_approvals.models import StandingApproval
from runs.models import Person, Project, Run


class Command(BaseCommand):
    """The same functions as the pages and the API."""

    help = "List, create, sign or revoke standing approvals."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take what to do."""
        commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
        commands.add_parser("list", help="all, newest first")
        one = commands.add_parser("create", help="write one down; another person signs it")
        one.add_argument("--as", dest="person", required=True, metavar="NAME")
        one.add_argument("--project", default="default")
        one.add_argument("--run", default="")
        one.add_argument("--kind", action="append", required=True, help=", ".join(granting.kinds()))
        one.add_argument("--per-day", type=int, default=0)
        one.add_argument("--furthest-steps", type=int, default=0)
        one.add_argument("--widest-skip", type=int, default=0, help="samples")
        one.add_argument("--days", type=float, default=7.0)
        one.add_argument("--why", required=True)
        one = commands.add_parser("sign", help="sign one, exactly as it was read")
        one.add_argument("standing", type=int)
        one.add_argument("--as", dest="person", required=True, metavar="NAME")
        one.add_argument("--digest", required=True)
        one.add_argument("--password-stdin", action="store_true")
        one = commands.add_parser("revoke", help="end one at once")
        one.add_argument("standing", type=int)
        one.add_argument("--as", dest="person", required=True, metavar="NAME")
        one.add_argument("--why", required=True)

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it, and print what there is as JSON lines."""
        try:
            found = self._do(options)
        except Refused as refused:
            raise CommandError(f"{refused.code}: {refused.says}") from refused
        for row in found:
            self.stdout.write(json.dumps(actions.document(row), ensure_ascii=False))

    def _do(self, given: dict[str, Any]) -> list[StandingApproval]:
        if given["what"] == "list":
            return list(StandingApproval.objects.select_related("project", "run", "signed_by", "made_by"))
        person = Person.objects.filter(username=given["person"], is_active=True).first()
        if person is None:
            raise CommandError(f"there is no active person {given['person']!r}")
        if given["what"] == "create":
            return [self._create(person, given)]
        row = StandingApproval.objects.filter(pk=given["standing"]).first()
        if row is None:
            raise CommandError(f"there is no standing approval {given['standing']}")
        if given["what"] == "revoke":
            return [actions.revoke(standing=row, person=person, why=given["why"])]
        typed = (
            sys.stdin.readline().rstrip("\n")
            if given["password_stdin"]
            else getpass.getpass(f"{person.username}: ")
        )
        if not person.check_password(typed):
            raise CommandError("the password does not fit: nothing was changed")
        return [actions.sign(standing=row, person=person, digest=given["digest"])]

    def _create(self, person: Person, given: dict[str, Any]) -> StandingApproval:
        project = Project.objects.filter(slug=given["project"]).first()
        if project is None:
            raise CommandError(f"there is no project {given['project']!r}")
        run = Run.objects.filter(slug=given["run"], project=project).first() if given["run"] else None
        if given["run"] and run is None:
            raise CommandError(f"project {project.slug} has no run {given['run']!r}")
        return actions.create(
            project=project,
            person=person,
            run=run,
            kinds=given["kind"],
            per_day=given["per_day"],
            furthest_steps=given["furthest_steps"],
            widest_skip=given["widest_skip"],
            expires_at=timezone.now() + timedelta(days=given["days"]),
            why=given["why"],
        )
