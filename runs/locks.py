"""The lock of a run.

Lock order everywhere: run, incident, dossier, item, chain head.
"""

from django.db import connection

from runs.models import Run


def lock_run(run_id: int) -> Run:
    """Lock the row of run `run_id` until the transaction ends and return it fresh.

    `no_key=True`: a plain FOR UPDATE would block every insert with a foreign key to the run.

    Raises:
        Run.DoesNotExist: there is no such run.
        django.db.transaction.TransactionManagementError: called outside a transaction.
    """
    return Run.objects.select_for_update(no_key=True).get(pk=run_id)


# Advisory locks share one number space: the first key names the use, the second the run.
WATCHING = 0x0A01


def try_watch(run_id: int) -> bool:
    """Take the right to watch run `run_id` until the transaction ends; False when another has it.

    A transaction-level advisory lock, so that it also works through a pooler in transaction mode.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [WATCHING, run_id & 0x7FFFFFFF])
        row = cursor.fetchone()
    return bool(row and row[0])
