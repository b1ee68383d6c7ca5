"""The worker's look: detectors with memory, one worker per run, modes respected."""

import threading
from typing import Any

import numpy as np
import pytest
from django.db import connection, transaction

from andon import wire
from runs import watching
from runs.identity import forget
from runs.locks import try_watch
from runs.models import Attempt, DetectorState, Directive, Finding, Pending
from runs.policies import set_policy
from tests.runs.conftest import Trainer

SPIKE = {1000: 3.2, 1001: 3.4, 1002: 3.5, 1003: 3.6}


def curve(first: int, last: int, *, seed: int = 5) -> list[dict[str, Any]]:
    """A quiet loss around 2.6 with a spike at step 1000, one reduced value per step."""
    noise = np.random.default_rng(seed).normal(0, 0.02, 2_000)
    return [
        {
            "type": "step",
            "step": step,
            "data": {
                "loss": SPIKE.get(step, 2.6 + float(noise[step])),
                "grad_norm": 0.4 + float(noise[step]) / 4,
            },
        }
        for step in range(first, last)
    ]


def mode(trainer: Trainer, **modes: str) -> None:
    set_policy(run=trainer.run, document={"modes": modes}, person=None, why="test")
    forget()


@pytest.mark.django_db
class TestSpike:
    def test_in_observe_it_is_a_finding_and_holds_nothing(self, trainer: Trainer) -> None:
        trainer.events(*curve(880, 1004))
        watching.look(trainer.run.pk)
        found = Finding.objects.filter(run=trainer.run, rule="spike").order_by("step")
        severities = {f.step: f.severity for f in found}
        assert (min(severities), severities[1000], severities[1002]) == (1000, "warn", "halt")
        assert {f.mode for f in found} == {"observe"}
        assert trainer.step(1004, loss=2.6).json()["directive"]["kind"] == "continue"

    def test_in_act_the_halt_holds(self, trainer: Trainer) -> None:
        mode(trainer, spike="act")
        trainer.events(*curve(880, 1004))
        watching.look(trainer.run.pk)
        directive = trainer.step(1004, loss=2.6).json()["directive"]
        assert (directive["kind"], bool(directive["incident"])) == ("hold", True)

    def test_off_says_nothing(self, trainer: Trainer) -> None:
        mode(trainer, spike="off")
        trainer.events(*curve(880, 1004))
        watching.look(trainer.run.pk)
        assert not Finding.objects.filter(run=trainer.run, rule="spike").exists()

    def test_looks_in_pieces_say_what_one_look_says(self, trainer: Trainer) -> None:
        events = curve(880, 1004)
        for first in range(0, len(events), 7):
            trainer.events(*events[first : first + 7])
            watching.look(trainer.run.pk)
        pieces = list(
            Finding.objects.filter(run=trainer.run).order_by("step").values_list("step", "kind", "score")
        )
        from tests.runs.conftest import new_trainer

        other = new_trainer()
        other.events(*events)
        watching.look(other.run.pk)
        whole = list(
            Finding.objects.filter(run=other.run).order_by("step").values_list("step", "kind", "score")
        )
        assert {row[0] for row in whole} == {row[0] for row in pieces}
        assert {row[0]: row[2] for row in whole} == {row[0]: row[2] for row in pieces}

    def test_the_order_of_arrival_within_a_look_does_not_matter(self, trainer: Trainer) -> None:
        for event in reversed(curve(880, 1004)):
            trainer.events(event)
        watching.look(trainer.run.pk)
        steps = set(Finding.objects.filter(run=trainer.run, rule="spike").values_list("step", flat=True))
        assert min(step for step in steps if step) == 1000

    def test_every_nodes_copy_of_a_reduced_loss_counts_once(self, trainer: Trainer) -> None:
        for event in curve(900, 960):
            trainer.events(*[{**event, "node": f"n{n}", "ranks": [n]} for n in range(3)])
        watching.look(trainer.run.pk)
        state = DetectorState.objects.get(run=trainer.run, detector="spike").state
        assert len(state["window"]) == 60


@pytest.mark.django_db
class TestLayers:
    def test_a_layer_that_explodes_is_named(self, trainer: Trainer) -> None:
        norms = np.full((60, 3), 0.5, dtype=np.float32)
        norms += np.random.default_rng(1).normal(0, 0.01, norms.shape).astype(np.float32)
        norms[59, 1] = 5_000
        frame = wire.Frame(
            stream="layer",
            attempt=1,
            step=np.repeat(np.arange(60, dtype=np.int64), 3),
            lane=["embed", "layers.0", "layers.1"] * 60,
            metrics={"grad_norm": norms.reshape(-1)},
        )
        assert trainer.frame(frame).status_code == 202
        watching.look(trainer.run.pk)
        found = Finding.objects.filter(run=trainer.run, rule="layer")
        assert {lane for f in found for lane in f.lanes} == {"layers.0"}
        assert "layer_grad_norm_bad" in {f.kind for f in found}


@pytest.mark.django_db
class TestBookkeeping:
    def test_the_first_step_of_an_attempt_is_noted(self, trainer: Trainer) -> None:
        trainer.events(*curve(940, 950))
        trainer.events(*curve(930, 935))
        watching.look(trainer.run.pk)
        assert Attempt.objects.get(run=trainer.run).first_step == 930

    def test_nothing_pending_is_looked_at_twice(self, trainer: Trainer) -> None:
        trainer.events(*curve(1, 11))
        assert watching.look(trainer.run.pk) == 10
        assert watching.look(trainer.run.pk) == 0
        assert watching.look_at_all() == 0

    def test_heartbeats_leave_nothing_for_the_worker(self, trainer: Trainer) -> None:
        trainer.events({"type": "heartbeat", "node": "n1", "data": {}})
        assert not Pending.objects.filter(run=trainer.run).exists()


def test_one_worker_at_a_time_looks_at_a_run(committing_trainer: Trainer) -> None:
    trainer = committing_trainer
    trainer.events(*curve(1, 11))
    held, done = threading.Event(), threading.Event()

    def other_worker() -> None:
        with transaction.atomic():
            assert try_watch(trainer.run.pk)
            held.set()
            done.wait(20)
        connection.close()

    thread = threading.Thread(target=other_worker)
    thread.start()
    assert held.wait(10)
    assert watching.look(trainer.run.pk) == 0
    done.set()
    thread.join(10)
    assert watching.look(trainer.run.pk) == 10


def test_looks_at_once_lose_and_double_nothing(committing_trainer: Trainer) -> None:
    trainer = committing_trainer
    stop = threading.Event()

    def keep_looking() -> None:
        while not stop.is_set():
            watching.look(trainer.run.pk)
        connection.close()

    threads = [threading.Thread(target=keep_looking) for _ in range(2)]
    for thread in threads:
        thread.start()
    for event in curve(900, 960):
        trainer.events(event)
    stop.set()
    for thread in threads:
        thread.join(20)
    watching.look(trainer.run.pk)
    assert not Pending.objects.filter(run=trainer.run).exists()
    state = DetectorState.objects.get(run=trainer.run, detector="spike").state
    assert len(state["window"]) == 60
    assert Directive.objects.filter(run=trainer.run).count() == 1
