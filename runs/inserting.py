"""Rows that are written while a trainer waits for its answer: one statement for all of them.

Django makes a statement for every save, and turns and quotes every value in Python: for the two dozen
items of a freeze plan that takes longer than the database does. Here rows travel as JSON that PostgreSQL
reads, whatever tables they are of. No signal is sent.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import Field, Model

from runs.rows import raw_cursor


def insert(*rows: Model) -> None:
    """Insert `rows` in one statement, and give those without a key theirs.

    Raises:
        ValueError: JSON cannot say a number that a row holds (NaN, infinity).
        django.db.Error: as `save` does.
    """
    groups: dict[tuple[type[Model], bool], list[Model]] = {}
    for row in rows:
        groups.setdefault((type(row), row.pk is not None), []).append(row)
    if not groups:
        return
    parts, texts = [], []
    for (model, keyed), some in groups.items():
        statement, fields = _statement(model, keyed)
        parts.append(statement)
        values = [{field.column: field.pre_save(row, True) for field in fields} for row in some]
        texts.append(json.dumps(values, allow_nan=False, default=_text))
    # Keys come back in the order in which the rows were given.
    _give_keys(groups.values(), parts[0] if len(parts) == 1 else _together(parts), texts)
    for row in rows:
        row._state.adding, row._state.db = False, connection.alias


def reserve(*rows: Model) -> None:
    """Give rows their keys before they are inserted, in one statement, so that other rows can name them."""
    groups: dict[type[Model], list[Model]] = {}
    for row in rows:
        groups.setdefault(type(row), []).append(row)
    series = [_NUMBERS.format(model._meta.db_table, _key(model), len(some)) for model, some in groups.items()]
    _give_keys(groups.values(), " UNION ALL ".join(series), [])


_NUMBERS = "SELECT nextval(pg_get_serial_sequence('{}', '{}')) FROM generate_series(1, {})"


def _give_keys(groups: Iterable[list[Model]], statement: str, texts: list[str]) -> None:
    with raw_cursor() as cursor:
        cursor.execute(statement, texts)
        keys = [key for (key,) in cursor.fetchall()]
    for row, key in zip((row for some in groups for row in some), keys, strict=True):
        row.pk = key


def _together(parts: list[str]) -> str:
    inserts = ", ".join(f"r{number} (key) AS ({part})" for number, part in enumerate(parts))
    keys = " UNION ALL ".join(f"SELECT key FROM r{number}" for number in range(len(parts)))  # noqa: S608
    return f"WITH {inserts} {keys}"


@cache
def _statement(model: type[Model], keyed: bool) -> tuple[str, tuple["Field[Any, Any]", ...]]:
    fields = tuple(field for field in model._meta.concrete_fields if keyed or not field.primary_key)
    names = ", ".join(f'"{field.column}"' for field in fields)
    typed = ", ".join(f'"{field.column}" {field.db_type(connection)}' for field in fields)
    read = f"SELECT {names} FROM jsonb_to_recordset(%s) AS r ({typed})"  # noqa: S608 (our own names)
    return f"INSERT INTO {model._meta.db_table} ({names}) {read} RETURNING {_key(model)}", fields


def _key(model: type[Model]) -> str:
    return str(model._meta.pk.column) if model._meta.pk is not None else "id"


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no place in a row that is sent as JSON")
