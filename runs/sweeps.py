"""Housekeeping of the telemetry tables. Every sweep may run twice and in two places at once."""

from django.db import connection

from runs.sql import RECEIPT_DAYS

DAYS_AHEAD = 7
BATCH = 5_000


def make_partitions(days_ahead: int = DAYS_AHEAD) -> int:
    """Create the daily partitions of events and frames from today on; returns how many were made."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT andon_make_partitions(%s)", [days_ahead])
        return int(cursor.fetchone()[0])


def forget_receipts() -> int:
    """Delete receipts older than 30 days in batches; returns how many went.

    Short transactions by row: receipts are one table, and a post must never wait for this.
    """
    gone = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(
                "DELETE FROM runs_receipt WHERE id IN (SELECT id FROM runs_receipt"
                " WHERE received_at < now() - make_interval(days => %s)"
                " ORDER BY received_at LIMIT %s)",
                [RECEIPT_DAYS, BATCH],
            )
            deleted = int(cursor.rowcount)
        gone += deleted
        if deleted < BATCH:
            return gone
