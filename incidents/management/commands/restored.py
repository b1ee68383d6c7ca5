"""`manage.py restored`: after a restore from a backup, nothing approved before it counts, and the vault is
compared with the rows."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from evidence.proof.restored import reconcile
from evidence.vault import VaultError
from incidents import unfinished


class Command(BaseCommand):
    """Safe to run twice."""

    help = (
        "After a restore: void unfinished requests, approvals and permits (held runs stay held), and compare "
        "the vault with the rows."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        """Do both, and print in numbers what was found, as JSON."""
        voided = unfinished.void_all()
        try:
            found = reconcile().result
        except VaultError as error:
            # What was voided stays so; the comparison has to be run again.
            raise CommandError(
                f"{voided} voided; the vault was not compared: {error.says}. Run it again once it answers."
            ) from error
        self.stdout.write(json.dumps({"voided": voided, "vault": found}))
