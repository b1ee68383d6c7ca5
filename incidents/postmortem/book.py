"""The rows a postmortem cites: each gets its id when a sentence needs it, and its place in the appendix.

A sentence can only be made from rows, so no fact is told that cannot be looked up; the appendix then
holds exactly the rows that were cited.
"""

import re
from collections.abc import Iterable

from django.db.models import Model

from andon.postmortem.document import Cited, Row, Sentence, by_number
from evidence.models import Item, Seal
from incidents.models import (
    Approval,
    BoardChange,
    Incident,
    LedgerRow,
    Permit,
    Plan,
    Probe,
    ResumeRequest,
    TimelineEntry,
)
from incidents.postmortem import appendix
from runs.models import Attempt, Checkpoint, DirectiveAck, Event, Finding
from runs.queries import BadGroup

Source = Model | BadGroup | str  # a row, or the id of one ("V-12"), as the diagnosis board gives it

# Letter and number of a row: sequences of their own (ledger, plans, probes, attempts) by that number.
_LETTERS: dict[type[Model], tuple[str, str]] = {
    Finding: ("F", "pk"),
    TimelineEntry: ("T", "pk"),
    Item: ("E", "pk"),
    Seal: ("S", "number"),
    LedgerRow: ("L", "seq"),
    Approval: ("A", "pk"),
    ResumeRequest: ("Q", "pk"),
    Plan: ("R", "number"),
    Permit: ("M", "pk"),
    Incident: ("I", "pk"),
    Attempt: ("N", "number"),
    Checkpoint: ("C", "pk"),
    DirectiveAck: ("K", "pk"),
    Probe: ("H", "number"),
    BoardChange: ("D", "pk"),
}
_BY_ID = re.compile(r"([FVPNCIH])-(\d{1,18})")


class Book:
    """What one postmortem cites."""

    def __init__(self, incident: Incident) -> None:
        """Begin with nothing cited."""
        self.incident = incident
        self._rows: dict[str, Model | BadGroup] = {}
        self._wanted: set[str] = set()
        self._groups: list[BadGroup] = []

    def cite(self, source: Source) -> str:
        """Return the id of a row and keep the row for the appendix.

        Raises:
            ValueError: it is no row that can be cited.
        """
        if isinstance(source, str):
            if not _BY_ID.fullmatch(source):
                raise ValueError(f"{source!r} is no id of a row")
            self._wanted.add(source)
            return source
        if isinstance(source, BadGroup):
            if source not in self._groups:
                self._groups.append(source)
            name = f"B-{self._groups.index(source) + 1}"
        else:
            name = self._name(source)
        self._rows[name] = source
        return name

    def say(self, text: str, *sources: Source) -> Sentence:
        """Return a sentence of fact."""
        return Sentence(text, self.ids(sources))

    def row(self, cells: Iterable[str], *sources: Source) -> Row:
        """Return a line of a table of facts."""
        return Row(tuple(cells), self.ids(sources))

    def ids(self, sources: Iterable[Source]) -> tuple[str, ...]:
        """Return the ids of rows, each once, in the order given."""
        return tuple(dict.fromkeys(self.cite(source) for source in sources))

    def appendix(self) -> tuple[Cited, ...]:
        """Return every cited row in full, in the order of the ids."""
        rows = self._rows | self._read()
        return tuple(appendix.cited(name, rows[name]) for name in sorted(rows, key=by_number))

    def _name(self, row: Model) -> str:
        if isinstance(row, Event):
            return f"{'P' if row.type == 'preflight.report' else 'V'}-{row.pk}"
        letter, number = _LETTERS[type(row)]
        return f"{letter}-{getattr(row, number)}"

    def _read(self) -> dict[str, Model]:
        """Read the rows that are known by their id alone."""
        wanted: dict[str, list[int]] = {}
        for name in sorted(self._wanted - self._rows.keys()):
            letter, number = name.split("-")
            wanted.setdefault(letter, []).append(int(number))
        run, incident = self.incident.run_id, self.incident
        found: list[Model] = []
        events = [*wanted.get("V", []), *wanted.get("P", [])]
        if events:
            found += Event.objects.filter(run_id=run, attempt=incident.attempt, pk__in=events)
        if "F" in wanted:
            found += Finding.objects.filter(run_id=run, pk__in=wanted["F"])
        if "N" in wanted:
            found += Attempt.objects.filter(run_id=run, number__in=wanted["N"]).defer("groups")
        if "C" in wanted:
            found += Checkpoint.objects.filter(run_id=run, pk__in=wanted["C"]).defer("files")
        if "H" in wanted:
            found += incident.probes.filter(number__in=wanted["H"])
        if "I" in wanted:
            project = incident.run.project_id
            found += Incident.objects.filter(run__project=project, pk__in=wanted["I"]).select_related("run")
        return {self._name(row): row for row in found}
