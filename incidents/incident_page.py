"""The incident page, read only as far as somebody looks.

The whole page and each of its polled parts show different pieces of one incident; a poll of the
timeline every few seconds must not compute a gate, a plan's cost and a signature's digest.
"""

from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from evidence.gates import resume_gate
from evidence.queries import evidence_counts
from incidents import (
    answers,
    buttons,
    commands,
    firstbad,
    notes,
    peaks,
    permits,
    plan_words,
    plans,
    roles,
    rows,
    similar,
    subjects,
    waiting,
)
from incidents.answers import Situation
from incidents.holding import held_since
from incidents.models import Incident, LedgerRow, Permit, Plan, ResumeRequest
from incidents.page import (
    EvidenceAnswer,
    FindingLine,
    FirstBadAnswer,
    GateLine,
    LedgerLine,
    NextAnswer,
    PlanView,
    RequestView,
    RunAnswer,
    StateStep,
    TimelineRow,
    Waiting,
)
from incidents.similar import Similar
from runs.attempts import launch
from runs.directives import current, obedience
from runs.models import Finding, Person, RunProgress
from runs.policies import policy_for
from runs.reading import kept

T = TypeVar("T")
_still: dict[tuple[object, ...], Any] = {}
MOST_STILL = 256
FINDINGS = 500
LEDGER_ROWS = 100


class IncidentPage:
    """What one person is shown of one incident. `digest` and `subject` are what an approver signs now."""

    def __init__(self, incident: Incident, person: Person, now: datetime) -> None:
        """Remember whose page of which incident it is; nothing is read yet.

        Args:
            incident: with its run, project, dossier, lead and who acknowledged it.
            now: the moment every duration on the page is counted to.
        """
        self.incident, self.person, self.now = incident, person, now
        self.version = ""  # of the grid, where who shows the page has read it
        self.run = incident.run
        self.state, self.title = incident.state, incident.title
        self.opened_at, self.acknowledged_at = incident.opened_at, incident.acknowledged_at
        self.acknowledged_by = incident.acknowledged_by.username if incident.acknowledged_by else ""
        self.lead = incident.lead.username if incident.lead else ""
        self.evidence_owner = incident.evidence_owner.username if incident.evidence_owner else ""
        self.communications = incident.communications.username if incident.communications else ""

    # What was read

    @cached_property
    def situation(self) -> Situation:
        """What the answers are computed from."""
        run_id = self.incident.run_id
        return Situation(
            incident=self.incident,
            attempt=launch(run_id, self.incident.attempt),
            directive=current(run_id),
            held_since=held_since(run_id),
            obedience=obedience(run_id),
            counts=evidence_counts(self.incident.dossier),
            gate=resume_gate(self.incident.dossier),
            progress=kept(("progress", run_id), RunProgress.objects.filter(run_id=run_id).first),
            policy=policy_for(run_id),
            now=self.now,
        )

    @cached_property
    def _findings(self) -> list[Finding]:
        found = Finding.objects.filter(run_id=self.incident.run_id, incident=str(self.incident.pk))
        return list(found.order_by("step", "id")[:FINDINGS])

    @cached_property
    def _plans(self) -> list[Plan]:
        return list(self.incident.plans.select_related("made_by").order_by("number"))

    @cached_property
    def _plan(self) -> Plan | None:
        return self._plans[-1] if self._plans else None

    @cached_property
    def _requests(self) -> list[ResumeRequest]:
        found = self.incident.requests.select_related("requested_by", "plan", "permit")
        return list(found.prefetch_related("approvals__approver").order_by("-id"))

    @cached_property
    def _live(self) -> ResumeRequest | None:
        return next((request for request in self._requests if request.state in ("open", "approved")), None)

    @cached_property
    def _permit(self) -> Permit | None:
        return next((found for one in self._requests if (found := getattr(one, "permit", None))), None)

    @property
    def plan_lacks(self) -> list[str]:
        """What the plan in force still needs."""
        return plans.lacks(self._plan)

    @property
    def newest_plan(self) -> Plan | None:
        """The row of the plan in force."""
        return self._plan

    @property
    def live_request(self) -> ResumeRequest | None:
        """The row of the live request."""
        return self._live

    @cached_property
    def first_bad_document(self) -> dict[str, Any]:
        """The first-bad cell as it is now, as data."""
        return dict(self._while_still("first bad", lambda: firstbad.of_incident(self.incident)))

    def _while_still(self, name: str, read: Callable[[], T]) -> T:
        """Read what only changes with the grid, once for each of its versions.

        In a dead run 16,384 ranks stand behind each of these; a run that is held posts no more, and its
        page is looked at all night.
        """
        if not self.version:
            return read()
        incident = self.incident
        key = (name, incident.pk, incident.attempt, incident.kind, self.version)
        if key not in _still:
            while len(_still) >= MOST_STILL:
                _still.pop(next(iter(_still)), None)
            _still[key] = read()
        found: T = _still[key]
        return found

    @cached_property
    def _signed(self) -> tuple[dict[str, Any], str]:
        # Of what was asked for, where one person alone asked for it.
        kind = self._live.kind if self._live else ResumeRequest.Kind.RESUME
        return subjects.subject(self.incident, plan=self._plan, kind=kind, first_bad=self.first_bad_document)

    # The four answers

    @property
    def held(self) -> bool:
        """Whether the run is held now."""
        return self.situation.held

    @cached_property
    def first_bad(self) -> FirstBadAnswer:
        """What broke first."""
        document = self.first_bad_document
        followed = self._while_still("followed", lambda: answers.followed(self.situation, document))
        peak = self._while_still("peak", lambda: peaks.highest(self.incident, document))
        return answers.first_bad(self.situation, document, followed or peak)

    @property
    def only_node(self) -> str:
        """The one node of all first bad ranks, "" where there is none."""
        return firstbad.only_node([self.incident]).get(self.incident.pk, "")

    @cached_property
    def evidence(self) -> EvidenceAnswer:
        """Whether the evidence is safe."""
        return answers.evidence(self.situation)

    @cached_property
    def running(self) -> RunAnswer:
        """What the run is doing."""
        return answers.running(self.situation)

    @cached_property
    def next(self) -> NextAnswer:
        """What may be pressed."""
        return buttons.next_answer(
            self.incident,
            self.person,
            plan=self._plan,
            request=self._live,
            permit=self._permit,
            evidence_lacks=permits.lacking_words(self.situation.gate),
            progress=self.situation.progress,
            now=self.now,
        )

    @cached_property
    def waiting(self) -> Waiting | None:
        """What waiting costs, None once nothing waits."""
        if self.state not in Incident.UNRESOLVED:
            return None
        return waiting.line(self.situation, request=self._live, permit=self._permit)

    @property
    def watch_says(self) -> str:
        """How far the watch window is."""
        return buttons.watch_words(self.incident, self.situation.progress)

    # Plan and approval

    @cached_property
    def gate(self) -> list[GateLine]:
        """The lines of the gate, each with what is missing."""
        return answers.gate(self.situation, self._plan, self._live)

    @cached_property
    def plans(self) -> list[PlanView]:
        """Every version of the plan, oldest first."""
        return [plan_words.plan_view(self.situation, one) for one in self._plans]

    @property
    def plan(self) -> PlanView | None:
        """The plan in force."""
        return self.plans[-1] if self.plans else None

    @cached_property
    def request(self) -> RequestView | None:
        """The live request."""
        return rows.request_view(self._live) if self._live else None

    @cached_property
    def requests(self) -> list[RequestView]:
        """Every request, newest first."""
        return [rows.request_view(request) for request in self._requests]

    @cached_property
    def may_approve(self) -> list[str]:
        """Who may approve the live request, or could approve one."""
        asked = self._live.requested_by if self._live else None
        return [one.username for one in roles.free_approvers(self.incident, asked)]

    @property
    def subject(self) -> dict[str, Any]:
        """What an approver signs."""
        return self._signed[0]

    @property
    def digest(self) -> str:
        """Its digest."""
        return self._signed[1]

    # What happened

    @cached_property
    def timeline(self) -> list[TimelineRow]:
        """What happened, newest first."""
        return rows.timeline(self.incident, self._findings)

    @cached_property
    def ledger(self) -> list[LedgerLine]:
        """What was done in this incident, newest first."""
        found = LedgerRow.objects.filter(run=self.run, incident=self.incident).order_by("-seq")
        return rows.ledger_lines(found[:LEDGER_ROWS], self.run.slug)

    @cached_property
    def findings(self) -> list[FindingLine]:
        """The findings with the numbers they used."""
        return [rows.finding_line(finding) for finding in self._findings]

    @cached_property
    def states(self) -> list[StateStep]:
        """The turning points, oldest first."""
        return rows.state_steps(self.incident)

    @cached_property
    def ready(self) -> commands.Ready:
        """Commands with the names filled in, and links out."""
        return commands.of_incident(self.incident)

    @cached_property
    def similar(self) -> Similar:
        """What recurs, and what is alike."""
        return similar.of_incident(self.incident, self.person)

    @cached_property
    def notes(self) -> list[notes.Shown]:
        """Notes, newest first."""
        return notes.of_incident(self.incident)
