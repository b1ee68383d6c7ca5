"""webhook-id is the only idempotency key."""

import json
import threading
from typing import Any

import pytest
from django.db import connection, transaction

from runs.models import Event, Receipt, UnreadBody
from runs.rows import Post, insert_receipt
from tests.runs.conftest import Trainer

STEP = {"type": "step", "step": 7, "data": {"loss": 2.5}}


@pytest.mark.django_db
def test_a_repeat_gets_the_first_counts_and_stores_nothing(trainer: Trainer) -> None:
    body = json.dumps([STEP, {"type": "step", "step": -2}]).encode()
    first = trainer.post(body, webhook_id="msg_1").json()
    second = trainer.post(body, webhook_id="msg_1").json()
    assert (first["duplicate"], second["duplicate"]) == (False, True)
    assert (second["accepted"], second["refused"]) == (first["accepted"], first["refused"])
    assert Event.objects.filter(run_id=trainer.run.pk).count() == 1


@pytest.mark.django_db
def test_a_repeat_gets_the_directive_of_now(trainer: Trainer) -> None:
    trainer.events(STEP, webhook_id="msg_1")
    trainer.step(8, rank=1, loss=float("nan"))
    repeat = trainer.events(STEP, webhook_id="msg_1").json()
    assert repeat["duplicate"]
    assert repeat["directive"]["kind"] == "hold"


@pytest.mark.django_db
@pytest.mark.parametrize("other", [b'{"type": "step", "step": 8}', b"[[", b""])
def test_the_same_id_with_another_body_is_409_whatever_it_holds(trainer: Trainer, other: bytes) -> None:
    trainer.events(STEP, webhook_id="msg_1")
    answer = trainer.post(other, webhook_id="msg_1")
    assert answer.status_code == 409
    assert answer.json()["field"] == "webhook-id"
    kept = UnreadBody.objects.get(run=trainer.run)
    assert (kept.status, bytes(kept.body)) == (409, other)
    assert Event.objects.filter(run_id=trainer.run.pk).count() == 1


@pytest.mark.django_db
def test_an_id_belongs_to_its_run(trainer: Trainer) -> None:
    from tests.runs.conftest import new_trainer

    other = new_trainer()
    assert not trainer.events(STEP, webhook_id="msg_1").json()["duplicate"]
    assert not other.events(STEP, webhook_id="msg_1").json()["duplicate"]


@pytest.mark.django_db
def test_a_repeated_nan_opens_nothing_twice(trainer: Trainer) -> None:
    from runs.models import Directive, Finding

    bad = {"type": "step", "step": 9, "rank": 2, "data": {"loss": "nan"}}
    trainer.events(bad, webhook_id="msg_1")
    trainer.events(bad, webhook_id="msg_1")
    assert Finding.objects.filter(run=trainer.run).count() == 1
    assert Directive.objects.filter(run=trainer.run).count() == 2


def test_two_at_once_are_one_post_and_its_duplicate(committing_trainer: Trainer) -> None:
    trainer = committing_trainer
    trainer.step(1, loss=2.0)  # opens the attempt
    answers: list[Any] = []

    def send(event: dict[str, Any]) -> None:
        try:
            answers.append(Trainer(trainer.run, trainer.secret).events(event, webhook_id="msg_twice").json())
        finally:
            connection.close()

    for event in (STEP, {"type": "step", "step": 9, "rank": 0, "data": {"loss": "nan"}}):
        answers.clear()
        Receipt.objects.filter(webhook_id="msg_twice").count()
        threads = [threading.Thread(target=send, args=(event,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(answer["duplicate"] for answer in answers) == [False, True, True, True]
        trainer = Trainer(*_fresh())
    assert Receipt.objects.filter(webhook_id="msg_twice").count() == 2


def _fresh() -> tuple[Any, str]:
    from tests.runs.conftest import new_trainer

    made = new_trainer()
    made.step(1, loss=2.0)
    return made.run, made.secret


def test_the_second_waits_for_the_first_and_takes_over_when_it_is_rolled_back(
    committing_trainer: Trainer,
) -> None:
    trainer = committing_trainer
    trainer.step(1, loss=2.0)
    answer: list[Any] = []

    def send() -> None:
        try:
            answer.append(Trainer(trainer.run, trainer.secret).events(STEP, webhook_id="msg_w").json())
        finally:
            connection.close()

    from django.utils import timezone

    post = Post(trainer.run.pk, "msg_w", b"x" * 32, timezone.now(), 0.0, "", "", b"")
    thread = threading.Thread(target=send)
    with transaction.atomic():
        assert insert_receipt(post, {})
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()  # it waits for this transaction
        transaction.set_rollback(True)
    thread.join(30)
    assert answer[0]["accepted"] == 1
    assert not answer[0]["duplicate"]
