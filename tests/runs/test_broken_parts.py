"""Andon's own parts break: incidents raises, detection raises, the broker is gone or hangs."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.dispatch import receiver

from incidents.models import Incident
from runs import bell, limits, watching
from runs.models import Event, Finding, Pending, RunProgress, Work
from runs.signals import findings_stored
from runs.work import enqueue
from tests.runs.conftest import Trainer

NAN = float("nan")


@pytest.fixture
def broken_incidents() -> Iterator[list[bool]]:
    """A receiver of findings that fails while the list says so."""
    broken = [True]

    @receiver(findings_stored, weak=False, dispatch_uid="tests.broken")
    def fail(**_: Any) -> None:
        if broken[0]:
            raise RuntimeError("broken on purpose")

    yield broken
    findings_stored.disconnect(dispatch_uid="tests.broken")


class TestIncidentsFail:
    def test_data_and_hold_survive_and_the_sweep_opens_one_incident(
        self, committing_trainer: Trainer, broken_incidents: list[bool]
    ) -> None:
        from incidents.opening import sweep_findings as sweep

        trainer = committing_trainer
        trainer.step(1, rank=0, loss=2.0)
        answers = [trainer.step(step, rank=rank, loss=NAN) for step, rank in ((2, 0), (2, 1), (3, 0))]
        for answer in answers:
            assert answer.status_code == 202
            directive = answer.json()["directive"]
            assert (directive["kind"], directive["incident"]) == ("hold", None)
        assert Event.objects.filter(run_id=trainer.run.pk).count() == 4
        assert Finding.objects.filter(run=trainer.run, needs_incident=True, incident="").count() >= 2
        assert not Incident.objects.filter(run=trainer.run).exists()
        broken_incidents[0] = False
        sweep()
        sweep()
        incident = Incident.objects.get(run=trainer.run)
        assert set(Finding.objects.filter(run=trainer.run).values_list("incident", flat=True)) == {
            str(incident.pk)
        }
        directive = trainer.step(4, rank=0, loss=2.0).json()["directive"]
        assert (directive["kind"], directive["incident"]) == ("hold", str(incident.pk))

    def test_a_receiver_that_waits_for_a_lock_costs_two_seconds_at_most(
        self, committing_trainer: Trainer
    ) -> None:
        from django.db import connection, transaction

        from runs.locks import lock_run

        trainer = committing_trainer
        trainer.step(1, rank=0, loss=2.0)
        locked, done = threading.Event(), threading.Event()

        def keep_the_run_locked() -> None:
            with transaction.atomic():
                lock_run(trainer.run.pk)
                locked.set()
                done.wait(30)
            connection.close()

        thread = threading.Thread(target=keep_the_run_locked)
        thread.start()
        assert locked.wait(10)
        try:
            before = time.monotonic()
            answer = trainer.step(2, rank=0, loss=NAN)
            took_s = time.monotonic() - before
        finally:
            done.set()
            thread.join(10)
        assert answer.status_code == 202
        assert answer.json()["directive"]["kind"] == "hold"
        assert took_s < 4


@pytest.mark.django_db
class TestDetectionFails:
    def test_the_post_is_taken_and_the_run_marked(
        self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def explode(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a detector's own mistake")

        monkeypatch.setattr("runs.ingest.judge_event", explode)
        assert trainer.step(2, rank=0, loss=NAN).status_code == 202
        progress = RunProgress.objects.get(run=trainer.run)
        assert progress.not_watched_since is not None
        assert "ZeroDivisionError" in progress.not_watched_why

    def test_a_failing_look_keeps_the_data_and_marks_the_run_until_it_works_again(
        self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.step(1, loss=2.0)
        with monkeypatch.context() as patch:
            patch.setattr("runs.watching._of_event", lambda *_: 1 / 0)
            watching.look(trainer.run.pk)
        assert Event.objects.filter(run_id=trainer.run.pk).count() == 1
        assert RunProgress.objects.get(run=trainer.run).not_watched_since is not None
        assert not Pending.objects.filter(run=trainer.run).exists()
        trainer.step(2, loss=2.0)
        watching.look(trainer.run.pk)
        assert RunProgress.objects.get(run=trainer.run).not_watched_since is None


@pytest.fixture
def silent_broker(settings: Any) -> Iterator[str]:
    """A server that accepts and never answers."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    settings.BROKER_URL = url
    limits._buckets = None
    yield url
    listener.close()


@pytest.fixture
def absent_broker(settings: Any) -> str:
    """A port nobody listens on."""
    probe = socket.create_server(("127.0.0.1", 0))
    url = f"redis://127.0.0.1:{probe.getsockname()[1]}/0"
    probe.close()
    settings.BROKER_URL = url
    limits._buckets = None
    return url


@pytest.mark.parametrize("broker", ["silent_broker", "absent_broker"])
def test_posts_are_answered_in_time_and_nothing_is_lost(
    broker: str, committing_trainer: Trainer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery import Celery

    url = request.getfixturevalue(broker)
    app = Celery("broken", broker=url, set_as_current=False)
    app.conf.broker_transport_options = {"socket_timeout": 0.3, "socket_connect_timeout": 0.3}
    monkeypatch.setattr(bell, "current_app", app)
    monkeypatch.setattr(bell, "_bell", bell._Bell())
    trainer = committing_trainer
    times = []
    for step in range(1, 30):
        before = time.monotonic()
        assert trainer.step(step, loss=2.0).status_code == 202
        times.append(time.monotonic() - before)
    before = time.monotonic()
    answer = trainer.step(30, rank=1, loss=NAN)
    times.append(time.monotonic() - before)
    assert answer.json()["directive"]["kind"] == "hold"
    enqueue(kind="tests.never", key="x")
    assert max(times) < 10  # a client without a limit hangs for more than a minute
    assert Event.objects.filter(run_id=trainer.run.pk).count() == 30
    # Losing the bell loses nothing: what waits is in rows.
    assert Pending.objects.filter(run=trainer.run).count() >= 30
    assert Work.objects.filter(kind="tests.never").exists()
    assert watching.look_at_all() >= 1
    assert not Pending.objects.filter(run=trainer.run).exists()
