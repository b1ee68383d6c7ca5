"""`manage.py set_policy RUN FILE`: a new policy version for one run."""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from andon import policy
from runs.models import Run
from runs.policies import policy_for, set_policy


class Command(BaseCommand):
    """Lay the fields of a JSON document over the run's policy in force."""

    help = "Change fields of a run's policy: FILE (or - for standard input) holds only what changes."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run")
        parser.add_argument("file")
        parser.add_argument("--why", default="set by command")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            run = Run.objects.get(slug=options["run"])
        except Run.DoesNotExist:
            raise CommandError(f"no run {options['run']!r}: create it with `manage.py create_run`") from None
        try:
            text = sys.stdin.read() if options["file"] == "-" else Path(options["file"]).read_text("utf-8")
            changes = json.loads(text)
            merged = policy.decode(policy.merge(policy_for(run.pk).document(), changes))
        except (OSError, ValueError) as error:
            raise CommandError(f"{options['file']}: {error}") from error
        version = set_policy(run=run, document=merged.document(), person=None, why=options["why"])
        self.stdout.write(json.dumps({"run": run.slug, "policy": version.number, "digest": version.digest}))
