"""Rows of one ledger or of all that a person may see, filtered and by the page."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlencode

from django.db.models import Q
from django.http import QueryDict

from incidents import rows
from incidents.models import LedgerRow
from incidents.page import LedgerLine
from runs.access import visible_runs
from runs.models import Person, Run

PAGE_ROWS = 100
_TEXT = 64


@dataclass(frozen=True, slots=True)
class Filter:
    """What a person wants to see of a ledger; "" is everything."""

    action: str = ""
    rule: str = ""  # begins the name of who or what decided: "nonfinite", "nonfinite v1"
    attempt: str = ""
    incident: str = ""
    run: str = ""

    @classmethod
    def of(cls, query: QueryDict) -> "Filter":
        """Read the filter of an address; what cannot be meant is left out."""
        text = {name: query.get(name, "").strip()[:_TEXT].replace("\0", "") for name in cls.__slots__}
        for name in ("attempt", "incident"):
            text[name] = text[name] if text[name].isdecimal() and len(text[name]) < 10 else ""
        return cls(**text)

    def where(self) -> Q:
        """Return it as a condition on rows."""
        found = Q()
        if self.action:
            found &= Q(action=self.action)
        if self.rule:
            found &= Q(decided_by__istartswith=self.rule)
        if self.attempt:
            found &= Q(attempt=int(self.attempt))
        if self.incident:
            found &= Q(incident_id=int(self.incident))
        if self.run:
            found &= Q(run__slug__icontains=self.run)
        return found

    def query(self) -> str:
        """Return it as the query of an address, "" when it lets everything through."""
        return urlencode({name: value for name in self.__slots__ if (value := getattr(self, name))})


@dataclass(frozen=True, slots=True)
class Page:
    """One page of rows, newest first, and where the older ones begin."""

    lines: list[LedgerLine]
    older: str  # "" = none
    rows: list[LedgerRow] = field(default_factory=list)  # of the lines, where they are of one run


def of_run(run: Run, wanted: Filter, before: str) -> Page:
    """Return a page of one run's ledger, before the row of this number."""
    found = LedgerRow.objects.filter(wanted.where(), run=run)
    if before.isdecimal() and len(before) < 10:
        found = found.filter(seq__lt=int(before))
    listed = list(found.order_by("-seq")[: PAGE_ROWS + 1])
    shown = rows.ledger_lines(listed[:PAGE_ROWS], run.slug)
    return Page(shown, str(shown[-1].seq) if len(listed) > PAGE_ROWS else "", listed[:PAGE_ROWS])


def of_person(person: Person, wanted: Filter, before: str) -> Page:
    """Return a page of all ledgers that a person may see, before a time and row as `older` gave them."""
    found = LedgerRow.objects.filter(wanted.where(), run__in=visible_runs(person)).select_related("run")
    cursor = _cursor(before)
    if cursor is not None:
        at, pk = cursor
        found = found.filter(Q(at__lt=at) | Q(at=at, pk__lt=pk))
    listed = list(found.order_by("-at", "-pk")[: PAGE_ROWS + 1])
    shown = listed[:PAGE_ROWS]
    last = shown[-1] if len(listed) > PAGE_ROWS else None
    older = f"{last.at.astimezone(UTC).isoformat()}~{last.pk}" if last is not None else ""
    return Page(rows.ledger_lines(shown), older)


def actions(run: Run | None, person: Person) -> list[str]:
    """Return the actions there are to filter by."""
    found = (
        LedgerRow.objects.filter(run=run) if run else LedgerRow.objects.filter(run__in=visible_runs(person))
    )
    return sorted(found.order_by().values_list("action", flat=True).distinct())


def _cursor(text: str) -> tuple[datetime, int] | None:
    moment, tilde, number = text.partition("~")
    if not tilde or not number.isdecimal() or len(number) > 18:
        return None
    try:
        at = datetime.fromisoformat(moment.replace(" ", "+"))
    except ValueError:
        return None
    return (at, int(number)) if at.tzinfo is not None else None
