"""What is stored about one incident and may speak about its cause, as plain data.

The server fills a `Record` from its rows, a test from a file: the board is computed from nothing else,
so that every conclusion can be replayed. Each entry carries the id under which people cite its row:
`F-117` finding, `V-…` event, `N-…` launch, `C-…` checkpoint, `I-…` incident.
"""

from functools import cached_property
from typing import Any

import msgspec

from andon.detect.cells import FirstBad, Phase
from andon.detect.finding import Finding
from andon.diagnose.devices import is_fault
from andon.diagnose.families import Facts
from andon.wire_values import parse_ranks

NEAR_STEPS = 100  # trouble this soon after a launch or a boundary suspects it


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One stored row by its id."""

    id: str


class Seen(Entry, frozen=True, kw_only=True):
    """A finding of the incident."""

    kind: str
    severity: str
    rule: str = ""
    step: int | None = None
    lanes: list[int | str] = []
    series: str = ""
    view: str = "reduced"
    score: float | None = None
    numbers: dict[str, Any] = {}
    detail: str = ""

    def said(self) -> Finding:
        """Return it as its detector said it."""
        return Finding(
            kind=self.kind,
            severity=self.severity,  # type: ignore[arg-type]
            rule=self.rule,
            step=self.step,
            detector=self.rule,
            detector_version=0,
            series=self.series,
            detail=self.detail,
            lanes=tuple(self.lanes),
            score=self.score,
            numbers=self.numbers,
            view="local" if self.view == "local" else "reduced",
        )


class Posted(Entry, frozen=True, kw_only=True):
    """An event of the incident's attempt; `at` is its time as seconds since 1970, 0 when not needed."""

    type: str
    step: int | None = None
    rank: int | None = None
    node: str = ""
    at: float = 0.0
    data: dict[str, Any] = {}
    flags: dict[str, str] = {}


class Launch(Entry, frozen=True, kw_only=True):
    """An attempt as its launch reported it; `nodes` is [{"node", "ranks"}]."""

    number: int
    first_step: int | None = None
    world_size: int | None = None
    precision: str = ""
    config_sha256: str = ""
    environment_sha256: str = ""
    nodes: list[dict[str, Any]] = []
    data: dict[str, Any] = {}


class Kept(Entry, frozen=True, kw_only=True):
    """A checkpoint of the run."""

    step: int
    state: str
    uri: str = ""
    attempt: int = 1


class Before(Entry, frozen=True, kw_only=True):
    """An earlier incident of the run, with the nodes it began on."""

    kind: str
    step: int | None = None
    nodes: list[str] = []


class Record(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that may speak, of one incident.

    Attributes:
        incident: its id, "I-2041".
        run, attempt: whose it is.
        first: its first-bad cell as `FirstBad.to_document` writes it, {} when nothing is known to be bad.
        findings: those attached to it.
        launches: the attempt's and the one before it, oldest first.
        events: of the attempt, near the first bad step (steps, batches) or whenever (hardware, reports).
        checkpoints: of the run, before the first bad step.
        earlier: incidents before it.
        recurrence: how it came back in its own watch window, as `families.Facts` words it.
        applied: whether the first bad update reached the weights, None when nobody said.
        held_by_hand: a person held the run.
    """

    incident: str
    run: str = ""
    attempt: int = 1
    first: dict[str, Any] = {}
    findings: list[Seen] = []
    launches: list[Launch] = []
    events: list[Posted] = []
    checkpoints: list[Kept] = []
    earlier: list[Before] = []
    recurrence: str = "none"
    applied: bool | None = None
    held_by_hand: bool = False

    @property
    def step(self) -> int | None:
        """The first bad step."""
        return self.first.get("step")

    @property
    def ranks(self) -> list[int]:
        """The ranks of the first-bad cell; empty when the rank is not known."""
        return list(self.first.get("ranks") or [])

    @property
    def launch(self) -> Launch | None:
        """The launch of the incident's attempt."""
        return next((one for one in self.launches if one.number == self.attempt), None)

    @property
    def launch_before(self) -> Launch | None:
        """The newest launch before it."""
        older = [one for one in self.launches if one.number < self.attempt]
        return max(older, key=lambda one: one.number, default=None)

    @cached_property
    def nodes(self) -> dict[str, tuple[int, ...]]:
        """Ranks by node, as the launch told."""
        found: dict[str, tuple[int, ...]] = {}
        for entry in self.launch.nodes if self.launch else []:
            try:
                found[str(entry.get("node", ""))] = parse_ranks(entry.get("ranks"))
            except ValueError:
                continue
        return found

    @cached_property
    def bad_nodes(self) -> list[str]:
        """The nodes of the first-bad ranks."""
        ranks = set(self.ranks)
        return sorted(name for name, held in self.nodes.items() if ranks & set(held))

    def of_type(self, *types: str) -> list[Posted]:
        """Return the events of these types, oldest first."""
        found = [event for event in self.events if event.type in types]
        return sorted(found, key=lambda event: (event.at, event.step or 0, event.id))

    def cell(self) -> FirstBad | None:
        """Return the first-bad cell, None when none is known."""
        if self.step is None or not self.first.get("phase"):
            return None
        return FirstBad(
            step=self.step,
            micro_batch=self.first.get("micro_batch"),
            phase=Phase[str(self.first["phase"]).upper()],
            ranks=tuple(self.ranks),
            tie=bool(self.first.get("tie")),
            tie_reason=str(self.first.get("tie_reason") or ""),
            certainty=str(self.first.get("certainty") or ""),
            layer=self.first.get("layer"),
            stage=self.first.get("stage"),
            skipped=bool(self.first.get("skipped")),
        )

    def facts(self) -> Facts:
        """Return what the first diagnosis is told beside the findings."""
        launch = self.launch
        return Facts(
            update_applied=self.applied,
            restarted_at=launch.first_step if launch is not None and launch.number > 1 else None,
            recurrence=self.recurrence,  # type: ignore[arg-type]
            hardware_nodes=frozenset(
                event.node for event in self.events if event.node and is_fault(event.type, event.data)
            ),
            bad_nodes=frozenset(self.bad_nodes),
            held_by_hand=self.held_by_hand,
        )
