"""Django checks that the hand-written SQL of `evidence.sql` exists."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.db import connections

from evidence.sql import EXPECTED


@register(Tags.database)
def triggers_exist(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Report every trigger of the vault's tables that is missing or switched off."""
    errors: list[CheckMessage] = []
    for alias in databases or ():
        connection = connections[alias]
        tables = connection.introspection.table_names()
        with connection.cursor() as cursor:
            for table, expected in EXPECTED.items():
                if table not in tables:
                    continue
                cursor.execute(
                    "SELECT tgname FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND tgenabled <> 'D'",
                    [table],
                )
                there = {row[0] for row in cursor.fetchall()}
                errors += [
                    Error(
                        f"trigger {trigger} on {table} is missing or disabled in database {alias!r}",
                        hint="Run `manage.py migrate`; if dropped by hand, restore it from evidence/sql.py.",
                        id="evidence.E001",
                    )
                    for trigger in expected
                    if trigger not in there
                ]
    return errors
