"""`manage.py seen RUN`: which samples the weights of a run were trained on."""

import json
from argparse import ArgumentParser

from django.core.management.base import BaseCommand, CommandError

from incidents import seen
from runs.models import Run


class Command(BaseCommand):
    """Print what the weights saw: in words, or as JSON with every range."""

    help = "Say which samples a run trained on, repeated, skipped and rolled back, over all its attempts."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the run and, if another than the newest is meant, whose weights."""
        parser.add_argument("run", help="name of the run")
        parser.add_argument("--attempt", type=int, help="of this attempt (default: the newest)")
        parser.add_argument("--step", type=int, help="after this step (default: its last)")
        parser.add_argument("--json", action="store_true", help="every range, as JSON")

    def handle(self, *args: object, **options: object) -> None:
        """Read and print."""
        run = Run.objects.filter(slug=str(options["run"])).first()
        if run is None:
            raise CommandError(f"There is no run {options['run']!r}.")
        attempt, step = options["attempt"], options["step"]
        assert attempt is None or isinstance(attempt, int)
        assert step is None or isinstance(step, int)
        try:
            found = seen.of_run(run, attempt=attempt, step=step)
        except seen.NotKnown as error:
            raise CommandError(str(error)) from error
        if found is None:
            raise CommandError(f"No attempt of {run.slug} was reported yet.")
        if options["json"]:
            self.stdout.write(json.dumps(found.document(), sort_keys=True))
            return
        view = seen.view(found)
        self.stdout.write(f"attempt {found.attempt} after step {found.step:,}: {view.lineage}")
        for kind in view.kinds:
            more = f" and {kind.more} more" if kind.more else ""
            which = f": {', '.join(kind.ranges)}{more}" if kind.ranges else ""
            self.stdout.write(f"{kind.name}: {kind.samples:,}{which}")
        for line in found.unknown:
            self.stdout.write(f"not known: {line}")
