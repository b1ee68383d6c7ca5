"""Django checks that the hand-written SQL objects exist."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections

from runs.sql import OBJECTS

_FIND = {
    "function": "SELECT EXISTS (SELECT FROM pg_proc WHERE proname = %s AND %s = '')",
    "partition": "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = to_regclass(%s)"
    " AND inhparent = to_regclass(%s))",
    "trigger": "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgname = %s AND tgrelid = to_regclass(%s)"
    " AND tgenabled <> 'D')",
}


@register(Tags.database)
def sql_objects_exist(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Report every trigger, function and partition of `runs.sql` that is missing or switched off."""
    errors: list[CheckMessage] = []
    for alias in databases or ():
        connection = connections[alias]
        if "runs_event" not in connection.introspection.table_names():
            continue  # not migrated yet: `migrate` itself runs this check first
        with connection.cursor() as cursor:
            for kind, name, table in OBJECTS:
                cursor.execute(_FIND[kind], [name, table])
                row = cursor.fetchone()
                if not row or not row[0]:
                    where = f" on {table}" if table else ""
                    errors.append(
                        Error(
                            f"{kind} {name}{where} is missing or disabled in database {alias!r}",
                            hint="Run `manage.py migrate`; if dropped by hand, restore it from runs/sql.py.",
                            id="runs.E001",
                        )
                    )
    return errors
