"""Attempts as posts make them known: launched, opened implicitly, exited."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db.models import IntegerField
from django.db.models.expressions import RawSQL

from andon.wire import Event
from runs import stays
from runs.models import Attempt, Run
from runs.reading import kept
from runs.signals import attempt_launched
from runs.telling import tell

# A launch may have told anything for its nodes.
NAMED = "CASE WHEN jsonb_typeof(nodes) = 'array' THEN jsonb_array_length(nodes) END"
NAMED_NODES = RawSQL(NAMED, (), output_field=IntegerField(null=True))  # noqa: S611 (a constant)


def attempt_of(run: Run, number: int) -> Attempt | None:
    """Return one attempt of `run`, None when nothing opened it; read once per `Run` object.

    What opens an incident asks for it in half a dozen places, each a round trip a trainer waits for.
    """
    known: dict[int, Attempt | None] = run.__dict__.setdefault("_attempts_read", {})
    if number not in known:
        # A fleet's groups and what else its launch told are a megabyte.
        known[number] = Attempt.objects.filter(run=run, number=number).defer("groups", "data").first()
    return known[number]


def launches(run_id: int) -> list[Attempt]:
    """Return the attempts of a run, newest first, each with `named`: how many nodes its launch named.

    Without nodes, groups and what else launches told: of a fleet those are hundreds of kilobytes each. Read
    once for a page, of which every part asks for one or another.
    """
    rows = Attempt.objects.filter(run_id=run_id).defer("nodes", "groups", "data").order_by("-number")
    return kept(("launches", run_id), lambda: list(rows.annotate(named=NAMED_NODES)))


def named_nodes(launched: Attempt | None) -> int:
    """Return how many nodes one of `launches` named."""
    return getattr(launched, "named", None) or 0


def launch(run_id: int, number: int) -> Attempt | None:
    """Return one of `launches`, None when nothing opened it."""
    return next((one for one in launches(run_id) if one.number == number), None)


class Attempts:
    """The attempts of one run inside one ingest transaction."""

    def __init__(self, run_id: int, received_at: datetime) -> None:
        self.run_id = run_id
        self.received_at = received_at
        newest = Attempt.objects.filter(run_id=run_id).order_by("-number").first()
        self._newest = newest
        self.offered: set[tuple[int, str]] = set()  # attempt and kind of files that were told of

    @property
    def current(self) -> int:
        """The newest attempt's number; 1 before any launch."""
        return 1 if self._newest is None else self._newest.number

    def number_for(self, given: int | None) -> int:
        """Return the attempt a post belongs to, opening it implicitly where nobody launched it."""
        if self._newest is None:
            self._open(given or 1, self.received_at)
        elif given is not None and given > self._newest.number:
            self._open(given, self.received_at)
        return self.current if given is None else given

    def launch(self, event: Event, occurred_at: datetime) -> int:
        """Take in an `attempt.launched` event; returns the attempt's number.

        Without a number it is the attempt that posts opened before the launch was reported, or one
        that has not begun a step (each node may report the launch), else the next one.
        """
        newest = self._newest
        if event.attempt is not None:
            number = event.attempt
        elif newest is None:
            number = 1
        else:
            begun = newest.launch_reported and (newest.first_step is not None or newest.exited_at is not None)
            number = newest.number + 1 if begun else newest.number
        fields = _launch_fields(event.data)
        known = Attempt.objects.filter(run_id=self.run_id, number=number).first()
        if known is None:
            attempt, _ = self._insert(number, occurred_at, launch_reported=True, fields=fields)
        else:
            attempt = known
        if attempt.launch_reported and known is not None:
            fields = {name: value for name, value in fields.items() if value and not getattr(attempt, name)}
        first_report = known is None or not known.launch_reported
        for name, value in fields.items():
            setattr(attempt, name, value)
        attempt.launch_reported = True
        attempt.save()
        if fields.get("nodes"):
            stays.keep(attempt)
        if newest is None or number > newest.number:
            self._newest = attempt
        if first_report or fields.get("permit_id"):
            tell(attempt_launched, run_id=self.run_id, attempt=attempt, permit_id=attempt.permit_id)
        return number

    def exit(self, number: int, event: Event, occurred_at: datetime) -> None:
        """Take in an `attempt.exited` event."""
        Attempt.objects.filter(run_id=self.run_id, number=number).update(
            exited_at=occurred_at, exit=dict(event.data)
        )

    def _open(self, number: int, at: datetime) -> None:
        attempt, opened = self._insert(number, at, launch_reported=False, fields={})
        self._newest = attempt
        if opened:
            tell(attempt_launched, run_id=self.run_id, attempt=attempt, permit_id="")

    def _insert(
        self, number: int, at: datetime, *, launch_reported: bool, fields: Mapping[str, Any]
    ) -> tuple[Attempt, bool]:
        # Two posts may open it at once: the second waits for the first and finds its row.
        return Attempt.objects.get_or_create(
            run_id=self.run_id,
            number=number,
            defaults={"launched_at": at, "launch_reported": launch_reported, **fields},
        )


def _launch_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    def text(name: str, length: int) -> str:
        value = data.get(name)
        return value[:length] if isinstance(value, str) else ""

    began_from = data.get("began_from")
    if began_from is not None and not isinstance(began_from, dict):
        began_from = {"checkpoint": began_from}
    return {
        "world_size": _small(data.get("world_size")),
        "nodes": data.get("nodes") or [],
        "groups": data.get("groups") or {},
        "precision": text("precision", 32),
        "began_from": began_from or {},
        "config_sha256": text("config_sha256", 64),
        "environment_sha256": text("environment_sha256", 64),
        "permit_id": text("permit", 64),
        "data": dict(data),
    }


def _small(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None
