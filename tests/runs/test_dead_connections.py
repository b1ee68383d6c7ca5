"""A connection that dies costs no post: it is answered later, never refused for good."""

import threading
import time
from typing import Any

import psycopg
from django.db import connection

from config.postgresql.base import DatabaseWrapper, check
from runs.models import Receipt
from tests.runs.conftest import Trainer

_WAITING = """
SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%andon_take%'
"""


def outside() -> psycopg.Connection[Any]:
    """Return a connection of our own to the test's database."""
    given = connection.get_connection_params()
    given = {name: given[name] for name in ("dbname", "user", "password", "host", "port") if given.get(name)}
    return psycopg.connect(**given, autocommit=True)


def backend_pid(database: DatabaseWrapper) -> int:
    with database.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def end_all_others(by: psycopg.Connection[Any]) -> None:
    """End them and wait until they are gone: a signal sent is not yet a socket closed."""
    by.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
    )


def test_a_pooled_connection_that_was_ended_is_replaced(committing_trainer: Trainer) -> None:
    connection.close()
    pool = {"min_size": 1, "max_size": 1, "timeout": 10}
    options = connection.settings_dict["OPTIONS"] | {"pool": pool}
    pooled = DatabaseWrapper(
        connection.settings_dict | {"OPTIONS": options, "CONN_HEALTH_CHECKS": True}, alias="default"
    )
    try:
        first = backend_pid(pooled)
        pooled.close()  # back into the pool
        assert backend_pid(pooled) == first
        pooled.close()
        with outside() as other:
            end_all_others(other)
        assert backend_pid(pooled) != first
    finally:
        pooled.close()
        pooled.close_pool()


def test_the_socket_says_that_the_server_ended_it(committing_trainer: Trainer) -> None:
    with outside() as one, outside() as other:
        check(one)
        other.execute("SELECT pg_terminate_backend(%s)", [one.info.backend_pid])
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                check(one)
            except psycopg.OperationalError:
                return
        raise AssertionError("nobody noticed")


def test_one_that_dies_under_the_statement_is_answered_later(committing_trainer: Trainer) -> None:
    """Not 422: the body was fine, and the sender must keep it."""
    assert committing_trainer.step(1, loss=2.0).status_code == 202
    connection.close()
    answers: list[Any] = []

    def post() -> None:
        try:
            answers.append(
                committing_trainer.events(
                    {"type": "step", "step": 2, "data": {"loss": 2.0}}, webhook_id="under-way"
                )
            )
        finally:
            connection.close()

    with outside() as holder, outside() as other:
        with holder.transaction():
            holder.execute("LOCK TABLE runs_receipt IN ACCESS EXCLUSIVE MODE")
            thread = threading.Thread(target=post)
            thread.start()
            until = time.monotonic() + 10
            while not (rows := other.execute(_WAITING).fetchall()):
                assert time.monotonic() < until, "the post never waited for the table"
            for (pid,) in rows:
                other.execute("SELECT pg_terminate_backend(%s)", [pid])
            thread.join(10)
        assert [answer.status_code for answer in answers] == [503]
        assert answers[0].headers["Retry-After"]
    assert not Receipt.objects.filter(webhook_id="under-way").exists()
    post()
    assert answers[1].status_code == 202
