"""Work rows: claimed by one, kept by a lease, done at least once, found by the sweep."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from runs import work
from runs.models import Work
from runs.work import GiveUp, Lease, LeaseLost, Retry, enqueue, run_due, run_one

Calls = list[dict[str, object]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    """What the handler of kind `tests.note` was called with."""
    heard: Calls = []

    @work.handler("tests.note")
    def note(payload: dict[str, object], lease: Lease) -> None:
        heard.append(payload)

    yield heard
    work._handlers.pop("tests.note")


def make(kind: str = "tests.note", key: str = "k", **payload: object) -> Work:
    enqueue(kind=kind, key=key, payload=payload)
    return Work.objects.get(kind=kind, key=key, state__in=["due", "claimed"])


@pytest.mark.django_db
class TestRunning:
    def test_it_is_done_once(self, calls: Calls) -> None:
        unit = make(n=1)
        assert run_one(unit.pk)
        assert not run_one(unit.pk)
        unit.refresh_from_db()
        assert (unit.state, unit.lease_token) == ("done", None)
        assert calls == [{"n": 1}]

    def test_the_same_key_is_not_doubled_while_unfinished(self, calls: Calls) -> None:
        first = make(n=1)
        assert make(n=2).pk == first.pk
        run_due()
        assert calls == [{"n": 2}]
        assert make(n=3).pk != first.pk

    def test_not_before_is_respected(self, calls: Calls) -> None:
        enqueue(kind="tests.note", key="later", not_before=timezone.now() + timedelta(hours=1))
        assert run_due() == 0
        assert calls == []

    def test_what_is_asked_while_it_runs_does_not_wait_for_the_time_it_gives_itself(self) -> None:
        asked = [True, False]

        @work.handler("tests.later")
        def later(payload: dict[str, object], lease: Lease) -> None:
            if asked.pop(0):
                enqueue(kind="tests.later", key="k")
            raise Retry(600, "in ten minutes")

        unit = make("tests.later")
        for is_due in (True, False):
            assert run_one(unit.pk)
            unit.refresh_from_db()
            assert (unit.not_before <= timezone.now()) is is_due

    def test_a_retry_comes_back_after_its_time_and_says_why(self) -> None:
        @work.handler("tests.retry")
        def later(payload: dict[str, object], lease: Lease) -> None:
            raise Retry(30, "the store is busy")

        unit = make("tests.retry")
        assert run_one(unit.pk)
        unit.refresh_from_db()
        assert (unit.state, unit.error, unit.attempts) == ("due", "the store is busy", 1)
        assert 25 < (unit.not_before - timezone.now()).total_seconds() <= 30

    def test_a_retry_without_a_time_backs_off_with_every_try(self) -> None:
        @work.handler("tests.backs_off")
        def later(payload: dict[str, object], lease: Lease) -> None:
            raise Retry(None, "the store is down")

        unit = make("tests.backs_off")
        for tries in range(1, 11):
            assert run_one(unit.pk)
            unit.refresh_from_db()
            wait_s = (unit.not_before - timezone.now()).total_seconds()
            most_s = min(work.RETRY_LAST_S, 2.0**tries)
            assert 0.8 * most_s - 1 < wait_s <= most_s
            Work.objects.filter(pk=unit.pk).update(not_before=timezone.now())

    def test_an_exception_is_tried_again_and_kept(self) -> None:
        @work.handler("tests.fails")
        def fail(payload: dict[str, object], lease: Lease) -> None:
            raise OSError("no route to store")

        unit = make("tests.fails")
        run_one(unit.pk)
        unit.refresh_from_db()
        assert unit.state == "due"
        assert "no route to store" in unit.error
        assert unit.not_before > timezone.now()

    def test_giving_up_ends_it_with_the_reason(self) -> None:
        @work.handler("tests.never")
        def never(payload: dict[str, object], lease: Lease) -> None:
            raise GiveUp("the run is gone")

        unit = make("tests.never")
        run_one(unit.pk)
        unit.refresh_from_db()
        assert (unit.state, unit.error) == ("failed", "the run is gone")

    def test_asked_for_again_while_it_runs_it_runs_once_more(self) -> None:
        seen: list[int] = []

        @work.handler("tests.again")
        def again(payload: dict[str, object], lease: Lease) -> None:
            seen.append(1)
            if len(seen) == 1:
                enqueue(kind="tests.again", key="k")

        unit = make("tests.again")
        run_due()
        assert len(seen) == 2
        assert Work.objects.get(pk=unit.pk).state == "done"

    def test_an_unknown_kind_waits_for_a_worker_that_knows_it(self) -> None:
        unit = make("tests.unknown")
        assert run_one(unit.pk)
        unit.refresh_from_db()
        assert unit.state == "due"
        assert "tests.unknown" in unit.error


@pytest.mark.django_db
class TestLease:
    def test_a_dead_workers_unit_is_taken_over_and_the_dead_one_may_not_finish(self, calls: Calls) -> None:
        unit = make()
        old = Lease(unit.pk, __import__("uuid").uuid4())
        Work.objects.filter(pk=unit.pk).update(
            state="claimed", lease_token=old.token, lease_until=timezone.now() - timedelta(seconds=1)
        )
        old.renew()
        Work.objects.filter(pk=unit.pk).update(lease_until=timezone.now() - timedelta(seconds=1))
        assert run_one(unit.pk)
        assert len(calls) == 1
        for use in (old.renew, old.guard):
            with pytest.raises(LeaseLost):
                use()
        work._finish(old)
        assert Work.objects.get(pk=unit.pk).state == "done"

    def test_a_live_lease_is_respected(self, calls: Calls) -> None:
        unit = make()
        Work.objects.filter(pk=unit.pk).update(
            state="claimed",
            lease_token=__import__("uuid").uuid4(),
            lease_until=timezone.now() + timedelta(seconds=60),
        )
        assert not run_one(unit.pk)
        assert calls == []

    def test_the_lease_of_one_known_to_be_dead_is_not_waited_for(self, calls: Calls) -> None:
        unit = make()
        Work.objects.filter(pk=unit.pk).update(
            state="claimed",
            lease_token=__import__("uuid").uuid4(),
            lease_until=timezone.now() + timedelta(seconds=60),
        )
        assert work.take_over() == 1
        assert run_one(unit.pk)
        assert len(calls) == 1


@pytest.mark.django_db(transaction=True)
def test_of_many_workers_one_does_it() -> None:
    done: list[int] = []

    @work.handler("tests.race")
    def once(payload: dict[str, object], lease: Lease) -> None:
        done.append(1)

    unit = make("tests.race")

    def claim() -> None:
        try:
            run_one(unit.pk)
        finally:
            connection.close()

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == 1


@pytest.mark.django_db(transaction=True)
def test_a_lease_is_renewed_while_the_handler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "RENEW_EVERY_S", 0.1)
    monkeypatch.setattr(work, "LEASE_S", 0.4)
    taken: list[bool] = []

    @work.handler("tests.long")
    def long(payload: dict[str, object], lease: Lease) -> None:
        threading.Event().wait(1.0)
        taken.append(run_one(lease.work_id))

    unit = make("tests.long")
    assert run_one(unit.pk)
    assert taken == [False]
    unit.refresh_from_db()
    assert (unit.state, unit.attempts) == ("done", 1)


@pytest.mark.django_db(transaction=True)
def test_the_bell_rings_only_after_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[tuple[str, int]] = []
    monkeypatch.setattr("runs.bell.ring", lambda task, key: rung.append((task, key)))
    with transaction.atomic():
        enqueue(kind="tests.note", key="x")
        assert rung == []
    unit = Work.objects.get(kind="tests.note", key="x")
    assert rung == [("runs.tasks.run_work", unit.pk)]
    with transaction.atomic():
        enqueue(kind="tests.note", key="y")
        transaction.set_rollback(True)
    assert len(rung) == 1
    rung.clear()
    work.sweep()
    work.sweep()
    assert rung == [("runs.tasks.run_work", unit.pk)] * 2
