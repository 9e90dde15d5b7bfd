-- Keys of queues, as operators see and change them. A change notifies the workers of the queue, which claim again.

-- name: list_keys
-- Up to "limit" keys of a queue: keys with their own limits or a pause, keys with tasks in flight, and keys with due
-- tasks, which are counted up to "most". Paused keys come first, then keys with the most due tasks.
SELECT * FROM horsies_list_lanes_v1(%(queue)s::text, %(limit)s::integer, %(most)s::integer)

-- name: read_key
-- The state of one key, even if it has no tasks.
SELECT * FROM horsies_lane_state_v1(
    %(queue)s::text, horsies_lane_v1(%(queue)s::text, %(key)s::text), %(key)s::text, %(most)s::integer)

-- name: read_lane
-- The state of a task's key, found by its lane.
SELECT * FROM horsies_lane_state_v1(%(queue)s::text, %(lane)s::bigint, NULL, %(most)s::integer)

-- name: set_key
-- Set the limits of this key whose names are in "given"; a value of NULL means that the configured limit applies again.
WITH stored AS (
    INSERT INTO horsies_lanes AS stored (
        queue_name, lane, lane_key, max_concurrency, rate_seconds, rate_burst, weight)
    VALUES (%(queue)s::text, horsies_lane_v1(%(queue)s::text, %(key)s::text), %(key)s::text, %(max_concurrency)s::integer, %(rate_seconds)s::float8,
        %(rate_burst)s::integer, %(weight)s::float8)
    ON CONFLICT (queue_name, lane) DO UPDATE SET
        lane_key = EXCLUDED.lane_key, updated_at = clock_timestamp(),
        max_concurrency = CASE WHEN 'max_concurrency' = ANY(%(given)s::text[]) THEN EXCLUDED.max_concurrency
            ELSE stored.max_concurrency END,
        rate_seconds = CASE WHEN 'rate' = ANY(%(given)s::text[]) THEN EXCLUDED.rate_seconds
            ELSE stored.rate_seconds END,
        rate_burst = CASE WHEN 'rate' = ANY(%(given)s::text[]) THEN EXCLUDED.rate_burst ELSE stored.rate_burst END,
        weight = CASE WHEN 'weight' = ANY(%(given)s::text[]) THEN EXCLUDED.weight ELSE stored.weight END
    RETURNING stored.queue_name AS name)
SELECT stored.name::text FROM stored CROSS JOIN LATERAL pg_notify('task_queue_' || stored.name, '@') AS woken

-- name: clear_key
-- Remove the limits of one key, so that the limits of its queue apply again; a pause of the key is kept. The key's row
-- is locked first, because a concurrent change decides whether the row is still needed.
WITH locked AS MATERIALIZED (
    SELECT stored.queue_name, stored.lane,
        stored.paused_at IS NOT NULL OR stored.task_rate_seconds IS NOT NULL AS is_needed
    FROM horsies_lanes AS stored
    WHERE stored.queue_name = %(queue)s::text AND stored.lane = horsies_lane_v1(%(queue)s::text, %(key)s::text)
    FOR UPDATE),
gone AS (
    DELETE FROM horsies_lanes AS stored USING locked
    WHERE stored.queue_name = locked.queue_name AND stored.lane = locked.lane AND NOT locked.is_needed
    RETURNING stored.queue_name),
cleared AS (
    UPDATE horsies_lanes AS stored SET
        max_concurrency = NULL, rate_seconds = NULL, rate_burst = NULL, weight = NULL, updated_at = clock_timestamp()
    FROM locked
    WHERE stored.queue_name = locked.queue_name AND stored.lane = locked.lane AND locked.is_needed
    RETURNING stored.queue_name)
SELECT changed.queue_name::text AS name
FROM (SELECT queue_name FROM gone UNION ALL SELECT queue_name FROM cleared) AS changed
CROSS JOIN LATERAL pg_notify('task_queue_' || changed.queue_name, '@') AS woken

-- name: pause_key
-- Pause a key: workers start no more of its tasks; running tasks continue. Pausing a paused key keeps the time and
-- replaces the reason.
INSERT INTO horsies_lanes AS stored (queue_name, lane, lane_key, paused_at, pause_reason)
VALUES (%(queue)s::text, horsies_lane_v1(%(queue)s::text, %(key)s::text), %(key)s::text, clock_timestamp(), %(reason)s::text)
ON CONFLICT (queue_name, lane) DO UPDATE SET
    paused_at = coalesce(stored.paused_at, EXCLUDED.paused_at), updated_at = clock_timestamp(),
    pause_reason = coalesce(EXCLUDED.pause_reason, stored.pause_reason)
RETURNING stored.queue_name::text AS name

-- name: resume_key
-- Resume a key: workers start its tasks again immediately, because they are notified as for a new task. As in
-- clear_key, the row is locked first.
WITH locked AS MATERIALIZED (
    SELECT stored.queue_name, stored.lane,
        stored.max_concurrency IS NOT NULL OR stored.rate_seconds IS NOT NULL OR stored.weight IS NOT NULL
            OR stored.task_rate_seconds IS NOT NULL AS is_needed
    FROM horsies_lanes AS stored
    WHERE stored.queue_name = %(queue)s::text AND stored.lane = horsies_lane_v1(%(queue)s::text, %(key)s::text)
    FOR UPDATE),
gone AS (
    DELETE FROM horsies_lanes AS stored USING locked
    WHERE stored.queue_name = locked.queue_name AND stored.lane = locked.lane AND NOT locked.is_needed
    RETURNING stored.queue_name),
resumed AS (
    UPDATE horsies_lanes AS stored SET paused_at = NULL, pause_reason = NULL, updated_at = clock_timestamp()
    FROM locked
    WHERE stored.queue_name = locked.queue_name AND stored.lane = locked.lane AND locked.is_needed
    RETURNING stored.queue_name)
SELECT changed.queue_name::text AS name
FROM (SELECT queue_name FROM gone UNION ALL SELECT queue_name FROM resumed) AS changed
CROSS JOIN LATERAL pg_notify('task_queue_' || changed.queue_name, '@') AS woken

-- name: find_paused_keys
-- Up to "limit" paused keys with due tasks, of one queue or of all, longest paused first; only the first
-- thousand paused keys are read.
SELECT state.* FROM (
    SELECT stored.queue_name, stored.lane FROM horsies_lanes AS stored
    WHERE stored.paused_at IS NOT NULL AND stored.lane <> 0
      AND (%(queue)s::text IS NULL OR stored.queue_name = %(queue)s::text)
    ORDER BY stored.paused_at LIMIT 1000) AS paused
CROSS JOIN LATERAL horsies_lane_state_v1(paused.queue_name, paused.lane, NULL, %(most)s::integer) AS state
WHERE state.due > 0 ORDER BY state.paused_at LIMIT %(limit)s::integer

-- name: list_limited_queues
-- The queues with limits for keys: for all keys, or for single keys, including keys that are only paused.
SELECT DISTINCT stored.queue_name::text AS name FROM horsies_lanes AS stored

-- name: count_keys
-- For each queue with keys: how many keys have due tasks, counted up to "most", and how many are paused.
SELECT keyed.queue_name, horsies_count_lanes_v1(keyed.queue_name, %(most)s::integer) AS waiting, (
        SELECT count(*) FROM horsies_lanes AS stored
        WHERE stored.queue_name = keyed.queue_name AND stored.paused_at IS NOT NULL AND stored.lane <> 0) AS paused
FROM (
    SELECT counted.queue_name FROM horsies_count_keyed_v1(NULL, 1) AS counted
    UNION SELECT stored.queue_name::text FROM horsies_lanes AS stored WHERE stored.paused_at IS NOT NULL) AS keyed
ORDER BY keyed.queue_name

-- name: list_held_queues
-- The queues with these names whose due tasks wait for a key or a rate: how many of their keys with due tasks are
-- paused, and how many others wait for the next start that their rate allows, counted up to "most" each; and the seconds
-- until the rate of the queue itself allows the next start. For each queue, only the first ten thousand paused keys and
-- the first ten thousand meters are read.
SELECT queue.name, paused.keys AS paused_keys, rated.keys AS rated_keys, (
    SELECT extract(epoch FROM horsies_starts_at(stored) - now())::float8
    FROM horsies_meters AS stored
    WHERE stored.queue_name = queue.name AND stored.lane = 0 AND horsies_starts_at(stored) > now()) AS rate_wait_seconds
FROM unnest(%(names)s::text[]) AS queue (name)
CROSS JOIN LATERAL (
    SELECT count(*) AS keys FROM (
        SELECT FROM (
            SELECT stored.lane FROM horsies_lanes AS stored
            WHERE stored.queue_name = queue.name AND stored.lane <> 0 AND stored.paused_at IS NOT NULL
            LIMIT 10000) AS held
        WHERE (
            SELECT true FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = queue.name AND task.lane = held.lane
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1)
        LIMIT %(most)s::integer) AS counted) AS paused
CROSS JOIN LATERAL (
    SELECT count(*) AS keys FROM (
        SELECT FROM (
            SELECT stored.lane, horsies_starts_at(stored) AS starts_at FROM horsies_meters AS stored
            WHERE stored.queue_name = queue.name AND stored.lane <> 0
            LIMIT 10000) AS held
        WHERE held.starts_at > now() AND EXISTS (
            SELECT FROM horsies_lanes AS limits
            WHERE limits.queue_name = queue.name AND limits.lane IN (0, held.lane)
              AND coalesce(limits.rate_seconds, limits.task_rate_seconds) IS NOT NULL)
          AND NOT EXISTS (
            SELECT FROM horsies_lanes AS limits
            WHERE limits.queue_name = queue.name AND limits.lane = held.lane AND limits.paused_at IS NOT NULL)
          AND (
            SELECT true FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = queue.name AND task.lane = held.lane
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1)
        LIMIT %(most)s::integer) AS counted) AS rated

-- name: count_paused_due
-- For each of these queues: how many due tasks belong to paused keys, counted up to "most".
SELECT queue.name, (
    SELECT count(*) FROM (
        SELECT FROM horsies_lanes AS stored CROSS JOIN LATERAL (
            SELECT FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = queue.name AND task.lane = stored.lane
              -- Without retries, the planner would expect no row to pass "(next_retry_at <= now()) IS NOT FALSE", and
              -- would sort all tasks of the key.
              AND (task.next_retry_at IS NULL OR task.next_retry_at <= now())
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT %(most)s::integer) AS front
        WHERE stored.queue_name = queue.name AND stored.lane <> 0 AND stored.paused_at IS NOT NULL
        LIMIT %(most)s::integer) AS counted) AS due
FROM unnest(%(names)s::text[]) AS queue (name)
