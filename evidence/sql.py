"""What Django cannot declare: custody and seals can only grow, and no date of retention moves earlier.

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


# Whoever writes it, by whatever way: an item is never kept for less long than was promised.
NEVER_EARLIER = "never_earlier"
_NEVER_EARLIER = f"""
CREATE FUNCTION andon_refuse_earlier_date() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.retain_until IS NOT NULL AND (NEW.retain_until IS NULL OR NEW.retain_until < OLD.retain_until) THEN
        RAISE EXCEPTION 'item % is kept until %: an earlier date is refused', OLD.id, OLD.retain_until
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER {NEVER_EARLIER} BEFORE UPDATE OF retain_until ON evidence_item
    FOR EACH ROW EXECUTE FUNCTION andon_refuse_earlier_date();
"""
_EARLIER_AGAIN = f"""
DROP TRIGGER IF EXISTS {NEVER_EARLIER} ON evidence_item;
DROP FUNCTION IF EXISTS andon_refuse_earlier_date();
"""
# What must be there, by table; `evidence.checks` looks.
EXPECTED = dict.fromkeys(APPEND_ONLY, TRIGGERS) | {"evidence_item": (NEVER_EARLIER,)}

OPERATIONS = [migrations.RunSQL(_protect(table), _unprotect(table)) for table in APPEND_ONLY]
OPERATIONS.append(migrations.RunSQL(_NEVER_EARLIER, _EARLIER_AGAIN))
