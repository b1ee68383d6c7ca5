"""What `manage.py check --database default` looks at beside the migrations."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections

from incidents.sql import APPEND_ONLY, trigger_names


@register(Tags.database)
def append_only_triggers_exist(
    app_configs: Any = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Report triggers of the ledger that are missing or off: a migration check cannot see them."""
    errors: list[CheckMessage] = []
    for alias in databases or []:
        tables = connections[alias].introspection.table_names()
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT c.relname, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid"
                " WHERE t.tgenabled <> 'D' AND c.relname = ANY(%s)",
                [list(APPEND_ONLY)],
            )
            there = set(cursor.fetchall())
        errors += [
            Error(
                f"{table} has no working trigger {name}: its rows could be changed.",
                hint="Restore it with the statements of incidents.sql.",
                id="incidents.E001",
            )
            for table in APPEND_ONLY
            if table in tables
            for name in trigger_names(table)
            if (table, name) not in there
        ]
    return errors
