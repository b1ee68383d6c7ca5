"""What Django cannot declare: ledger rows, approvals and histories of edits can only be added.

Triggers refuse every change by anybody, the owner included; the application's role has no right to
try. `incidents.checks` looks whether the triggers are there, because a migration check cannot.
"""

from django.db import migrations

# Approvals are here too: one that a later hand could edit would prove nothing. So are the edits of what
# people write: a history that can be rewritten is none.
APPEND_ONLY = (
    "incidents_ledgerrow",
    "incidents_approval",
    "incidents_rulejudgement",
    "incidents_boardchange",
    "incidents_postmortemedit",
    "incidents_postmortemversion",
)

_FUNCTION = """
CREATE OR REPLACE FUNCTION incidents_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'insufficient_privilege';
END
$$
"""


# Advisory locks share one number space with `runs.locks`; this key names "the ledger of a run".
LEDGER_LOCK = 0x0A11
# What is read under the lock is read by statements that begin when it is had.
_HEAD = f"""
CREATE OR REPLACE FUNCTION incidents_ledger_head(
    p_run bigint, p_lock integer, p_action text, p_since timestamptz,
    OUT seq integer, OUT digest text, OUT used bigint
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock({LEDGER_LOCK}, p_lock);
    SELECT r.seq, r.digest INTO seq, digest FROM incidents_ledgerrow r
        WHERE r.run_id = p_run ORDER BY r.seq DESC LIMIT 1;
    seq := coalesce(seq, 0);
    digest := coalesce(digest, '');
    SELECT count(*) INTO used FROM incidents_ledgerrow r
        WHERE r.run_id = p_run AND r.action = p_action AND r.at >= p_since AND r.budget IS NOT NULL;
END
$$
"""  # noqa: S608 (our own number)


def trigger_names(table: str) -> tuple[str, str]:
    """Return the names of a table's two triggers: for rows, and for TRUNCATE."""
    return f"{table}_append_only", f"{table}_no_truncate"


def _protect(table: str) -> str:
    rows, truncate = trigger_names(table)
    return f"""
CREATE TRIGGER {rows} BEFORE UPDATE OR DELETE ON {table}
    FOR EACH ROW EXECUTE FUNCTION incidents_refuse_change();
CREATE TRIGGER {truncate} BEFORE TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION incidents_refuse_change();
DO $$ BEGIN
    IF EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'andon_app') THEN
        REVOKE UPDATE, DELETE, TRUNCATE ON {table} FROM andon_app;
    END IF;
END $$
"""  # noqa: S608 - names of our own tables


def _unprotect(table: str) -> str:
    rows, truncate = trigger_names(table)
    return f"DROP TRIGGER IF EXISTS {rows} ON {table}; DROP TRIGGER IF EXISTS {truncate} ON {table}"


OPERATIONS = [
    migrations.RunSQL(_FUNCTION, "DROP FUNCTION IF EXISTS incidents_refuse_change()"),
    migrations.RunSQL(
        _HEAD, "DROP FUNCTION IF EXISTS incidents_ledger_head(bigint, integer, text, timestamptz)"
    ),
    *(migrations.RunSQL(_protect(table), _unprotect(table)) for table in APPEND_ONLY),
]
