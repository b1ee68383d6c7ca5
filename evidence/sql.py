"""What Django cannot declare: custody and seals can only grow.

Triggers refuse every change by anybody, the owner included; the application's role has no right to
try. `evidence.checks` looks whether the triggers are there, because a migration check cannot.
"""

from django.db import migrations

APPEND_ONLY = ("evidence_custodyrow", "evidence_seal")
TRIGGERS = ("append_only", "append_only_truncate")  # as runs.sql's andon_make_append_only names them


def _protect(table: str) -> str:
    # Only names of APPEND_ONLY come here, never input.
    return f"""
SELECT andon_make_append_only('{table}');
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'andon_app') THEN
        REVOKE UPDATE, DELETE, TRUNCATE ON {table} FROM andon_app;
    END IF;
END $$;
"""  # noqa: S608


def _unprotect(table: str) -> str:
    return "".join(f"DROP TRIGGER IF EXISTS {trigger} ON {table};" for trigger in TRIGGERS)


OPERATIONS = [migrations.RunSQL(_protect(table), _unprotect(table)) for table in APPEND_ONLY]
