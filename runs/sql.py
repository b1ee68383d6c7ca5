"""What Django cannot declare: partitions, append-only triggers, grants, and the one-statement ingest.

`OPERATIONS` is appended to the initial migration; `OBJECTS` names what must exist afterwards and is
checked by `runs.checks`, because `makemigrations --check` cannot see any of it.
"""

from django.db import migrations

from runs import sql_ingest

PARTITIONED = ("runs_event", "runs_frame")
# Rows of these are never changed. Findings may only be handed to an incident, receipts may only
# be forgotten once they are old.
APPEND_ONLY = (
    "runs_event",
    "runs_frame",
    "runs_directive",
    "runs_directiveack",
    "runs_policyversion",
    "runs_serverkey",
    "runs_accountevent",
)
RECEIPT_DAYS = 30

_TABLES = """
CREATE SEQUENCE runs_event_id_seq AS bigint;
CREATE TABLE runs_event (
    id bigint NOT NULL DEFAULT nextval('runs_event_id_seq'),
    received_at timestamptz NOT NULL,
    run_id bigint NOT NULL,
    attempt integer NOT NULL,
    type text NOT NULL,
    step bigint,
    rank integer,
    node text NOT NULL DEFAULT '',
    occurred_at timestamptz NOT NULL,
    backfill boolean NOT NULL DEFAULT false,
    view varchar(8) NOT NULL DEFAULT '',
    ranks jsonb,
    flags jsonb NOT NULL DEFAULT '{}',
    data jsonb NOT NULL DEFAULT '{}',
    webhook_id text NOT NULL,
    index integer NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, id, received_at)
) PARTITION BY RANGE (received_at);
ALTER SEQUENCE runs_event_id_seq OWNED BY runs_event.id;
-- Serves series (one type, a step range) and "newest of a type".
CREATE INDEX event_by_step ON runs_event (run_id, attempt, type, step);

CREATE SEQUENCE runs_frame_id_seq AS bigint;
CREATE TABLE runs_frame (
    id bigint NOT NULL DEFAULT nextval('runs_frame_id_seq'),
    received_at timestamptz NOT NULL,
    run_id bigint NOT NULL,
    attempt integer NOT NULL,
    stream text NOT NULL,
    node text NOT NULL DEFAULT '',
    content_type text NOT NULL,
    body bytea NOT NULL,
    step_first bigint NOT NULL,
    step_last bigint NOT NULL,
    lane_first integer,
    lane_last integer,
    lanes jsonb,
    rows integer NOT NULL,
    metrics jsonb NOT NULL DEFAULT '[]',
    state_plane bytea,
    bad_cells integer NOT NULL DEFAULT 0,
    skips boolean NOT NULL DEFAULT false,
    backfill boolean NOT NULL DEFAULT false,
    webhook_id text NOT NULL,
    PRIMARY KEY (run_id, id, received_at)
) PARTITION BY RANGE (received_at);
ALTER SEQUENCE runs_frame_id_seq OWNED BY runs_frame.id;
-- Bodies are dense numbers or compressed already: pglz would spend time to gain nothing.
ALTER TABLE runs_frame ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE runs_frame ALTER COLUMN state_plane SET STORAGE EXTERNAL;
CREATE INDEX frame_by_step ON runs_frame (run_id, attempt, stream, step_first, step_last);

-- Blocks are compressed already, and a tile reads one form of three: none lies in the row.
ALTER TABLE runs_curveblock ALTER COLUMN columns SET STORAGE EXTERNAL;
ALTER TABLE runs_gridblock ALTER COLUMN cells SET STORAGE EXTERNAL, ALTER COLUMN by_8 SET STORAGE EXTERNAL,
    ALTER COLUMN by_64 SET STORAGE EXTERNAL;

-- A day that nobody prepared never refuses a post.
CREATE TABLE runs_event_default PARTITION OF runs_event DEFAULT;
CREATE TABLE runs_frame_default PARTITION OF runs_frame DEFAULT;
"""

_TRIGGERS = f"""
CREATE FUNCTION andon_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION andon_refuse_finding_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF (to_jsonb(NEW) - 'needs_incident' - 'incident') = (to_jsonb(OLD) - 'needs_incident' - 'incident')
        THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'a finding is never changed, only handed to an incident: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION andon_refuse_receipt_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF OLD.received_at < now() - interval '{RECEIPT_DAYS} days' THEN
            RETURN OLD;
        END IF;
    END IF;
    RAISE EXCEPTION 'a receipt is kept for {RECEIPT_DAYS} days: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION andon_make_append_only(name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON %I'
        ' FOR EACH ROW EXECUTE FUNCTION andon_refuse_change()', name);
    EXECUTE format('CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON %I'
        ' FOR EACH STATEMENT EXECUTE FUNCTION andon_refuse_change()', name);
END $$;
REVOKE EXECUTE ON FUNCTION andon_make_append_only(text) FROM PUBLIC;

{"".join(f"SELECT andon_make_append_only('{table}');" for table in APPEND_ONLY)}
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON runs_event_default
    FOR EACH STATEMENT EXECUTE FUNCTION andon_refuse_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON runs_frame_default
    FOR EACH STATEMENT EXECUTE FUNCTION andon_refuse_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON runs_finding
    FOR EACH ROW EXECUTE FUNCTION andon_refuse_finding_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON runs_finding
    FOR EACH STATEMENT EXECUTE FUNCTION andon_refuse_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON runs_receipt
    FOR EACH ROW EXECUTE FUNCTION andon_refuse_receipt_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON runs_receipt
    FOR EACH STATEMENT EXECUTE FUNCTION andon_refuse_change();
"""

# SECURITY DEFINER: the application's role owns nothing, so it cannot create a partition itself.
# A day whose rows already lie in the default partition stays there: moving them would block posts.
_PARTITIONS = """
CREATE FUNCTION andon_make_partitions(days_ahead integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    parent text;
    child text;
    today date := (now() AT TIME ZONE 'UTC')::date;
    day date;
    in_default boolean;
    made integer := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(2562) THEN
        RETURN 0;
    END IF;
    PERFORM set_config('lock_timeout', '2s', true);
    FOREACH parent IN ARRAY ARRAY['runs_event', 'runs_frame'] LOOP
        FOR offset_days IN 0 .. least(days_ahead, 60) LOOP
            day := today + offset_days;
            child := format('%s_%s', parent, to_char(day, 'YYYYMMDD'));
            CONTINUE WHEN to_regclass(child) IS NOT NULL;
            EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE received_at >= %L AND received_at < %L)',
                parent || '_default', day::timestamptz, (day + 1)::timestamptz) INTO in_default;
            CONTINUE WHEN in_default;
            EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                child, parent, day::timestamptz, (day + 1)::timestamptz);
            EXECUTE format('CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON %I'
                ' FOR EACH STATEMENT EXECUTE FUNCTION andon_refuse_change()', child);
            made := made + 1;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;
SELECT andon_make_partitions(7);
"""

# `andon_app` is made by whoever makes the database (compose, `up`); a test database may lack it.
# Default privileges cover the tables of later migrations; their append-only tables revoke again.
_GRANTS = f"""
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'andon_app') THEN
        GRANT USAGE ON SCHEMA public TO andon_app;
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO andon_app;
        GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO andon_app;
        ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO andon_app;
        ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT USAGE, SELECT ON SEQUENCES TO andon_app;
        REVOKE UPDATE, DELETE, TRUNCATE ON {", ".join(APPEND_ONLY)},
            runs_event_default, runs_frame_default FROM andon_app;
        REVOKE UPDATE, TRUNCATE ON runs_receipt FROM andon_app;
        REVOKE DELETE, UPDATE, TRUNCATE ON runs_finding FROM andon_app;
        GRANT UPDATE (needs_incident, incident) ON runs_finding TO andon_app;
        REVOKE INSERT, UPDATE, DELETE ON django_migrations FROM andon_app;
    END IF;
END $$;
"""  # noqa: S608

# Retention drops partitions by name, so a partition made later must be as closed as its parent.
_DEFAULT_PROJECT = """
INSERT INTO runs_project (slug, name, created_at) VALUES ('default', 'Default', now())
    ON CONFLICT (slug) DO NOTHING;
"""

_DROP = """
DROP FUNCTION andon_make_partitions(integer);
DROP TABLE runs_event, runs_frame;
DROP FUNCTION andon_refuse_change() CASCADE;
DROP FUNCTION andon_refuse_finding_change() CASCADE;
DROP FUNCTION andon_refuse_receipt_change() CASCADE;
DROP FUNCTION andon_make_append_only(text);
"""

OPERATIONS = [
    migrations.RunSQL(
        sql=[_TABLES, _TRIGGERS, _PARTITIONS, *sql_ingest.STATEMENTS, _GRANTS, _DEFAULT_PROJECT],
        reverse_sql=[*sql_ingest.DROP, _DROP],
    )
]

# (kind, name, table): what the check looks for.
OBJECTS: list[tuple[str, str, str]] = [
    *[
        ("function", name, "")
        for name in (
            "andon_refuse_change",
            "andon_refuse_finding_change",
            "andon_refuse_receipt_change",
            "andon_make_append_only",
            "andon_make_partitions",
            *sql_ingest.FUNCTIONS,
        )
    ],
    *[("partition", f"{table}_default", table) for table in PARTITIONED],
    *[
        ("trigger", name, table)
        for table in (*APPEND_ONLY, "runs_finding", "runs_receipt")
        for name in ("append_only", "append_only_truncate")
    ],
]
