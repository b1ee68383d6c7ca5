"""`manage.py resume INCIDENT`: ask, approve, reject, withdraw, declare a false alarm, or break the glass.

The same functions as the buttons and the API. Without an action it prints what an approver signs.
"""

import getpass
import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from incidents import approval, permits
from incidents.models import Incident, ResumeRequest
from incidents.refused import Refused
from runs.access import visible_runs
from runs.models import Person

# What decides alone or last: the person proves again who they are.
PROVEN = frozenset({"approve", "false-alarm", "break-glass", "solo"})
ACTIONS = ("show", "request", "approve", "reject", "withdraw", "false-alarm", "break-glass", "solo")
_SIGNS = {"break-glass": ResumeRequest.Kind.BREAK_GLASS, "solo": ResumeRequest.Kind.SOLO}


class Command(BaseCommand):
    """Let a held run go on from a shell, by the same door as everywhere."""

    help = "Show what an approver signs, or request, approve, reject, withdraw, declare a false alarm, …"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the incident, what to do, as whom."""
        parser.add_argument("incident", type=int)
        parser.add_argument("action", nargs="?", default="show", choices=ACTIONS)
        parser.add_argument("--as", dest="person", required=True, metavar="NAME", help="user name")
        parser.add_argument("--digest", default="", help="of what you read: printed by `show`")
        parser.add_argument("--why", default="", help="reason or note")
        parser.add_argument("--run-name", default="", help="break-glass: the run's name, typed")
        parser.add_argument(
            "--password-stdin", action="store_true", help="read the password from standard input"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it, and print what became of it as JSON."""
        action: str = options["action"]
        person = Person.objects.filter(username=options["person"], is_active=True).first()
        if person is None:
            raise CommandError(f"there is no active person {options['person']!r}")
        incident = (
            Incident.objects.filter(pk=options["incident"], run__in=visible_runs(person))
            .select_related("run", "run__project", "dossier")
            .first()
        )
        if incident is None:
            raise CommandError(f"there is no incident {options['incident']} that {person.username} may see")
        if action in PROVEN:
            self._prove(person, read=options["password_stdin"])
        try:
            self._do(action, incident, person, options)
        except Refused as refused:
            raise CommandError(" ".join([f"{refused.code}: {refused.says}", *refused.changes])) from refused
        incident.refresh_from_db()
        self.stdout.write(json.dumps(self._document(incident, action), indent=2, ensure_ascii=False))

    def _prove(self, person: Person, *, read: bool) -> None:
        given = sys.stdin.readline().rstrip("\n") if read else getpass.getpass(f"{person.username}: ")
        if not person.check_password(given):
            raise CommandError("the password does not fit: nothing was changed")

    def _do(self, action: str, incident: Incident, person: Person, given: dict[str, Any]) -> None:
        common: dict[str, Any] = {"incident": incident, "person": person}
        why, digest = given["why"], given["digest"]
        match action:
            case "request":
                approval.request_resume(**common, digest=digest, note=why)
            case "approve":
                approval.approve(**common, digest=digest)
            case "reject":
                approval.reject(**common, why=why)
            case "withdraw":
                approval.withdraw(**common, why=why)
            case "false-alarm":
                approval.false_alarm(**common, why=why)
            case "break-glass":
                approval.break_glass(**common, why=why, run_name=given["run_name"], digest=digest)
            case "solo":
                approval.solo(**common, digest=digest, why=why)

    def _document(self, incident: Incident, action: str) -> dict[str, Any]:
        request = incident.requests.order_by("-id").first()
        signed, digest = approval.subject(incident, kind=_SIGNS.get(action, ResumeRequest.Kind.RESUME))
        permit = getattr(request, "permit", None) if request else None
        return {
            "incident": str(incident.pk),
            "run": incident.run.slug,
            "state": incident.state,
            "gate": permits.evidence_words(incident) or "open",
            "subject": signed,
            "digest": digest,
            "digests": {
                name: approval.subject(incident, kind=kind)[1]
                for name, kind in (("request and approve", ResumeRequest.Kind.RESUME), *_SIGNS.items())
            },
            "request": None
            if request is None
            else {
                "id": str(request.pk),
                "kind": request.kind,
                "state": request.state,
                "digest": request.digest,
                "ended_why": request.ended_why,
                "permit": str(permit.public_id) if permit else None,
            },
        }
