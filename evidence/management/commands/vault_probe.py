"""`manage.py vault_probe`: what the store truly enforces, as JSON."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from evidence.stores.probe import probe_and_record
from evidence.vault import VaultError


class Command(BaseCommand):
    """Probe the vault, keep the result, and print it."""

    help = "Try what the vault's store enforces (locks, checksums, versions) and print it as JSON."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command."""
        try:
            row = probe_and_record()
        except (VaultError, ValueError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(json.dumps(row.result, indent=2, default=str))
