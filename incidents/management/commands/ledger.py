"""`manage.py ledger RUN`: check a run's chain, or write the whole ledger to a file."""

from argparse import ArgumentParser
from pathlib import Path

from django.core.management.base import BaseCommand, CommandError

from andon.ledger_files import FORMATS, write
from incidents import ledger
from incidents.models import LedgerRow
from runs.models import Run


class Command(BaseCommand):
    """Print whether the chain holds and its newest digest; with `--out`, write the rows."""

    help = "Check the ledger of a run, and write it to FILE (.csv, .json or .parquet)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the run and where to write."""
        parser.add_argument("run", help="name of the run")
        parser.add_argument("--out", metavar="FILE", help="its ending names the format")

    def handle(self, *args: object, **options: object) -> None:
        """Check, then write."""
        run = Run.objects.filter(slug=str(options["run"])).first()
        if run is None:
            raise CommandError(f"There is no run {options['run']!r}.")
        wrong = ledger.verify(run)
        if wrong:
            raise CommandError("Chain broken, nothing was written: " + "; ".join(wrong))
        newest = LedgerRow.objects.filter(run=run).order_by("-seq").first()
        if options["out"]:
            path = Path(str(options["out"]))
            form = path.suffix.lower().removeprefix(".")
            if form not in FORMATS:
                raise CommandError(f"{path}: its ending must be one of .{', .'.join(FORMATS)}")
            with path.open("wb") as file:
                file.writelines(write(ledger.documents(run, until=newest.seq if newest else 0), form))
        if newest is None:
            self.stdout.write("no row yet")
        else:
            self.stdout.write(f"verified: {newest.seq} rows, newest {newest.digest}")
