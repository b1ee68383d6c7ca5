"""A week of nights of what is nobody's matter: no approval is void by it, and nobody is woken by it.

Late optional evidence, swapped spares, flaky nodes, evidence that goes from held to sealed: all of it
happens while a request or a permit waits over the night. The clock is simulated: rows grow older.
"""

import random
from datetime import timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from evidence.models import Item
from incidents import approval, launches, opening, review, watching
from incidents.models import Incident, Permit, ResumeRequest
from incidents.paging import deadman
from incidents.paging.models import Delivery, Page
from runs.models import Attempt
from tests.incidents.world import World, held, seal
from tests.paging.conftest import aged

pytestmark = pytest.mark.django_db
NIGHTS = 7
FLAKY = ("crash", "node_loss", "hang", "preemption", "time_limit", "preflight_reject")


class Week:
    """One run whose resume waits over the nights, and another that loses nodes."""

    def __init__(self, project, team, seed: int) -> None:
        self.random = random.Random(seed)
        self.team = team
        self.waits = held(project, "waits")
        self.flaky = World(project, "flaky")
        for step in (100, 200):
            self.flaky.checkpoint(step)
        self.flaky.steps(198, 205)
        self.attempt = 1
        deadman.do_paging_work()
        Incident.objects.update(acknowledged_at=timezone.now(), acknowledged_by=team.mira)

    def evening(self, *, approve: bool) -> None:
        incident = self.waits.incident()
        digest = approval.subject(incident)[1]
        approval.request_resume(incident=incident, person=self.team.tomas, digest=digest)
        if approve:
            approval.approve(incident=incident, person=self.team.jonas, digest=digest)
        self.the_sweeps_run()

    def night(self, hours: int = 5) -> None:
        moves = [
            self.late_optional_evidence,
            self.a_copy_is_sealed,
            self.a_spare_is_swapped,
            self.a_node_is_flaky,
            self.a_late_value_of_a_later_step,
        ]
        for move in [*self.random.sample(moves * 2, hours - 1), self.a_node_is_flaky]:
            move()
            self.time_passes(timedelta(minutes=100))
            self.the_sweeps_run()

    def time_passes(self, by: timedelta) -> None:
        aged(self.waits.incident(), by.total_seconds() / 60)
        ResumeRequest.objects.filter(state__in=["open", "approved"]).update(
            requested_at=F("requested_at") - by, expires_at=F("expires_at") - by
        )
        Permit.objects.filter(state="issued").update(
            issued_at=F("issued_at") - by, expires_at=F("expires_at") - by
        )

    def late_optional_evidence(self) -> None:
        dossier = self.waits.incident().dossier
        for item in Item.objects.filter(dossier=dossier, required=False).order_by("id")[:2]:
            item.digest, item.state = f"{self.random.randrange(2**64):064x}", "sealed"
            item.why, item.sealed_at = "the node came back", timezone.now()
            item.save()

    def a_copy_is_sealed(self) -> None:
        """A large required item goes from held to sealed while people sleep."""
        required = Item.objects.filter(dossier=self.waits.incident().dossier, required=True)
        item = required.filter(state="sealed").order_by("id").first()
        Item.objects.filter(pk=item.pk).update(state="held")
        review.again(self.waits.incident().pk)
        seal(self.waits.incident().dossier)

    def a_spare_is_swapped(self) -> None:
        """The launcher names another machine under the same ranks."""
        attempt = Attempt.objects.get(run=self.waits.run, number=1)
        attempt.nodes = [{"node": f"spare-{self.random.randrange(9)}", "ranks": [0, 1, 2, 3]}]
        attempt.save(update_fields=["nodes"])

    def a_node_is_flaky(self) -> None:
        """Attributed to hardware, fabric or the scheduler: the supervisor restarts by itself."""
        kind = self.random.choice(FLAKY)
        self.flaky.finding(kind, attempt=self.attempt, step=205, severity="warn", rule="watch", numbers={})
        Attempt.objects.filter(run=self.flaky.run, number=self.attempt).update(
            exited_at=timezone.now(), exit={"attributed_to": "node_loss"}
        )
        self.attempt += 1
        self.flaky.launch(self.attempt)
        self.flaky.steps(201, 205, attempt=self.attempt)

    def a_late_value_of_a_later_step(self) -> None:
        self.waits.finding("nonfinite", step=1003, backfill=True, severity="info", needs_incident=False)

    def the_sweeps_run(self) -> None:
        opening.sweep_findings()
        review.again(self.waits.incident().pk)
        launches.sweep_launches()
        launches.sweep_expired()
        watching.sweep()
        deadman.do_paging_work()


def woken() -> int:
    """Return how often somebody was paged for an incident by what wakes people."""
    return Delivery.objects.filter(page__kind="incident", page__urgent=True, what="raised").count()


def test_no_approval_is_void_by_it_and_nobody_is_woken(project, team, file):
    week = Week(project, team, seed=5)
    before = woken()
    assert before, "the hold itself pages, once"
    for night in range(NIGHTS):
        approve = night % 2 == 0
        week.evening(approve=approve)
        week.night()
        request = ResumeRequest.objects.latest("id")
        assert (request.state, request.ended_why) == ("approved" if approve else "open", [])
        incident = week.waits.incident()
        assert approval.subject(incident)[1] == request.digest
        if approve:
            assert week.waits.permit().state == Permit.State.ISSUED
            approval.reject(incident=incident, person=team.priya, why="morning: not today")
        else:
            approval.withdraw(incident=incident, person=team.tomas)
    assert woken() == before
    assert not Page.objects.filter(incident__run=week.flaky.run, urgent=True).exists()
    assert week.attempt > NIGHTS, "no node was flaky: it tested nothing"
    assert week.flaky.directive() == "continue"


def test_the_week_notices_what_does_matter(project, team, file):
    week = Week(project, team, seed=5)
    week.evening(approve=True)
    Item.objects.filter(dossier=week.waits.incident().dossier, kind="norms").update(digest="f" * 64)
    week.the_sweeps_run()
    assert ResumeRequest.objects.get().state == ResumeRequest.State.VOIDED
