"""The diagnosis board of an incident: what is stored weighed by `andon.diagnose`, and what people did."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from andon.diagnose import board as science
from andon.diagnose.board import FAMILIES, Line, Offer, Tried
from andon.diagnose.families import Family
from andon.diagnose.probes import OWN, UNCLEAR, own, probe_of
from andon.diagnose.probes import Probe as Known
from andon.diagnose.record import Record
from incidents import board_record, firstbad
from incidents.models import BoardChange, Incident, Probe
from runs.models import Person

K = BoardChange.Kind


@dataclass(frozen=True, slots=True)
class ProbeView:
    """One probe that was started."""

    id: str  # "H-1"
    number: int
    family: str
    name: str
    condition: str
    command: list[str]
    state: str
    owner: str
    started_at: datetime
    ended_at: datetime | None
    result: str  # in words, "" while it runs
    note: str
    recorded_by: str
    choices: list[tuple[str, str]]  # how it may come out


@dataclass(frozen=True, slots=True)
class OfferView:
    """The next probe of a family; without a command where a name it needs is not known."""

    key: str
    name: str
    condition: str
    minutes: int
    command: list[str]


@dataclass(frozen=True, slots=True)
class FamilyView:
    """One family as a line of the board."""

    family: str
    standing: str
    why: str
    by: str
    supports: tuple[Line, ...]
    contradicts: tuple[Line, ...]
    offer: OfferView | None
    probes: list[ProbeView]
    owner: str
    mine: bool

    @property
    def carries(self) -> list[str]:
        """The ids that may carry a cause of this family: what speaks for it, and results of its probes."""
        done = [probe.id for probe in self.probes if probe.result]
        return [*dict.fromkeys(line.id for line in self.supports), *done]


@dataclass(frozen=True, slots=True)
class Cause:
    """What the cause was closed as."""

    certainty: str  # known | probable | unknown
    family: str
    ids: list[str]
    text: str
    by: str
    at: datetime


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """One line of the board's history."""

    at: datetime
    by: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class BoardView:
    """The board as a page shows it."""

    rows: list[FamilyView]
    running: ProbeView | None
    cause: Cause | None
    history: list[ChangeLine]
    opened_as: str  # the family named when the incident opened, where another leads now
    diagnosis_why: str = ""
    probes: list[ProbeView] = field(default_factory=list)

    @property
    def leading(self) -> FamilyView | None:
        """The family that leads."""
        return next((row for row in self.rows if row.standing == "leading"), None)

    def row(self, family: str) -> FamilyView:
        """Return the line of one family."""
        return next(row for row in self.rows if row.family == family)


def record(incident: Incident, first_bad: dict[str, Any] | None = None) -> Record:
    """Return what is stored that may speak about the cause."""
    return board_record.read(incident, first_bad or firstbad.of_incident(incident))


def of(
    incident: Incident, *, person: Person | None = None, first_bad: dict[str, Any] | None = None
) -> BoardView:
    """Return the board of an incident.

    Args:
        person: whose page it is, to say what is theirs.
        first_bad: the first-bad document as it is now, when the caller has read it.
    """
    probes = list(incident.probes.select_related("owner", "recorded_by"))
    changes = list(incident.board_changes.select_related("person").order_by("id"))
    weighed = science.board(record(incident, first_bad), tried(probes))
    held = _owners(changes)
    views = [_probe_view(probe) for probe in probes]
    rows = []
    for row in weighed.rows:
        owner = held.get(str(row.family))
        rows.append(
            FamilyView(
                family=str(row.family),
                standing=row.standing,
                why=row.why,
                by=row.by,
                supports=row.supports,
                contradicts=row.contradicts,
                offer=_offer_view(row.probe),
                probes=[view for view in views if view.family == row.family],
                owner=owner.username if owner else "",
                mine=owner is not None and person is not None and owner.pk == person.pk,
            )
        )
    leading = weighed.leading
    moved = incident.family and leading is not None and str(leading.family) != incident.family
    return BoardView(
        rows=rows,
        running=next((view for view in views if view.state == Probe.State.RUNNING), None),
        cause=_cause(changes),
        history=[
            ChangeLine(change.at, change.person.username, change.kind, change.text)
            for change in reversed(changes)
        ],
        opened_as=incident.family if moved else "",
        diagnosis_why=weighed.diagnosis.why,
        probes=views,
    )


def leader(incident: Incident) -> tuple[str, str]:
    """Return the family that a plan follows and why: of the closed cause, else what leads the board."""
    cause = _cause(list(incident.board_changes.select_related("person").order_by("id")))
    if cause is not None and cause.family:
        return cause.family, f"{cause.by} closed the cause as {cause.certainty}: {cause.family}"
    weighed = science.board(record(incident, incident.first_bad), tried(incident.probes.all()))
    if weighed.leading is None:
        return str(Family.UNKNOWN), "no family leads the board"
    return str(weighed.leading.family), weighed.leading.why


def owners(incident: Incident) -> dict[str, Person]:
    """Return who has which family."""
    return _owners(incident.board_changes.select_related("person").order_by("id"))


def tried(probes: Iterable[Probe]) -> list[Tried]:
    """Return the probes that came out, by when that was written down."""
    done = [probe for probe in probes if probe.state == Probe.State.DONE and probe.ended_at is not None]
    found = []
    for probe in sorted(done, key=lambda one: (one.ended_at, one.number)):
        known_ = known(probe)
        found.append(
            Tried(id=f"H-{probe.number}", probe=known_, result=known_.result(probe.result) or UNCLEAR)
        )
    return found


def known(probe: Probe) -> Known:
    """Return what a started probe is in the table; one that is no longer there is as a person's own."""
    found = probe_of(probe.key) if probe.key != OWN else None
    return found or own(_family(probe.family), probe.name, probe.condition)


def _family(name: str) -> Family:
    return Family(name) if name in set(FAMILIES) else Family.UNKNOWN


def _owners(changes: Iterable[BoardChange]) -> dict[str, Person]:
    held: dict[str, Person] = {}
    for change in changes:
        if change.kind == K.TAKE:
            held[change.family] = change.person
        elif change.kind == K.RELEASE:
            held.pop(change.family, None)
    return held


def _cause(changes: list[BoardChange]) -> Cause | None:
    newest = next((change for change in reversed(changes) if change.kind == K.CAUSE), None)
    if newest is None or newest.data.get("certainty") == "open":
        return None
    return Cause(
        certainty=str(newest.data.get("certainty")),
        family=newest.family,
        ids=list(newest.data.get("ids") or []),
        text=newest.text,
        by=newest.person.username,
        at=newest.at,
    )


def _probe_view(probe: Probe) -> ProbeView:
    said = known(probe)
    result = said.result(probe.result) if probe.result else None
    return ProbeView(
        id=f"H-{probe.number}",
        number=probe.number,
        family=probe.family,
        name=probe.name,
        condition=probe.condition,
        command=probe.command.splitlines(),
        state=probe.state,
        owner=probe.owner.username,
        started_at=probe.started_at,
        ended_at=probe.ended_at,
        result=result.words if result else "",
        note=probe.note,
        recorded_by=probe.recorded_by.username if probe.recorded_by else "",
        choices=[(one.key, one.words) for one in (*said.results, UNCLEAR)],
    )


def _offer_view(offer: Offer | None) -> OfferView | None:
    if offer is None:
        return None
    probe = offer.probe
    return OfferView(
        probe.key, probe.name, probe.condition, probe.minutes, (offer.command or "").splitlines()
    )
