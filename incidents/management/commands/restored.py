"""`manage.py restored`: after a restore from a backup, void everything that was on its way to a resume."""

import json
from typing import Any

from django.core.management.base import BaseCommand

from incidents import unfinished


class Command(BaseCommand):
    """Safe to run twice."""

    help = "After a restore: void unfinished requests, approvals and permits; held runs stay held."

    def handle(self, *args: Any, **options: Any) -> None:
        """Void them, and print how many as JSON."""
        self.stdout.write(json.dumps({"voided": unfinished.void_all()}))
