"""Twenty people and machines at once: never two live permits, never one for an unapproved plan."""

import contextlib
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace

import pytest
from django.db import connections
from django.utils import timezone

from andon.canonical import sha256
from evidence.models import Item
from incidents import actions, approval, launches, ledger, review
from incidents.models import Approval, Incident, LedgerRow, Permit
from incidents.refused import Refused
from tests.incidents.world import World

THREADS = 20
ROUNDS = int(os.environ.get("RACE_ROUNDS", "10"))  # `make bench` asks for more


class Crowd:
    """Threads that keep their connections: a round is about the race, not about connecting."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS)

    def at_once(self, *calls: Callable[[], object]) -> tuple[list[object], list[Exception]]:
        """Run every call in a thread of its own, started together; returns results and what was raised."""
        start = threading.Barrier(len(calls))

        def run(call: Callable[[], object]) -> object:
            start.wait(20)
            return call()

        done = [self._pool.submit(run, call) for call in calls]
        assert not wait(done, 60).not_done, "a deadlock that the database did not end"
        raised = [error for one in done if isinstance(error := one.exception(), Exception)]
        return [one.result() for one in done if one.exception() is None], raised

    def leave(self) -> None:
        """Close every connection: the database is emptied next."""
        self.at_once(*[connections.close_all] * THREADS)
        self._pool.shutdown()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    """Twenty people and machines."""
    made = Crowd()
    yield made
    made.leave()


def unexpected(raised: list[Exception]) -> list[Exception]:
    return [error for error in raised if not isinstance(error, Refused)]


def check(world: World) -> None:
    live = Permit.objects.filter(run=world.run, state__in=["issued", "exchanged"])
    assert live.count() <= 1
    for permit in Permit.objects.filter(run=world.run).select_related("request"):
        request = permit.request
        approvals = list(Approval.objects.filter(request=request))
        assert len(approvals) >= request.approvers_needed
        assert {one.digest for one in approvals} == {sha256(request.subject)}
        plan = request.subject["plan"]
        assert permit.document["checkpoint"]["step"] == plan["checkpoint"]["step"]
    for permit in live:
        incident = world.incident()
        if permit.state == "issued":
            # Not taken yet: what was approved is still what would be signed now, or a void is due at
            # the exchange, which checks again.
            assert incident.state == Incident.State.APPROVED
    assert ledger.verify(world.run) == []


@pytest.mark.django_db(transaction=True)
class TestRaces:
    def test_twenty_exchanges_hand_one_permit_to_one_post(self, world, team, crowd):
        incident = world.incident()
        digest = approval.subject(incident)[1]
        approval.request_resume(incident=incident, person=team.mira, digest=digest)
        approval.approve(incident=incident, person=team.jonas, digest=digest)
        calls = [
            lambda n=n: approval.exchange(
                run=world.run, incident_id=incident.pk, attempt=2, webhook_id=f"supervisor-{n % 10}"
            )
            for n in range(THREADS)
        ]
        results, raised = crowd.at_once(*calls)
        assert unexpected(raised) == []
        # Each id posted twice: the one that won got it both times, every other was told.
        assert len(results) == 2
        assert results[0] == results[1]
        assert {error.code for error in raised if isinstance(error, Refused)} == {"already-exchanged"}
        assert LedgerRow.objects.filter(action="permit").count() == 1

    def test_two_approvals_at_once_issue_one_permit(self, world, team, crowd):
        incident = world.incident()
        digest = approval.subject(incident)[1]
        approval.request_resume(incident=incident, person=team.tomas, digest=digest)
        results, raised = crowd.at_once(
            *[
                lambda who=who: approval.approve(incident=world.incident(), person=who, digest=digest)
                for who in (team.mira, team.jonas, team.priya)
            ]
        )
        assert unexpected(raised) == []
        assert len(results) == 1
        assert Permit.objects.count() == 1

    def test_approvals_edits_evidence_late_values_and_exchanges_mixed(self, world, team, crowd):
        mixed(crowd, world, team, ROUNDS, seed=20)

    def test_the_same_through_a_pooler_in_transaction_mode(self, through_pgbouncer, world, team, crowd):
        mixed(crowd, world, team, ROUNDS, seed=21)


def mixed(crowd: Crowd, world: World, team: SimpleNamespace, rounds: int, *, seed: int) -> None:
    """Run rounds of 20 calls at once, each ending with the run held and nothing out."""
    rng = random.Random(seed)
    permits = 0
    for turn in range(rounds):
        before = Permit.objects.count()
        one_round(crowd, world, team, rng, turn)
        permits += Permit.objects.count() - before
    assert permits > 0, "the race never got as far as a permit: it tested nothing"
    if report := os.environ.get("RACE_REPORT"):
        line = {"rounds": rounds, "seed": seed, "permits": permits, "ledger_rows": LedgerRow.objects.count()}
        with open(report, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def one_round(crowd: Crowd, world: World, team: SimpleNamespace, rng: random.Random, turn: int) -> None:
    """Race 20 calls from a request that waits for its approval."""
    people = [team.mira, team.jonas, team.priya, team.tomas]
    # Each round begins with a request, so that the race is about what becomes of it.
    with contextlib.suppress(Refused):
        digest = approval.subject(world.incident())[1]
        approval.request_resume(incident=world.incident(), person=team.tomas, digest=digest)
    late = [world.finding("loss_spike", step=1003 + turn, send=False) for _ in range(2)]
    backfill = {"backfill": True, "severity": "info", "needs_incident": False, "send": False}
    late += [world.finding("nonfinite", step=1001, **backfill) for _ in range(2)]

    def request():
        incident = world.incident()
        digest = approval.subject(incident)[1]
        return approval.request_resume(incident=incident, person=rng.choice(people), digest=digest)

    def approve():
        incident = world.incident()
        digest = approval.subject(incident)[1]
        return approval.approve(incident=incident, person=rng.choice(people), digest=digest)

    def edit():
        step = rng.choice([800, 900])
        return actions.change_plan(incident=world.incident(), person=team.tomas, checkpoint_step=step)

    def evidence():
        items = Item.objects.filter(dossier=world.incident().dossier, kind="norms")
        return items.update(digest=f"{rng.randrange(4):064x}")

    def exchange():
        return approval.exchange(
            run=world.run,
            incident_id=world.incident().pk,
            attempt=2,
            webhook_id=f"supervisor-{turn}-{rng.randrange(3)}",
            supervisor=f"supervisor-{rng.randrange(2)}",
        )

    def reviewed():
        return review.again(world.incident().pk)

    kinds = [request, approve, approve, edit, evidence, exchange, exchange, reviewed]
    if turn == 0:
        kinds = [approve, exchange]  # at least one round gets as far as a permit
    calls: list[Callable[[], object]] = [rng.choice(kinds) for _ in range(THREADS - len(late))]
    calls += [partial(world.tell, row) for row in late]
    _, raised = crowd.at_once(*calls)
    assert unexpected(raised) == []
    check(world)
    Permit.objects.filter(state__in=["issued", "exchanged"]).update(expires_at=timezone.now())
    launches.sweep_expired()
    assert world.directive() == "hold"
