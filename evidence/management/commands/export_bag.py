"""`manage.py export_bag INCIDENT|--dossier ID PATH [--as USERNAME]`."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from andon.bag_zip import ZipLimit
from evidence import custody
from evidence.models import Dossier
from evidence.proof.exporting import INLINE_BYTES, export_bag
from evidence.vault import VaultError
from runs.keys import server_key
from runs.models import Person


class Command(BaseCommand):
    """Write a dossier's evidence as a bag that `andon verify` checks."""

    help = "Write the evidence of an incident (or of a dossier) as a bag: a directory, or .zip by suffix."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments."""
        parser.add_argument(
            "target", nargs="+", metavar="[INCIDENT] PATH", help="incident id and path, or path"
        )
        parser.add_argument(
            "--dossier", type=int, metavar="ID", help="a dossier by its id, instead of an incident"
        )
        parser.add_argument(
            "--inline-bytes",
            type=int,
            default=INLINE_BYTES,
            help="objects up to this size are in the bag, larger ones in fetch.txt (default %(default)s)",
        )

        parser.add_argument(
            "--as", dest="who", metavar="USERNAME", help="whose export it is, for the chain of custody"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        target: list[str] = options["target"]
        if len(target) != (1 if options["dossier"] is not None else 2):
            raise CommandError("give INCIDENT PATH, or --dossier ID PATH")
        dossier = _dossier(options["dossier"], target[0])
        path = Path(target[-1])
        try:
            export_bag(dossier, path, who=_who(options["who"]), inline_bytes=options["inline_bytes"])
        except (OSError, ValueError, VaultError, ZipLimit) as error:
            raise CommandError(f"not exported: {error}") from error
        self.stdout.write(f"{path}\nandon verify {path} --key {server_key().key_id}")


def _who(username: str | None) -> str:
    if username is None:
        return custody.ANDON
    person = Person.objects.filter(username=username).first()
    if person is None:
        raise CommandError(f"there is no person {username!r}")
    return str(person.opaque_id)


def _dossier(dossier_id: int | None, incident: str) -> Dossier:
    rows = Dossier.objects.select_related("run")
    if dossier_id is not None:
        found = rows.filter(pk=dossier_id).first()
    elif not incident.isdigit():
        raise CommandError(f"{incident!r} is no incident id")
    else:
        # To this app an incident is only where the dossier is shown.
        found = rows.filter(url__endswith=f"/incidents/{incident}").first()
    if found is None:
        raise CommandError("there is no such incident or dossier")
    return found
