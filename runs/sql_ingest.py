"""The statements of the ingest transaction, as functions of the database.

Functions rather than statements sent each time: their plans are kept per session, also behind a pooler
in transaction mode, and a post is one round trip. Each statement inside sees what committed before it.
Generic plans are forced: PostgreSQL would otherwise plan anew for every post, since it can tell from the
values how short their arrays are, and planning costs ten times what the look-ups do.
"""

# The commonest post, one or a few events that nobody must act on, is one round trip and one commit. The
# directive is read after the data.
_EVENTS = """
CREATE FUNCTION andon_store_events(
    p_run bigint, p_webhook_id text, p_received timestamptz, p_current integer, p_events jsonb
) RETURNS bigint[] LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    ids bigint[];
BEGIN
    WITH stored AS (
        INSERT INTO runs_event (received_at, run_id, attempt, type, step, rank, node, occurred_at, backfill,
                                view, ranks, flags, data, webhook_id, index)
        SELECT coalesce(e.received, p_received), p_run, coalesce(e.a, p_current), e.t, e.s, e.r,
               coalesce(e.n, ''), coalesce(e.o, e.received, p_received),
               coalesce(e.b, false) OR coalesce(e.a, p_current) < p_current, coalesce(e.v, ''), e.k,
               coalesce(e.f, '{}'), coalesce(e.d, '{}'), coalesce(e.post, p_webhook_id), e.i
        FROM jsonb_to_recordset(p_events) AS e (
            t text, s bigint, r integer, n text, a integer, o timestamptz, b boolean,
            v text, k jsonb, f jsonb, d jsonb, i integer, post text, received timestamptz)
        RETURNING id, index, type, received_at
    ), noted AS (
        INSERT INTO runs_pending (run_id, what, ref, received_at)
        SELECT p_run, 'event', id, received_at FROM stored
        WHERE type IN ('step', 'skip', 'node.state', 'preflight.report') OR type LIKE 'hardware.%'
    )
    SELECT array_agg(id ORDER BY index) INTO ids FROM stored;
    RETURN ids;
END $$;

CREATE FUNCTION andon_take_events(
    p_run bigint, p_webhook_id text, p_sha bytea, p_received timestamptz, p_answer jsonb,
    p_highest integer, p_events jsonb, OUT taken boolean, OUT directive text, OUT current_attempt integer
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
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

_FRAMES = """
CREATE FUNCTION andon_store_frame(
    p_run bigint, p_webhook_id text, p_received timestamptz, p_current integer, p_attempt integer,
    p_stream text, p_node text, p_content_type text, p_step_first bigint, p_step_last bigint,
    p_lane_first integer, p_lane_last integer, p_lanes jsonb, p_rows integer, p_metrics jsonb,
    p_bad_cells integer, p_skips boolean, p_backfill boolean, p_plane bytea, p_body bytea
) RETURNS bigint LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
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
    INSERT INTO runs_pending (run_id, what, ref, received_at)
        VALUES (p_run, 'frame', new_id, p_received);
    RETURN new_id;
END $$;

CREATE FUNCTION andon_take_frame(
    p_run bigint, p_webhook_id text, p_sha bytea, p_received timestamptz, p_answer jsonb,
    p_attempt integer, p_stream text, p_node text, p_content_type text, p_step_first bigint,
    p_step_last bigint, p_lane_first integer, p_lane_last integer, p_lanes jsonb, p_rows integer,
    p_metrics jsonb, p_bad_cells integer, p_skips boolean, p_backfill boolean, p_plane bytea, p_body bytea,
    OUT taken boolean, OUT directive text
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
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

# An applied value orders before a skipped one; inside a step the micro-batch orders, where it is known and
# the values are not yet reduced (as andon.detect.cells.order_key). Known lanes are left out before ON
# CONFLICT sees them, which costs more than a look-up. DO NOTHING and not DO UPDATE, which would lock every
# row it meets, moved or not. Rows to move are locked in one order, so that two posts about the same lanes
# cannot deadlock.
# Each lane is looked up by the one index that has it, under a plan that is kept: whichever way the lanes of a
# frame were joined to all lanes of the run, some size of either was planned badly, up to minutes.
_FIRST_BAD = """
CREATE FUNCTION andon_cell_order(
    skipped boolean, step bigint, micro_batch integer, phase smallint
) RETURNS bigint[] LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT ARRAY[skipped::integer::bigint, step,
        CASE WHEN micro_batch >= 0 AND phase < 3 THEN micro_batch ELSE 2147483647 END::bigint, phase::bigint]
$$;

CREATE FUNCTION andon_move_first_bad(
    p_run bigint, p_attempt integer, p_stream text, p_views text[], p_lanes text[], p_ranks integer[],
    p_steps bigint[], p_micro_batches integer[], p_phases smallint[], p_skipped boolean[], p_bits integer[],
    p_series text[], p_values text[], p_occurred timestamptz[], p_received timestamptz[]
) RETURNS integer LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off AS $$
DECLARE
    inserted integer;
    moved integer;
BEGIN
    INSERT INTO runs_firstbad (run_id, attempt, stream, view, lane, rank, step, micro_batch, phase, skipped,
                               bits, series, value, occurred_at, received_at)
    SELECT p_run, p_attempt, p_stream, n.view, n.lane, n.rank, n.step, n.micro_batch, n.phase, n.skipped,
           n.bits, n.series, n.value, n.occurred, n.received
    FROM unnest(p_views, p_lanes, p_ranks, p_steps, p_micro_batches, p_phases, p_skipped, p_bits, p_series,
                p_values, p_occurred, p_received)
         AS n (view, lane, rank, step, micro_batch, phase, skipped, bits, series, value, occurred, received)
    WHERE (
        SELECT true FROM runs_firstbad f
        WHERE f.run_id = p_run AND f.attempt = p_attempt AND f.stream = p_stream
              AND f.view = n.view AND f.lane = n.lane AND f.rank = n.rank LIMIT 1) IS NULL
    ORDER BY n.view, n.lane, n.rank
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted = cardinality(p_lanes) THEN
        RETURN inserted;
    END IF;
    WITH n AS (
        SELECT * FROM unnest(p_views, p_lanes, p_ranks, p_steps, p_micro_batches, p_phases, p_skipped, p_bits,
                             p_series, p_values, p_occurred, p_received)
             AS n (view, lane, rank, step, micro_batch, phase, skipped, bits, series, value, occurred,
                   received)
    ), earlier AS (
        SELECT known.id, n.* FROM n CROSS JOIN LATERAL (
            SELECT f.id, f.skipped, f.step, f.micro_batch, f.phase FROM runs_firstbad f
            WHERE f.run_id = p_run AND f.attempt = p_attempt AND f.stream = p_stream
                  AND f.view = n.view AND f.lane = n.lane AND f.rank = n.rank LIMIT 1
        ) AS known
        WHERE andon_cell_order(n.skipped, n.step, n.micro_batch, n.phase)
              < andon_cell_order(known.skipped, known.step, known.micro_batch, known.phase)
    ), locked AS (
        SELECT earlier.* FROM earlier JOIN runs_firstbad f USING (id) ORDER BY f.id FOR NO KEY UPDATE OF f
    )
    UPDATE runs_firstbad f SET step = e.step, micro_batch = e.micro_batch, phase = e.phase,
           skipped = e.skipped, bits = e.bits, series = e.series, value = e.value,
           occurred_at = e.occurred, received_at = e.received
    FROM locked e
    WHERE f.id = e.id AND andon_cell_order(e.skipped, e.step, e.micro_batch, e.phase)
                          < andon_cell_order(f.skipped, f.step, f.micro_batch, f.phase);
    GET DIAGNOSTICS moved = ROW_COUNT;
    RETURN inserted + moved;
END $$;
"""

# Returns the digests that were new. A finding that joined the incident in force is left for a worker.
_FINDINGS = """
CREATE FUNCTION andon_store_findings(p_run bigint, p_received timestamptz, p_rows jsonb)
RETURNS TABLE (new_says text, new_id bigint) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY WITH said AS (
        SELECT * FROM jsonb_to_recordset(p_rows) AS r (
            attempt integer, kind text, rule text, mode text, severity text, step bigint, lanes jsonb,
            series text, view text, score float8, numbers jsonb, detail text, detector text,
            detector_version text, policy_digest text, backfill boolean, occurred_at timestamptz,
            needs_incident boolean, incident text, says text, joined boolean, received timestamptz)
    ), stored AS (
        INSERT INTO runs_finding (run_id, attempt, kind, rule, mode, severity, step, lanes, series, view,
            score, numbers, detail, detector, detector_version, policy_digest, backfill, occurred_at,
            received_at, created_at, needs_incident, incident, says)
        SELECT p_run, attempt, kind, rule, mode, severity, step, lanes, series, view, score, numbers, detail,
            detector, detector_version, policy_digest, backfill, occurred_at, coalesce(received, p_received),
            clock_timestamp(), needs_incident, incident, says
        FROM said ORDER BY says
        ON CONFLICT (run_id, says) DO NOTHING
        RETURNING id, says, received_at
    ), left_for_a_worker AS (
        INSERT INTO runs_pending (run_id, what, ref, received_at)
        SELECT p_run, 'finding', stored.id, stored.received_at
        FROM stored WHERE says IN (SELECT said.says FROM said WHERE said.joined)
    )
    SELECT stored.says::text, stored.id FROM stored;
END $$;
"""

# Bad posts of a run that is held already, together: thousands arrive within a second of the first. They are
# taken only if the run still stands where the sender of this statement last saw it; otherwise nothing is
# stored and each takes the long way. What belongs to a post carries its id as `post`; `taken` are the ids
# that were new.
_JOINED = """
CREATE FUNCTION andon_of_posts(p_rows jsonb, p_posts text[]) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_agg(r), '[]') FROM jsonb_array_elements(p_rows) r WHERE r ->> 'post' = ANY(p_posts)
$$;

CREATE FUNCTION andon_take_joined(
    p_run bigint, p_attempt integer, p_seq bigint, p_posts jsonb, p_events jsonb, p_cells jsonb,
    p_findings jsonb, OUT taken text[], OUT directive text
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF p_attempt IS DISTINCT FROM (
        SELECT number FROM runs_attempt WHERE run_id = p_run ORDER BY number DESC LIMIT 1)
       OR p_seq IS DISTINCT FROM (
        SELECT seq FROM runs_directive WHERE run_id = p_run ORDER BY seq DESC LIMIT 1)
    THEN
        RETURN;
    END IF;
    WITH stored AS (
        INSERT INTO runs_receipt (run_id, webhook_id, body_sha256, answer, received_at)
        SELECT p_run, post, decode(sha256, 'hex'), answer, received
        FROM jsonb_to_recordset(p_posts) AS p (post text, sha256 text, answer jsonb, received timestamptz)
        ORDER BY post
        ON CONFLICT (run_id, webhook_id) DO NOTHING
        RETURNING webhook_id
    )
    SELECT array_agg(webhook_id) INTO taken FROM stored;
    IF taken IS NULL THEN
        RETURN;
    END IF;
    IF cardinality(taken) < jsonb_array_length(p_posts) THEN
        p_events := andon_of_posts(p_events, taken);
        p_cells := andon_of_posts(p_cells, taken);
        p_findings := andon_of_posts(p_findings, taken);
    END IF;
    -- Every row says itself when it was received and in which post.
    PERFORM andon_store_events(p_run, '', clock_timestamp(), p_attempt, p_events);
    PERFORM andon_move_first_bad(p_run, p_attempt, 'rank', array_agg(view), array_agg(lane), array_agg(rank),
        array_agg(step), array_agg(micro_batch), array_agg(phase), array_agg(skipped), array_agg(bits),
        array_agg(series), array_agg(value), array_agg(occurred), array_agg(received))
    FROM (
        SELECT DISTINCT ON (view, lane, rank) *
        FROM jsonb_to_recordset(p_cells) AS c (
            view text, lane text, rank integer, step bigint, micro_batch integer, phase smallint,
            skipped boolean, bits integer, series text, value text, occurred timestamptz,
            received timestamptz)
        ORDER BY view, lane, rank, andon_cell_order(skipped, step, micro_batch, phase)
    ) AS earliest HAVING count(*) > 0;
    PERFORM new_id FROM andon_store_findings(p_run, clock_timestamp(), p_findings);
    SELECT document::text INTO directive FROM runs_directive
        WHERE run_id = p_run ORDER BY seq DESC LIMIT 1;
END $$;
"""

# Planned for every partition of both logs, which costs six times what running it does.
_RECORDED = """
CREATE FUNCTION andon_first_recorded_step(p_run bigint, p_attempt integer)
RETURNS bigint LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN least(
        (SELECT min(step) FROM runs_event WHERE run_id = p_run AND attempt = p_attempt AND type = 'step'),
        (SELECT min(step_first) FROM runs_frame
         WHERE run_id = p_run AND attempt = p_attempt AND stream = 'rank'),
        (SELECT min(step_first) FROM runs_frame
         WHERE run_id = p_run AND attempt = p_attempt AND stream = 'layer'));
END $$;
"""

# What the opening of an incident asks for, while a trainer waits. The directive is read when the lock is had,
# so it is seen as whoever had the lock before left it.
_OPENING = """
CREATE FUNCTION andon_lock_run(p_run bigint, p_wait text, OUT locked runs_run, OUT directive text)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('lock_timeout', p_wait, true);
    SELECT * INTO locked FROM runs_run WHERE id = p_run FOR NO KEY UPDATE;
    SELECT document::text INTO directive FROM runs_directive
        WHERE run_id = p_run ORDER BY seq DESC LIMIT 1;
END $$;

CREATE FUNCTION andon_events_of(p_run bigint, p_attempt integer, p_types text[])
RETURNS TABLE (id bigint, type text, rank integer, node text, data jsonb)
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT e.id, e.type, e.rank, e.node, e.data FROM runs_event e
        WHERE e.run_id = p_run AND e.attempt = p_attempt AND e.type = ANY(p_types);
END $$;

CREATE FUNCTION andon_events_at(
    p_run bigint, p_attempt integer, p_types text[], p_steps bigint[], p_most integer
) RETURNS TABLE (step bigint, data jsonb)
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT e.step, e.data FROM runs_event e
        WHERE e.run_id = p_run AND e.attempt = p_attempt AND e.type = ANY(p_types) AND e.step = ANY(p_steps)
        ORDER BY e.received_at DESC LIMIT p_most;
END $$;

CREATE FUNCTION andon_newest_events(
    p_run bigint, p_attempt integer, p_types text[], p_names text[], p_most integer
) RETURNS TABLE (step bigint, data jsonb)
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT n.step, n.data FROM (
        SELECT e.step, e.data FROM runs_event e
        WHERE e.run_id = p_run AND e.attempt = p_attempt AND e.type = ANY(p_types) AND e.step IS NOT NULL
        ORDER BY e.step DESC LIMIT p_most
    ) AS n WHERE n.data ?| p_names;
END $$;
"""

STATEMENTS = (_EVENTS, _FRAMES, _FIRST_BAD, _FINDINGS, _JOINED, _RECORDED, _OPENING)
FUNCTIONS = (
    "andon_store_events",
    "andon_take_events",
    "andon_store_frame",
    "andon_take_frame",
    "andon_cell_order",
    "andon_move_first_bad",
    "andon_store_findings",
    "andon_of_posts",
    "andon_take_joined",
    "andon_first_recorded_step",
    "andon_lock_run",
    "andon_events_of",
    "andon_events_at",
    "andon_newest_events",
)
DROP = tuple(f"DROP FUNCTION {name};" for name in reversed(FUNCTIONS))
