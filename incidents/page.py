"""The pieces of the incident page as plain data: `incidents.incident_page` fills them.

Sentences are finished (words, units, UTC); times, counts and money are also there as values, so that
a template can format them in its own place and a test can compare them.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from evidence.queries import Counts

Glyph = Literal["done", "running", "not_yet", "missing"]


@dataclass(frozen=True, slots=True)
class FirstBadAnswer:
    """What broke first, and where."""

    headline: str  # "rank 61 on node-07, step 18,003, backward"
    followed: str  # "rank 9 one step later", "" when nothing did; of a hang, that no value is bad
    recorded: str  # of its machines: "Xid 48 on node-02 at step 76: double-bit ECC error.", "" = no fault
    says: str  # micro-batch, skipped: finished sentences
    sure: str  # "local values, all 64 ranks reported, no tie"
    state: str  # state word of the grid's legend: "nonfinite" | "spike" | "" (nothing bad)
    symptom: str  # "instant NaN or Inf, one rank"
    look_first_at: str
    family: str
    family_why: str
    step: int | None
    attempt: int
    ranks: list[int]
    nodes: list[str]  # of these ranks, [] when the launch did not say
    phase: str
    layer: str
    tie: bool
    certainty: str


@dataclass(frozen=True, slots=True)
class EvidenceAnswer:
    """Is the evidence safe? Counts are of required items; `held` includes sealed ones."""

    headline: str  # "15 of 15 held, 13 sealed"
    says: str
    required: int
    held: int
    sealed: int
    missing: int


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """What the run is doing, and who obeys."""

    headline: str  # "Held after step 18,004"
    obedience: str  # "64 of 64 ranks obey"
    says: str  # when ranks leave, or what the directive means
    kind: str  # kind of the directive in force
    seq: int
    since: datetime | None
    obeyed: int
    of: int
    silent: list[int]
    held: bool


@dataclass(frozen=True, slots=True)
class Button:
    """One thing to press. Not allowed: it stays visible and `why` says what opens it."""

    code: str  # acknowledge | check-plan | request | approve | reject | false-alarm | change-plan | ...
    label: str
    allowed: bool
    why: str = ""
    never: bool = False  # this person's role may never press it: show `why` instead of the button


@dataclass(frozen=True, slots=True)
class NextAnswer:
    """What may I press: one main thing, and the rest."""

    main: Button
    says: str
    buttons: list[Button]


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of the waiting line; a moment is shown as the time to or since it, kept current."""

    text: str
    moment: datetime | None = None
    warn: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waiting costs, while the run is held."""

    since: datetime
    held_s: float
    gpus: int | None  # None: no launch told the world size
    gpu_hours: float | None
    money: float | None
    money_per_minute: float | None
    currency: str
    leaves_at: datetime | None  # when held ranks leave
    ends_at: datetime | None  # when the allocation ends
    nodes: int
    nodes_fresh: int  # heard from in the last minute
    oldest_node: str
    oldest_node_s: float | None
    pieces: list[Piece]  # the line after held, idle and cost
    nothing_pressed: str  # what happens then

    @property
    def money_per_hour(self) -> float:
        """What an hour of waiting costs, 0 when it is not known."""
        return 60.0 * (self.money_per_minute or 0.0)


@dataclass(frozen=True, slots=True)
class GateLine:
    """One computed line of the gate."""

    code: str  # contained | evidence | plan | requested | approved
    label: str
    glyph: Glyph
    says: str  # what is missing, or that nothing is


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What carrying the plan out costs."""

    steps_lost: int | None
    seconds: float | None
    gpu_hours: float | None
    money: float | None
    currency: str
    says: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """The plan in force, and why."""

    id: int
    number: int
    kind: str
    label: str
    why: str
    checkpoint: dict[str, Any]
    checkpoint_says: str
    positions: dict[str, Any]
    skip: dict[str, int] | None
    skip_says: str
    exclusions: dict[str, list[Any]]
    exclusions_say: str
    changes: list[dict[str, Any]]
    changes_say: str
    after_says: str
    made_by: str  # "Andon" or a person
    made_at: datetime
    missing: list[str]  # why the plan is not complete
    cost: PlanCost
    numbers: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request to resume and what became of it."""

    id: int
    kind: str
    state: str
    by: str
    at: datetime
    note: str
    plan_number: int
    digest: str
    approvals: list[tuple[str, datetime]]
    needed: int
    expires_at: datetime
    ended_at: datetime | None
    ended_why: list[str]
    permit: str  # public id of its permit, "" = none
    permit_state: str
    permit_expires_at: datetime | None
    exchanged_at: datetime | None
    exchanged_by: str


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One line of the timeline; alike findings are folded into one with a count."""

    occurred_at: datetime
    received_at: datetime
    lag: str
    source: str  # people | trainer | Andon
    by: str
    kind: str
    text: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One ledger row with names for people."""

    seq: int
    at: datetime
    run: str
    incident: int | None
    attempt: int | None
    action: str
    step: int | None
    ranks: list[int] | None
    ranks_say: str  # "ranks 56–63", "" when it names none
    before: dict[str, int | None] | None
    after: dict[str, int | None] | None
    loader_says: str  # "8,288 → 8,352", "" when it moved nothing
    positions: list[tuple[str, str, str]]  # each position in words, before, after
    checkpoint: dict[str, Any] | None
    detector: dict[str, Any] | None
    decided_by: str
    why: str
    samples_skipped: int | None
    steps_lost: int | None
    gpu_hours_lost: float | None
    budget: dict[str, Any] | None
    none_because: dict[str, str]
    absent: list[tuple[str, str]]  # ("step, ranks", why): what it has no value for, each reason once
    digest: str
    previous: str


@dataclass(frozen=True, slots=True)
class FindingLine:
    """One finding of the incident with the numbers it used."""

    id: int
    kind: str
    severity: str
    rule: str
    mode: str
    step: int | None
    lanes: list[Any]
    series: str
    view: str
    score: float | None
    numbers: dict[str, Any]
    detail: str
    detector: str  # "nonfinite v1"
    occurred_at: datetime
    received_at: datetime
    backfill: bool


@dataclass(frozen=True, slots=True)
class StateStep:
    """One turning point."""

    before: str
    after: str
    at: datetime
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class IncidentLine:
    """One line of the list of incidents."""

    id: int
    run: str
    attempt: int
    state: str
    title: str
    symptom: str  # in words
    symptom_key: str  # key of the playbook's table
    severity: str
    held: bool
    opened_at: datetime
    first_bad: str
    lead: str
    acknowledged: bool
    evidence: Counts
    directive: dict[str, Any]
    first_bad_document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AlarmLine:
    """The line under the bar of every page while a run is held or an incident is unacknowledged."""

    incident: int
    run: str
    held: bool
    says: str
    acknowledged: bool
    idle_gpus: int = 0  # of a held run, as its launch reported
    glass: str = ""  # who broke the glass and why, until the incident is resolved
