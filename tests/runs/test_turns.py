"""Posts that find their run going bad at the same moment: one opens the incident, the others join it."""

import threading
from typing import Any

from django.db import connection

from incidents import opening
from incidents.models import Incident
from runs import joining, turns
from runs.models import Event, Finding
from tests.runs.conftest import Trainer


def test_those_that_come_while_an_incident_opens_wait_and_join_it(
    committing_trainer: Trainer, monkeypatch: Any
) -> None:
    trainer = committing_trainer
    trainer.step(1, loss=2.0)
    opens, goes_on = threading.Event(), threading.Event()
    honest, together = opening.open_incident, joining._run

    def slow(*args: Any, **kwargs: Any) -> Incident:
        opens.set()
        goes_on.wait(10)
        return honest(*args, **kwargs)

    joined: list[int] = []

    def counted(calls: Any) -> Any:
        joined.append(len(calls))
        return together(calls)

    monkeypatch.setattr(opening, "open_incident", slow)
    monkeypatch.setattr(joining, "_run", counted)
    answers: list[Any] = []

    def post(rank: int) -> None:
        try:
            answers.append(Trainer(trainer.run, trainer.secret).step(2, rank=rank, loss="nan").json())
        finally:
            connection.close()

    first = threading.Thread(target=post, args=(0,))
    first.start()
    assert opens.wait(10)
    others = [threading.Thread(target=post, args=(rank,)) for rank in range(1, 6)]
    for thread in others:
        thread.start()
    others[0].join(0.3)
    assert not answers  # nobody is answered before the directive stands
    goes_on.set()
    for thread in (first, *others):
        thread.join(20)
    assert {answer["directive"]["kind"] for answer in answers} == {"hold"}
    assert sum(joined) == 5
    incident = Incident.objects.get(run=trainer.run)
    findings = Finding.objects.filter(run=trainer.run)
    assert set(findings.values_list("incident", flat=True)) == {str(incident.pk)}
    assert Event.objects.filter(run_id=trainer.run.pk, step=2).count() == 6
    assert not turns._opening


def test_one_that_had_begun_gives_up_what_it_stored_and_comes_again(
    committing_trainer: Trainer, monkeypatch: Any
) -> None:
    trainer = committing_trainer
    trainer.step(1, loss=2.0)
    mine = turns.Turn(trainer.run.pk)
    mine.begin()
    waited: list[int] = []

    def wait(run_id: int) -> None:
        waited.append(run_id)
        if len(waited) == 2:
            mine.end()

    monkeypatch.setattr(turns, "wait", wait)  # as if the other had begun after the first look
    assert trainer.step(2, rank=0, loss="nan").json()["directive"]["kind"] == "hold"
    assert len(waited) == 2
    assert Event.objects.filter(run_id=trainer.run.pk, step=2).count() == 1
    assert not turns._opening


def test_one_that_never_ends_its_turn_does_not_keep_a_post_for_ever(
    committing_trainer: Trainer, monkeypatch: Any
) -> None:
    trainer = committing_trainer
    trainer.step(1, loss=2.0)
    stuck = turns.Turn(trainer.run.pk)
    stuck.begin()
    monkeypatch.setattr(turns, "WAIT_S", 0.05)
    try:
        assert trainer.step(2, rank=0, loss="nan").json()["directive"]["kind"] == "hold"
    finally:
        stuck.end()
