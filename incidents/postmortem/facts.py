"""What a postmortem is written from, read once."""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from andon.policy import Policy
from evidence.gates import Gate, resume_gate
from evidence.models import Dossier, Item
from evidence.queries import Counts, evidence_counts
from incidents import board, firstbad, rules
from incidents.board import BoardView
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
from runs.models import Attempt, DirectiveAck, Finding
from runs.policies import policy_for

FINDINGS = 500
TIMELINE = 400
ACKS = 40_000  # a fleet's ranks may each answer for themselves, and leave later


@dataclass
class Facts:
    """The rows of one incident; each kind is read when a section asks for it."""

    incident: Incident

    @cached_property
    def first_bad(self) -> dict[str, Any]:
        """The first-bad document as it is now."""
        return {**firstbad.UNKNOWN, **firstbad.of_incident(self.incident)}

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings, earliest step first."""
        found = Finding.objects.filter(run_id=self.incident.run_id, incident=str(self.incident.pk))
        return list(found.order_by("step", "id")[:FINDINGS])

    @cached_property
    def leading(self) -> Finding | None:
        """The finding the incident is about."""
        bad = [row for row in self.findings if row.kind != rules.LAUNCH_WITHOUT_PERMIT]
        return rules.leading(bad) if bad else None

    @cached_property
    def origin(self) -> Finding | None:
        """The finding of the first bad step itself, where there is one."""
        step, ranks = self.first_bad["step"], set(self.first_bad["ranks"])
        here = [row for row in self.findings if row.step == step]
        local = [row for row in here if row.view == "local" and (not ranks or ranks & set(row.lanes))]
        return next(iter(local or here), self.leading)

    @cached_property
    def attempt(self) -> Attempt | None:
        """The attempt that failed."""
        found = Attempt.objects.filter(run_id=self.incident.run_id, number=self.incident.attempt)
        return found.defer("groups").first()

    @cached_property
    def ledger(self) -> list[LedgerRow]:
        """The rows of the ledger that belong to the incident, oldest first."""
        rows = LedgerRow.objects.filter(run_id=self.incident.run_id, incident=self.incident)
        return list(rows.select_related("run").order_by("seq"))

    def acted(self, *actions: str) -> LedgerRow | None:
        """Return the newest ledger row of one of these actions."""
        return next((row for row in reversed(self.ledger) if row.action in actions), None)

    @cached_property
    def timeline(self) -> list[TimelineEntry]:
        """The timeline, oldest first."""
        rows = self.incident.timeline.select_related("person").order_by("occurred_at", "id")
        return list(rows[:TIMELINE])

    @cached_property
    def timeline_count(self) -> int:
        """How many entries the timeline has."""
        return self.incident.timeline.count()

    @cached_property
    def dossiers(self) -> list[Dossier]:
        """The incident's dossiers, oldest first."""
        wanted = [self.incident.dossier_id, *self.incident.earlier_dossiers]
        return list(Dossier.objects.filter(pk__in=wanted).order_by("id"))

    @cached_property
    def items(self) -> list[Item]:
        """Everything that was to be preserved, in the order in which it vanishes."""
        found = Item.objects.filter(dossier__in=self.dossiers).defer("files", "source")
        return list(found.order_by("dossier_id", "order", "id"))

    @cached_property
    def counts(self) -> Counts:
        """How much of the required evidence is held and sealed."""
        return evidence_counts(self.incident.dossier)

    @cached_property
    def gate(self) -> Gate:
        """Whether the evidence is safe."""
        return resume_gate(self.incident.dossier)

    @cached_property
    def plans(self) -> list[Plan]:
        """The versions of the plan, oldest first."""
        return list(self.incident.plans.select_related("made_by").order_by("number"))

    @cached_property
    def requests(self) -> list[ResumeRequest]:
        """The requests to resume, oldest first."""
        return list(self.incident.requests.select_related("requested_by", "plan").order_by("id"))

    @cached_property
    def approvals(self) -> list[Approval]:
        """The approvals, oldest first."""
        found = Approval.objects.filter(request__incident=self.incident)
        return list(found.select_related("approver", "request").order_by("id"))

    @cached_property
    def permits(self) -> list[Permit]:
        """The permits, oldest first."""
        return list(self.incident.permits.select_related("request").order_by("id"))

    @cached_property
    def carried_out(self) -> tuple[Permit, ResumeRequest, Plan] | None:
        """The permit by which the run went on, with its request and plan; None while it has not."""
        used = [permit for permit in self.permits if permit.exchanged_at is not None]
        if not used:
            return None
        request = next(one for one in self.requests if one.pk == used[-1].request_id)
        return used[-1], request, next(plan for plan in self.plans if plan.pk == request.plan_id)

    @cached_property
    def acks(self) -> list[DirectiveAck]:
        """Who obeyed, oldest first: holds and exits of the attempt that failed."""
        found = DirectiveAck.objects.filter(run_id=self.incident.run_id, attempt=self.incident.attempt)
        return list(found.filter(state__in=("held", "exited")).order_by("received_at", "id")[:ACKS])

    @cached_property
    def contained(self) -> DirectiveAck | None:
        """The answer by which every rank had stopped; None while none, or nobody said how many there are."""
        world = self.attempt.world_size if self.attempt else None
        stopped: set[int] = set()
        for ack in self.acks:
            stopped |= set(ack.ranks)
            if world and len(stopped) >= world:
                return ack
        return None

    @cached_property
    def board(self) -> BoardView:
        """The diagnosis board."""
        return board.of(self.incident, first_bad=self.first_bad)

    @cached_property
    def probes(self) -> list[Probe]:
        """The probes, in the order in which they were started."""
        return list(self.incident.probes.select_related("owner", "recorded_by").order_by("number"))

    @cached_property
    def cause(self) -> BoardChange | None:
        """What the cause was closed as last; None while it is open."""
        found = self.incident.board_changes.filter(kind=BoardChange.Kind.CAUSE).select_related("person")
        newest = found.order_by("-id").first()
        return None if newest is None or newest.data.get("certainty") == "open" else newest

    @cached_property
    def policy(self) -> Policy:
        """The policy in force."""
        return policy_for(self.incident.run_id)

    @property
    def resolved_at(self) -> datetime | None:
        """When the incident was over."""
        return self.incident.resolved_at
