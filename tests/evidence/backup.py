"""The database saved as it is, and brought back: what a restore from a backup does to rows and sequences."""

from dataclasses import dataclass

from django.db import connection, transaction

_TABLES = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY 1
"""
_SEQUENCES = "SELECT sequencename::text, last_value FROM pg_sequences WHERE schemaname = 'public'"
_TRIGGERS = """
SELECT tgrelid::regclass::text, quote_ident(tgname) FROM pg_trigger
WHERE NOT tgisinternal AND tgparentid = 0 AND tgenabled <> 'D'
"""


@dataclass(frozen=True)
class Backup:
    """Every row of every table, and where each sequence stood."""

    tables: dict[str, bytes]
    sequences: list[tuple[str, int | None]]


def save() -> Backup:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_TABLES)
        tables = {}
        for (table,) in cursor.fetchall():
            with cursor.copy(f"COPY (SELECT * FROM {table}) TO STDOUT") as rows:
                tables[table] = b"".join(bytes(part) for part in rows)
        cursor.execute(_SEQUENCES)
        return Backup(tables, cursor.fetchall())


def restore(backup: Backup) -> None:
    """Bring it back, past the triggers: a restore loads tables before it makes their triggers."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '20s'")
        cursor.execute(_TRIGGERS)
        triggers = cursor.fetchall()
        for table, name in triggers:
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER {name}")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
        for table in backup.tables:
            cursor.execute(f"DELETE FROM {table}")
        for table, rows in backup.tables.items():
            with cursor.copy(f"COPY {table} FROM STDIN") as copy:
                copy.write(rows)
        for name, last in backup.sequences:
            cursor.execute("SELECT setval(%s, %s, %s)", [name, last or 1, last is not None])
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        for table, name in triggers:
            cursor.execute(f"ALTER TABLE {table} ENABLE TRIGGER {name}")
