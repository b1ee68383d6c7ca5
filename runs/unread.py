"""Bodies with a valid signature that could not be read: kept raw, counted, shown with what was answered."""

import logging
from collections.abc import Mapping
from datetime import datetime

import psycopg
from django.db import connection
from psycopg.types.json import Jsonb

from runs.problems import Problem

log = logging.getLogger(__name__)

KEEP_BYTES = 100_000_000  # per run; beyond it bodies are counted and no longer kept


def keep_unread(
    *,
    run_id: int,
    webhook_id: str,
    received_at: datetime,
    content_type: str,
    encoding: str,
    status: int,
    problem: Mapping[str, object],
    body: bytes,
) -> None:
    """Keep one body. Runs in the caller's transaction, or in its own when there is none."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO runs_runprogress (run_id, last, nodes, not_watched_why, unread_bodies, unread_bytes)"
            " VALUES (%s, '{}', '{}', '', 1, %s) ON CONFLICT (run_id) DO UPDATE SET"
            " unread_bodies = runs_runprogress.unread_bodies + 1,"
            " unread_bytes = runs_runprogress.unread_bytes + EXCLUDED.unread_bytes RETURNING unread_bytes",
            [run_id, len(body)],
        )
        if cursor.fetchone()[0] > KEEP_BYTES:
            log.warning("run %s: more than %s bytes unread, this body is only counted", run_id, KEEP_BYTES)
            return
    with psycopg.Cursor(connection.connection) as raw:
        raw.execute(
            "INSERT INTO runs_unreadbody (run_id, webhook_id, received_at, content_type, encoding, status,"
            " problem, body, bytes_total) VALUES (%s, %s, %s, %s, %s, %s, %s, %b, %s)",
            (
                run_id,
                webhook_id[:200],
                received_at,
                _printable(content_type, 200),
                _printable(encoding, 40),
                status,
                Jsonb(dict(problem)),
                body,
                len(body),
            ),
        )


def keep_refused(
    problem: Problem,
    *,
    run_id: int,
    webhook_id: str,
    received_at: datetime,
    meta: Mapping[str, str],
    body: bytes,
) -> None:
    """Keep a body that was refused with `problem`; failing to keep it is logged, not raised."""
    try:
        keep_unread(
            run_id=run_id,
            webhook_id=webhook_id,
            received_at=received_at,
            content_type=meta.get("CONTENT_TYPE", ""),
            encoding=meta.get("HTTP_CONTENT_ENCODING", ""),
            status=problem.status,
            problem=problem.document(),
            body=body,
        )
    except Exception:
        log.exception("run %s: a refused body could not be kept", run_id)


def _printable(text: str, length: int) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii").replace("\0", "")[:length]
