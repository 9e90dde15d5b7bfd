-- The state of lanes, for commands and pages. These functions change no rows, and each reads a bounded number of
-- entries, regardless of how many tasks a key has.

-- Describe one lane: its due tasks, counted up to "p_most", the time at which its first task became due, its tasks in
-- flight, the limits that apply to it, and when its rate allows the next start. "is_own" is true if an operator has set
-- limits for this key.
CREATE OR REPLACE FUNCTION horsies_lane_state_v1(p_queue text, p_lane bigint, p_key text, p_most integer) RETURNS TABLE (
    queue_name text, key text, due bigint, first_due_at timestamptz, in_flight bigint, max_concurrency integer,
    rate_seconds double precision, rate_burst integer, weight double precision, is_fifo boolean, halts boolean,
    is_own boolean, paused_at timestamptz, pause_reason text, starts_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    shared horsies_lanes;
    limits horsies_lanes;
BEGIN
    SELECT * INTO shared FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = 0;
    SELECT stored.max_concurrency IS NOT NULL OR stored.rate_seconds IS NOT NULL OR stored.weight IS NOT NULL
    INTO is_own FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = p_lane;
    is_own := coalesce(is_own, false);
    limits := horsies_lane_limits(p_queue, p_lane, shared);
    queue_name := p_queue;
    SELECT count(*) INTO due FROM (
        SELECT FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.queue_name = p_queue AND task.lane = p_lane
        ORDER BY task.priority, task.enqueued_at, task.id LIMIT p_most) AS found;
    SELECT task.lane_key, task.enqueued_at INTO key, first_due_at FROM horsies_tasks AS task
    WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
      AND task.queue_name = p_queue AND task.lane = p_lane
    ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1;
    key := coalesce(p_key, limits.lane_key, key, (
        SELECT task.lane_key FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status IN ('CLAIMED', 'RUNNING') AND task.queue_name = p_queue
          AND task.lane = p_lane ORDER BY task.lane LIMIT 1));
    in_flight := horsies_lane_in_flight(p_queue, p_lane, limits.is_fifo);
    max_concurrency := limits.max_concurrency;
    rate_seconds := limits.rate_seconds;
    rate_burst := limits.rate_burst;
    weight := limits.weight;
    is_fifo := limits.is_fifo;
    halts := limits.halts;
    paused_at := limits.paused_at;
    pause_reason := limits.pause_reason;
    IF rate_seconds IS NOT NULL THEN
        SELECT horsies_starts_at(meter) INTO starts_at FROM horsies_meters AS meter
        WHERE meter.queue_name = p_queue AND meter.lane = p_lane;
    END IF;
    RETURN NEXT;
END
$$;

-- Describe up to "p_limit" lanes of a queue: lanes with their own limits or a pause come first, then lanes with tasks
-- in flight, then lanes with due tasks. Tasks are counted as in horsies_lane_state_v1.
CREATE OR REPLACE FUNCTION horsies_list_lanes_v1(p_queue text, p_limit integer, p_most integer) RETURNS TABLE (
    queue_name text, key text, due bigint, first_due_at timestamptz, in_flight bigint, max_concurrency integer,
    rate_seconds double precision, rate_burst integer, weight double precision, is_fifo boolean, halts boolean,
    is_own boolean, paused_at timestamptz, pause_reason text, starts_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    RETURN QUERY
    SELECT state.* FROM (
        SELECT found.lane, min(found.place) AS place FROM (
            (SELECT stored.lane, 1 AS place FROM horsies_lanes AS stored
             WHERE stored.queue_name = p_queue AND stored.lane <> 0 ORDER BY stored.lane LIMIT p_limit)
            UNION ALL
            (SELECT task.lane, 2 FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status IN ('CLAIMED', 'RUNNING') AND task.queue_name = p_queue
             ORDER BY task.lane LIMIT 10000)
            UNION ALL
            SELECT lane, 3 FROM unnest((horsies_walk_lanes(
                p_queue, -9223372036854775808, -9223372036854775808, p_limit)).lanes) AS lane WHERE lane <> 0) AS found
        GROUP BY found.lane ORDER BY min(found.place), found.lane LIMIT p_limit) AS shown
    CROSS JOIN LATERAL horsies_lane_state_v1(p_queue, shown.lane, NULL, p_most) AS state
    ORDER BY state.paused_at IS NULL, state.due DESC, state.in_flight DESC, state.key;
END
$$;

-- Return how many keys of a queue have due tasks, counted up to "p_most".
CREATE OR REPLACE FUNCTION horsies_count_lanes_v1(p_queue text, p_most integer) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT count(*) FROM (
            SELECT FROM unnest((horsies_walk_lanes(
                p_queue, -9223372036854775808, -9223372036854775808, p_most)).lanes) AS lane
            WHERE lane <> 0) AS found);
END
$$;

-- Return due tasks from the front of a queue's first lanes, in lane order, each with its position in its lane. Paused
-- lanes are omitted.
CREATE OR REPLACE FUNCTION horsies_lane_fronts_v1(p_queue text, p_limit integer) RETURNS TABLE (
    id uuid, task_name text, priority integer, enqueued_at timestamptz, retry_count integer, key text, place bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    lanes bigint[] := array_remove(
        (horsies_walk_lanes(p_queue, -9223372036854775808, -9223372036854775808, p_limit)).lanes, 0);
BEGIN
    RETURN QUERY
    SELECT front.id, front.task_name, front.priority, front.enqueued_at, front.retry_count, front.lane_key,
        row_number() OVER (PARTITION BY ring.lane ORDER BY front.priority, front.enqueued_at, front.id)
    FROM unnest(lanes) AS ring (lane) CROSS JOIN LATERAL (
        SELECT task.id, task.task_name::text, task.priority, task.enqueued_at, task.retry_count, task.lane_key
        FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.queue_name = p_queue AND task.lane = ring.lane
        ORDER BY task.priority, task.enqueued_at, task.id LIMIT p_limit / greatest(cardinality(lanes), 1) + 1) AS front
    WHERE NOT EXISTS (
        SELECT FROM horsies_lanes AS stored
        WHERE stored.queue_name = p_queue AND stored.lane = ring.lane AND stored.paused_at IS NOT NULL);
END
$$;

-- Count the due tasks of a lane that start before the given task, up to "p_most".
CREATE OR REPLACE FUNCTION horsies_count_before_v1(
    p_queue text, p_lane bigint, p_priority integer, p_enqueued_at timestamptz, p_id uuid, p_most integer)
RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    RETURN (
        SELECT count(*) FROM (
            SELECT FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = p_queue AND task.lane = p_lane
              AND (task.priority, task.enqueued_at, task.id) < (p_priority, p_enqueued_at, p_id)
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT p_most) AS found);
END
$$;
