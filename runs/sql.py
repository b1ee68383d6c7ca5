"""What Django cannot declare: partitions, append-only triggers, grants, and the one-statement ingest.

`OPERATIONS` is appended to the initial migration; `OBJECTS` names what must exist afterwards and is
checked by `runs.checks`, because `makemigrations --check` cannot see any of it.
"""

from django.db import migrations

PARTITIONED = ("runs_event", "runs_frame")
# Rows of these are never changed. Findings may only be handed to an incident, receipts may only
# be forgotten once they are old.
APPEND_ONLY = ("runs_event", "runs_frame", "runs_directive", "runs_directiveack", "runs_policyversion")
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

# The commonest post, one or a few events that nobody must act on, is one round trip and one commit.
# Functions rather than one long statement: their plans are kept per session, also behind a pooler.
# Each statement inside sees what committed before it, so the directive is read after the data.
_INGEST = """
CREATE FUNCTION andon_store_events(
    p_run bigint, p_webhook_id text, p_received timestamptz, p_current integer, p_events jsonb
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    ids bigint[];
BEGIN
    WITH stored AS (
        INSERT INTO runs_event (received_at, run_id, attempt, type, step, rank, node, occurred_at, backfill,
                                view, ranks, flags, data, webhook_id, index)
        SELECT p_received, p_run, coalesce(e.a, p_current), e.t, e.s, e.r, coalesce(e.n, ''),
               coalesce(e.o, p_received), coalesce(e.b, false) OR coalesce(e.a, p_current) < p_current,
               coalesce(e.v, ''), e.k, coalesce(e.f, '{}'), coalesce(e.d, '{}'), p_webhook_id, e.i
        FROM jsonb_to_recordset(p_events) AS e (
            t text, s bigint, r integer, n text, a integer, o timestamptz, b boolean,
            v text, k jsonb, f jsonb, d jsonb, i integer)
        RETURNING id, index, type
    ), noted AS (
        INSERT INTO runs_pending (run_id, what, ref, received_at)
        SELECT p_run, 'event', id, p_received FROM stored WHERE type IN ('step', 'skip')
    )
    SELECT array_agg(id ORDER BY index) INTO ids FROM stored;
    RETURN ids;
END $$;

CREATE FUNCTION andon_take_events(
    p_run bigint, p_webhook_id text, p_sha bytea, p_received timestamptz, p_answer jsonb,
    p_highest integer, p_events jsonb, OUT taken boolean, OUT directive text
) LANGUAGE plpgsql AS $$
DECLARE
    current_attempt integer;
BEGIN
    taken := false;
    SELECT number INTO current_attempt FROM runs_attempt
        WHERE run_id = p_run ORDER BY number DESC LIMIT 1;
    IF current_attempt IS NULL OR p_highest > current_attempt THEN
        RETURN;
    END IF;
    INSERT INTO runs_receipt (run_id, webhook_id, body_sha256, answer, received_at)
        VALUES (p_run, p_webhook_id, p_sha, p_answer, p_received)
        ON CONFLICT (run_id, webhook_id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM andon_store_events(p_run, p_webhook_id, p_received, current_attempt, p_events);
    taken := true;
    SELECT document::text INTO directive FROM runs_directive
        WHERE run_id = p_run ORDER BY seq DESC LIMIT 1;
END $$;
"""

_INGEST_FRAME = """
CREATE FUNCTION andon_store_frame(
    p_run bigint, p_webhook_id text, p_received timestamptz, p_current integer, p_attempt integer,
    p_stream text, p_node text, p_content_type text, p_step_first bigint, p_step_last bigint,
    p_lane_first integer, p_lane_last integer, p_lanes jsonb, p_rows integer, p_metrics jsonb,
    p_bad_cells integer, p_skips boolean, p_backfill boolean, p_plane bytea, p_body bytea
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    new_id bigint;
BEGIN
    INSERT INTO runs_frame (received_at, run_id, attempt, stream, node, content_type, body, step_first,
        step_last, lane_first, lane_last, lanes, rows, metrics, state_plane, bad_cells, skips, backfill,
        webhook_id)
    VALUES (p_received, p_run, p_attempt, p_stream, p_node, p_content_type, p_body, p_step_first,
        p_step_last, p_lane_first, p_lane_last, p_lanes, p_rows, p_metrics, p_plane, p_bad_cells, p_skips,
        p_backfill OR p_attempt < p_current, p_webhook_id)
    RETURNING id INTO new_id;
    IF p_stream IN ('rank', 'layer') THEN
        INSERT INTO runs_pending (run_id, what, ref, received_at)
            VALUES (p_run, 'frame', new_id, p_received);
    END IF;
    RETURN new_id;
END $$;

CREATE FUNCTION andon_take_frame(
    p_run bigint, p_webhook_id text, p_sha bytea, p_received timestamptz, p_answer jsonb,
    p_attempt integer, p_stream text, p_node text, p_content_type text, p_step_first bigint,
    p_step_last bigint, p_lane_first integer, p_lane_last integer, p_lanes jsonb, p_rows integer,
    p_metrics jsonb, p_bad_cells integer, p_skips boolean, p_backfill boolean, p_plane bytea, p_body bytea,
    OUT taken boolean, OUT directive text
) LANGUAGE plpgsql AS $$
DECLARE
    current_attempt integer;
BEGIN
    taken := false;
    SELECT number INTO current_attempt FROM runs_attempt
        WHERE run_id = p_run ORDER BY number DESC LIMIT 1;
    IF current_attempt IS NULL OR p_attempt > current_attempt THEN
        RETURN;
    END IF;
    INSERT INTO runs_receipt (run_id, webhook_id, body_sha256, answer, received_at)
        VALUES (p_run, p_webhook_id, p_sha, p_answer, p_received)
        ON CONFLICT (run_id, webhook_id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM andon_store_frame(p_run, p_webhook_id, p_received, current_attempt, p_attempt, p_stream, p_node,
        p_content_type, p_step_first, p_step_last, p_lane_first, p_lane_last, p_lanes, p_rows, p_metrics,
        p_bad_cells, p_skips, p_backfill, p_plane, p_body);
    taken := true;
    SELECT document::text INTO directive FROM runs_directive
        WHERE run_id = p_run ORDER BY seq DESC LIMIT 1;
END $$;
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
DROP FUNCTION andon_take_events(bigint, text, bytea, timestamptz, jsonb, integer, jsonb);
DROP FUNCTION andon_store_events(bigint, text, timestamptz, integer, jsonb);
DROP FUNCTION andon_take_frame, andon_store_frame;
DROP FUNCTION andon_make_partitions(integer);
DROP TABLE runs_event, runs_frame;
DROP FUNCTION andon_refuse_change() CASCADE;
DROP FUNCTION andon_refuse_finding_change() CASCADE;
DROP FUNCTION andon_refuse_receipt_change() CASCADE;
DROP FUNCTION andon_make_append_only(text);
"""

OPERATIONS = [
    migrations.RunSQL(
        sql=[_TABLES, _TRIGGERS, _PARTITIONS, _INGEST, _INGEST_FRAME, _GRANTS, _DEFAULT_PROJECT],
        reverse_sql=[_DROP],
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
            "andon_store_events",
            "andon_take_events",
            "andon_store_frame",
            "andon_take_frame",
        )
    ],
    *[("partition", f"{table}_default", table) for table in PARTITIONED],
    *[
        ("trigger", name, table)
        for table in (*APPEND_ONLY, "runs_finding", "runs_receipt")
        for name in ("append_only", "append_only_truncate")
    ],
]
