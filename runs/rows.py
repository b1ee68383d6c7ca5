"""Statements of the ingest transaction that every post shares."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from django.db import connection
from psycopg.types.json import Jsonb


@dataclass(frozen=True, slots=True)
class Post:
    """One signed post as far as it is known before its body is decoded.

    `offset_s` is the server's clock minus the client's, as the client measured it.
    """

    run_id: int
    webhook_id: str
    sha256: bytes
    received_at: datetime
    offset_s: float
    content_type: str
    encoding: str
    body: bytes  # as received


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of an id that was accepted before."""

    sha256: bytes
    answer: dict[str, object]


@contextmanager
def raw_cursor() -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
    """Give a cursor that sends parameters apart from the statement (`%b`: in binary form).

    Django's own cursor writes values into the statement, which for bodies of megabytes costs three
    times as much.

    Raises:
        django.db.Error: as Django's own cursor does; what is not one would be taken for our mistake.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        yield cursor


def insert_receipt(post: Post, answer: dict[str, object]) -> bool:
    """Insert the receipt of a post; False when its id was taken before.

    A second post with the same id waits here until the first commits or rolls back.
    """
    with raw_cursor() as cursor:
        cursor.execute(
            "INSERT INTO runs_receipt (run_id, webhook_id, body_sha256, answer, received_at)"
            " VALUES (%s, %s, %b, %s, %s) ON CONFLICT (run_id, webhook_id) DO NOTHING",
            (post.run_id, post.webhook_id, post.sha256, Jsonb(answer), post.received_at),
        )
        return cursor.rowcount == 1


def find_receipt(run_id: int, webhook_id: str) -> Receipt | None:
    """Return the receipt of an id, None when it was never accepted."""
    with raw_cursor() as cursor:
        cursor.execute(
            "SELECT body_sha256, answer::text FROM runs_receipt WHERE run_id = %s AND webhook_id = %s",
            (run_id, webhook_id),
        )
        row = cursor.fetchone()
    return None if row is None else Receipt(bytes(row[0]), json.loads(row[1]))


def directive_text(run_id: int) -> str | None:
    """Return the signed document in force as JSON text, None when the run has none."""
    with raw_cursor() as cursor:
        cursor.execute(
            "SELECT document::text FROM runs_directive WHERE run_id = %s ORDER BY seq DESC LIMIT 1",
            (run_id,),
        )
        row = cursor.fetchone()
    return None if row is None else str(row[0])
