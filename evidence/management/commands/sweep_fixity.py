"""`manage.py sweep_fixity [--bytes N]`."""

import json
from dataclasses import asdict
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from evidence.proof.fixity import sweep
from evidence.vault import VaultError


class Command(BaseCommand):
    """Do now what the nightly sweep does, and print what came of it."""

    help = (
        "Read back locks and bytes of the vault, the longest unchecked first; exit 1 when anything is wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments."""
        parser.add_argument(
            "--bytes", type=int, metavar="N", help="read at most this many (default: ANDON_FIXITY_BYTES)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        budget = settings.FIXITY_BYTES if options["bytes"] is None else options["bytes"]
        try:
            done = sweep(timezone.now(), budget_bytes=budget)
        except VaultError as error:
            raise CommandError(f"the vault does not answer: {error.says}") from error
        self.stdout.write(json.dumps(asdict(done)))
        if done.lost or done.mismatches or done.unreadable:
            raise CommandError("evidence is damaged, gone or less protected than it was: see its dossier")
