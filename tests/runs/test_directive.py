"""`GET directive`: signed, at once or after a wait that keeps no connection."""

import threading
import time
from typing import Any

import pytest
from django.db import connection, transaction

from andon.signing import verify_document
from runs import waiting
from runs.directives import set_directive
from runs.keys import trusted_keys
from runs.locks import lock_run
from tests.runs.conftest import Trainer


def _connections() -> set[int]:
    """Who is connected to this database, except the asker (process ids)."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return {pid for (pid,) in cursor.fetchall()}


@pytest.mark.django_db
class TestAtOnce:
    def test_it_is_signed_by_the_servers_key(self, trainer: Trainer) -> None:
        document = trainer.get("directive").json()
        content = verify_document(document, trusted_keys())
        assert (content["kind"], content["seq"], content["run"]) == ("continue", 1, trainer.run.slug)

    def test_the_key_is_published(self, trainer: Trainer) -> None:
        keys = trainer.client.get("/.well-known/andon-keys.json").json()
        assert trainer.get("directive").json()["key_id"] in str(keys)

    def test_another_seq_is_answered_at_once(self, trainer: Trainer) -> None:
        before = time.monotonic()
        assert trainer.get("directive?after=0&wait=20").json()["seq"] == 1
        assert time.monotonic() - before < 1

    def test_a_wrong_signature_is_401_and_covers_the_query(self, trainer: Trainer) -> None:
        answer = trainer.get("directive?wait=0", secret="whsec_" + "A" * 43 + "=")
        assert answer.status_code == 401
        assert answer.json()["field"] == "webhook-signature"
        signed = trainer.headers(b"GET /api/v1/runs/" + trainer.run.slug.encode() + b"/directive?after=1")
        altered = trainer.client.get(f"/api/v1/runs/{trainer.run.slug}/directive?after=2", headers=signed)
        assert altered.status_code == 401

    @pytest.mark.parametrize("query", ["after=x", "wait=-1", "wait=nan", "after=" + "9" * 40])
    def test_a_bad_parameter_is_422_and_named(self, trainer: Trainer, query: str) -> None:
        answer = trainer.get(f"directive?{query}")
        assert answer.status_code == 422
        assert answer.json()["field"] == query.partition("=")[0]


class TestWaiting:
    def test_it_answers_when_the_directive_changes(self, committing_trainer: Trainer) -> None:
        trainer = committing_trainer
        answers: list[Any] = []

        def wait() -> None:
            try:
                before = time.monotonic()
                document = Trainer(trainer.run, trainer.secret).get("directive?after=1&wait=20").json()
                answers.append((document["seq"], time.monotonic() - before))
            finally:
                connection.close()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.6)
        with transaction.atomic():
            set_directive(run=lock_run(trainer.run.pk), kind="hold")
        thread.join(10)
        assert answers[0][0] == 2
        assert 0.5 < answers[0][1] < 3

    def test_it_keeps_no_connection_while_it_waits(self, committing_trainer: Trainer) -> None:
        trainer = committing_trainer
        others = _connections()  # of tests before this one, on their way out
        open_ones: list[bool] = []
        stop = threading.Event()

        def wait() -> None:
            try:
                Trainer(trainer.run, trainer.secret).get("directive?after=1&wait=2")
            finally:
                connection.close()
                stop.set()

        thread = threading.Thread(target=wait)
        thread.start()
        while not stop.wait(0.05):
            open_ones.append(bool(_connections() - others))
        thread.join(10)
        assert len(open_ones) > 20
        assert sum(open_ones) < len(open_ones) / 3

    def test_beyond_a_quarter_of_the_threads_it_says_come_back(
        self, committing_trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = threading.BoundedSemaphore(1)
        full.acquire()
        monkeypatch.setattr(waiting, "_waiting", full)
        before = time.monotonic()
        answer = committing_trainer.get("directive?after=1&wait=20")
        assert answer["Retry-After"] == "2"
        assert answer.json()["seq"] == 1
        assert time.monotonic() - before < 1
