"""Many nodes post the same NaN at once: one incident, one freeze plan, every reply says hold."""

import threading
from typing import Any

from django.db import connection

from evidence.models import Dossier
from incidents.models import Incident
from runs.models import Directive, Finding, FirstBad
from tests.runs.conftest import Trainer, new_trainer, rank_frame

NODES, THREADS = 96, 8


def storm(trainer: Trainer, send: Any) -> list[Any]:
    """Post from every node on a few threads at once; returns all answers."""
    answers: list[Any] = []
    waiting = iter(range(NODES))
    lock, start = threading.Lock(), threading.Barrier(THREADS)

    def post() -> None:
        mine = Trainer(trainer.run, trainer.secret)
        start.wait(10)
        try:
            while True:
                with lock:
                    node = next(waiting, None)
                if node is None:
                    return
                answer = send(mine, node)
                with lock:
                    answers.append(answer)
        finally:
            connection.close()

    threads = [threading.Thread(target=post) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def the_same_nan(trainer: Trainer, node: int) -> Any:
    local = {"type": "step", "step": 18_004, "rank": node * 8, "node": f"n{node}", "data": {"loss": "nan"}}
    reduced = {"type": "step", "step": 18_004, "node": f"n{node}", "data": {"grad_norm": "nan"}}
    return trainer.events(local, reduced)


def check(trainer: Trainer, answers: list[Any]) -> None:
    assert [answer.status_code for answer in answers] == [202] * NODES
    directives = {(a.json()["directive"]["kind"], a.json()["directive"]["incident"]) for a in answers}
    incident = Incident.objects.get(run=trainer.run)
    assert directives == {("hold", str(incident.pk))}
    assert Dossier.objects.filter(run=trainer.run).count() == 1
    assert Directive.objects.filter(run=trainer.run).count() == 2
    assert FirstBad.objects.filter(run=trainer.run, view="local").count() == NODES
    assert FirstBad.objects.filter(run=trainer.run, view="reduced").count() == 1
    joined = Finding.objects.filter(run=trainer.run).values_list("incident", flat=True)
    assert set(joined) == {str(incident.pk)}


def test_events(committing_trainer: Trainer) -> None:
    committing_trainer.step(18_003, loss=2.0)
    check(committing_trainer, storm(committing_trainer, the_same_nan))


def test_events_that_also_open_the_attempt(committing_trainer: Trainer) -> None:
    check(committing_trainer, storm(committing_trainer, the_same_nan))


def test_through_a_pooler_in_transaction_mode(through_pgbouncer: object) -> None:
    trainer = new_trainer()
    trainer.step(18_003, loss=2.0)
    trainer.frame(rank_frame(steps=range(1), ranks=range(8)))
    check(trainer, storm(trainer, the_same_nan))
    from runs import watching

    watching.look(trainer.run.pk)
    assert not trainer.run.pending.exists()


def test_frames_of_the_same_lanes_do_not_deadlock(committing_trainer: Trainer) -> None:
    import numpy as np

    def send(trainer: Trainer, node: int) -> Any:
        step = 100 - node % 50  # each is earlier than some that came before: rows move
        loss = np.full((1, 64), np.nan, dtype=np.float32)
        return trainer.frame(rank_frame(steps=range(step, step + 1), ranks=range(64), loss=loss))

    committing_trainer.step(1, loss=2.0)
    answers = storm(committing_trainer, send)
    assert {answer.status_code for answer in answers} == {202}
    assert {answer.json()["directive"]["kind"] for answer in answers} == {"hold"}
    rows = FirstBad.objects.filter(run=committing_trainer.run)
    assert set(rows.values_list("step", flat=True)) == {51}
    assert rows.count() == 64
