"""Bad posts of a held run are stored several to a transaction, and none takes another with it."""

import threading
from typing import Any

from django.db import connection

from runs import joining
from runs.models import Event, Finding, FirstBad, Receipt
from tests.runs.conftest import Trainer


def held(trainer: Trainer) -> None:
    trainer.step(1, loss=2.0)
    assert trainer.step(2, rank=0, loss="nan").json()["directive"]["kind"] == "hold"


def at_once(trainer: Trainer, posts: list[dict[str, Any]]) -> list[Any]:
    """Post all at once while the first transaction is kept waiting, so that the others queue behind it."""
    answers: list[Any] = [None] * len(posts)

    def post(n: int) -> None:
        try:
            answers[n] = Trainer(trainer.run, trainer.secret).post(**posts[n])
        finally:
            connection.close()

    threads = [threading.Thread(target=post, args=(n,)) for n in range(len(posts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def nan(rank: int, webhook_id: str) -> dict[str, Any]:
    body = b'{"type": "step", "step": 3, "rank": %d, "data": {"loss": "nan"}}' % rank
    return {"body": body, "webhook_id": webhook_id}


class Counted:
    """Counts how many calls each transaction had; the first one waits until all others stand in line."""

    def __init__(self, others: int) -> None:
        self.sizes: list[int] = []
        self._others = others
        self._run = joining._run

    def __call__(self, calls: Any) -> Any:
        first = not self.sizes
        self.sizes.append(len(calls))
        until = threading.Event()
        while first and len(joining._queue._waiting) < self._others:
            until.wait(0.01)
        return self._run(calls)


def test_those_that_wait_are_stored_together(committing_trainer: Trainer, monkeypatch: Any) -> None:
    held(committing_trainer)
    counted = Counted(others=5)
    monkeypatch.setattr(joining, "_run", counted)
    answers = at_once(committing_trainer, [nan(rank, f"together-{rank}") for rank in range(1, 7)])
    assert [answer.status_code for answer in answers] == [202] * 6
    assert counted.sizes == [1, 5]
    assert Receipt.objects.filter(webhook_id__startswith="together-").count() == 6
    assert Event.objects.filter(run_id=committing_trainer.run.pk, step=3).count() == 6
    assert Finding.objects.filter(run=committing_trainer.run, step=3).exclude(incident="").count() == 6


def test_the_same_id_twice_in_one_transaction_counts_once(
    committing_trainer: Trainer, monkeypatch: Any
) -> None:
    held(committing_trainer)
    monkeypatch.setattr(joining, "_run", Counted(others=3))
    ids = ["first", "same", "same", "other"]
    answers = at_once(committing_trainer, [nan(1, name) for name in ids])
    assert [answer.status_code for answer in answers] == [202] * 4
    assert sum(answer.json()["duplicate"] for answer in answers) == 1
    assert Event.objects.filter(run_id=committing_trainer.run.pk, step=3).count() == 3


def test_a_repeat_among_others_adds_nothing_of_its_own(committing_trainer: Trainer, monkeypatch: Any) -> None:
    held(committing_trainer)
    assert committing_trainer.post(**nan(1, "repeat")).status_code == 202
    monkeypatch.setattr(joining, "_run", Counted(others=3))
    posts = [nan(2, "first"), nan(3, "new"), nan(1, "repeat"), nan(4, "newer")]
    answers = at_once(committing_trainer, posts)
    assert [answer.json()["duplicate"] for answer in answers] == [False, False, True, False]
    stored = Event.objects.filter(run_id=committing_trainer.run.pk, step=3)
    assert sorted(stored.values_list("rank", flat=True)) == [1, 2, 3, 4]
    assert Finding.objects.filter(run=committing_trainer.run, step=3).count() == 4
    assert FirstBad.objects.filter(run=committing_trainer.run, step=3).count() == 4


def test_each_row_is_of_its_own_post(committing_trainer: Trainer, monkeypatch: Any) -> None:
    held(committing_trainer)
    monkeypatch.setattr(joining, "_run", Counted(others=3))
    later = b'{"type": "step", "step": 9, "rank": 5, "data": {"loss": "nan"}}'
    posts = [nan(1, "first"), {"body": later, "webhook_id": "late"}, nan(5, "early"), nan(6, "six")]
    at_once(committing_trainer, posts)
    received = dict(
        Receipt.objects.filter(run_id=committing_trainer.run.pk).values_list("webhook_id", "received_at")
    )
    events = Event.objects.filter(run_id=committing_trainer.run.pk, step__gte=3)
    assert {one.webhook_id for one in events} == {"first", "late", "early", "six"}
    assert all(one.received_at == received[one.webhook_id] for one in events)
    # One lane in two posts of one transaction: the earlier cell stands, whichever came first.
    cell = FirstBad.objects.get(run=committing_trainer.run, rank=-1, lane="5")
    assert (cell.step, cell.received_at) == (3, received["early"])


def test_one_that_fails_takes_no_other_with_it(committing_trainer: Trainer, monkeypatch: Any) -> None:
    held(committing_trainer)
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE runs_receipt ADD CONSTRAINT refuses CHECK (webhook_id <> 'poison') NOT VALID"
        )
    try:
        monkeypatch.setattr(joining, "_run", Counted(others=4))
        ids = ["first", "a", "poison", "b", "c"]
        answers = at_once(committing_trainer, [nan(rank, name) for rank, name in enumerate(ids, 1)])
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE runs_receipt DROP CONSTRAINT refuses")
    status = dict(zip(ids, (answer.status_code for answer in answers), strict=True))
    assert status.pop("poison") != 202
    assert status == {"first": 202, "a": 202, "b": 202, "c": 202}
    assert Event.objects.filter(run_id=committing_trainer.run.pk, step=3).count() == 4


def test_a_guess_that_is_wrong_takes_the_long_way(committing_trainer: Trainer) -> None:
    from runs.directives import set_directive

    held(committing_trainer)
    assert joining.is_held(committing_trainer.run.pk)
    set_directive(run=committing_trainer.run, kind="continue", why="test")  # by another process
    answer = committing_trainer.step(9, rank=0, loss="nan")
    assert answer.json()["directive"]["kind"] == "hold"
    assert Event.objects.filter(run_id=committing_trainer.run.pk, step=9).count() == 1
