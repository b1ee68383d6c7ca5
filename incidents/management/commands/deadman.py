"""`manage.py deadman`: one look whether the sweep runs, for cron or a timer; needs no worker."""

import sys
from datetime import timedelta

from django.conf import settings
from django.core.management.base import BaseCommand
from django.utils import timezone

from incidents.paging import deadman


class Command(BaseCommand):
    """Page, and exit with 1, when Andon's own sweep is missed; exit with 2 when the database is silent."""

    help = "Look once whether Andon's sweep runs; page when it was missed."
    requires_system_checks = ()

    def handle(self, *args: object, **options: object) -> None:
        """Look once."""
        # Whoever asks only once cannot know since when: a server that never swept counts as missed.
        began = timezone.now() - timedelta(seconds=2 * settings.SWEEP_MISSED_S)
        wrong = deadman.look_and_tell(began)
        self.stdout.write(wrong or "the sweep runs")
        if wrong:
            sys.exit(2 if wrong.startswith(deadman.SILENT) else 1)
