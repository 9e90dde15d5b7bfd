-- Statements on horsies_tasks and horsies_task_attempts, in the order in which a task usually needs them. Statements
-- that run in a caller's transaction use the caller's search_path, so their operands are cast to the exact types of the
-- built-in operators and functions: otherwise an operator or function in another schema could be a better match.

-- name: insert_task
-- Nothing -> PENDING. No row is returned if the id or the idempotency key is already in use; the caller then compares
-- fingerprints. Except for sent_at and "at", times are on the database's clock and count from the send, because a
-- caller's transaction may have begun long before the send. A time in the past counts as the current time, so that the
-- task does not overtake others.
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at,
    good_until, max_retries, task_options, timeout_ms, enqueue_sha, idempotency_key, idempotency_sha,
    retention, unique_key, unique_while, burst, wakes_task_id, lane_key, lane, held)
VALUES (
    %(id)s::uuid, %(task_name)s, %(queue_name)s, %(priority)s, %(args)s, %(kwargs)s, %(sent_at)s,
    statement_timestamp(), statement_timestamp(),
    greatest(%(enqueue_at)s::timestamptz, statement_timestamp() + %(delay_seconds)s::float8 * interval '1 second'),
    %(good_until)s, %(max_retries)s, %(task_options)s, %(timeout_ms)s, %(enqueue_sha)s, %(idempotency_key)s,
    %(idempotency_sha)s, %(retention_seconds)s::float8 * interval '1 second', %(unique_key)s, %(unique_while)s,
    horsies_is_burst_v1(%(task_options)s::text), %(wakes_task_id)s::uuid, %(lane_key)s::text,
    %(lane)s::bigint, %(lane)s::bigint IS NOT NULL)
ON CONFLICT DO NOTHING
RETURNING id::text

-- name: debounce_task
-- Nothing -> PENDING for a debounced task, or PENDING -> PENDING with the newest values for the task that waits with
-- this key. Sends from SQL use the same function.
SELECT horsies_debounce_v1(
    %(id)s::uuid, %(task_name)s, %(queue_name)s, %(priority)s, %(args)s, %(kwargs)s, %(sent_at)s::timestamptz,
    %(delay_seconds)s::float8, %(at_most_seconds)s::float8, %(good_until)s::timestamptz, %(max_retries)s,
    %(task_options)s, %(timeout_ms)s, %(retention_seconds)s::float8, %(enqueue_sha)s, %(unique_key)s,
    %(idempotency_sha)s, %(lane_key)s)::text AS id

-- name: insert_new_tasks
-- Nothing -> PENDING for many rows of one task. Values that all rows share are sent once; other values are sent as
-- columns with one value per line, because JSON text has no line feeds and the driver needs ten times as long to write
-- an array. The ids are new, so there is no check for conflicts, which would take 3 of 12 microseconds per row. The
-- statements of one transaction together send a single notification, because PostgreSQL merges equal notifications.
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at,
    good_until, max_retries, task_options, timeout_ms, retention, enqueue_sha, burst, lane_key, lane, held)
SELECT sent.id::uuid, %(task_name)s, %(queue_name)s, %(priority)s, sent.args, sent.kwargs, %(sent_at)s,
    statement_timestamp(), statement_timestamp(),
    greatest(
        %(enqueue_at)s::timestamptz, statement_timestamp() + %(delay_seconds)s::float8 * interval '1 second'),
    %(good_until)s, %(max_retries)s, %(task_options)s, %(timeout_ms)s,
    %(retention_seconds)s::float8 * interval '1 second', sent.enqueue_sha,
    (SELECT horsies_is_burst_v1(%(task_options)s::text)), sent.lane_key::jsonb #>> '{}'::text[], sent.lane::bigint,
    sent.lane IS NOT NULL
FROM unnest(
    string_to_array(%(ids)s::text, text E'\n'), string_to_array(%(args)s::text, text E'\n'),
    string_to_array(%(kwargs)s::text, text E'\n'), string_to_array(%(enqueue_shas)s::text, text E'\n'),
    string_to_array(%(lane_keys)s::text, text E'\n'), string_to_array(%(lanes)s::text, text E'\n'))
    AS sent (id, args, kwargs, enqueue_sha, lane_key, lane)

-- name: insert_tasks
-- Insert the same rows again after a commit in doubt; rows that are already stored are kept. Returns how many rows are
-- new.
WITH inserted AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at,
        good_until, max_retries, task_options, timeout_ms, retention, enqueue_sha, burst, lane_key, lane, held)
    SELECT sent.id::uuid, %(task_name)s, %(queue_name)s, %(priority)s, sent.args, sent.kwargs, %(sent_at)s,
        statement_timestamp(), statement_timestamp(),
        greatest(
            %(enqueue_at)s::timestamptz,
            statement_timestamp() + %(delay_seconds)s::float8 * interval '1 second'),
        %(good_until)s, %(max_retries)s, %(task_options)s, %(timeout_ms)s,
        %(retention_seconds)s::float8 * interval '1 second', sent.enqueue_sha,
        (SELECT horsies_is_burst_v1(%(task_options)s::text)), sent.lane_key::jsonb #>> '{}'::text[], sent.lane::bigint,
        sent.lane IS NOT NULL
    FROM unnest(
        string_to_array(%(ids)s::text, text E'\n'), string_to_array(%(args)s::text, text E'\n'),
        string_to_array(%(kwargs)s::text, text E'\n'), string_to_array(%(enqueue_shas)s::text, text E'\n'),
        string_to_array(%(lane_keys)s::text, text E'\n'), string_to_array(%(lanes)s::text, text E'\n'))
        AS sent (id, args, kwargs, enqueue_sha, lane_key, lane)
    ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT count(*) AS inserted FROM inserted

-- name: find_sent_tasks
-- Tasks that conflict with an insert, with their fingerprints, by primary key.
SELECT id::text, enqueue_sha FROM horsies_tasks WHERE id = ANY(%(ids)s::uuid[])

-- name: find_idempotent_task
-- The task that holds this idempotency key, by the unique index on (task_name, idempotency_key).
SELECT id::text, idempotency_sha FROM horsies_tasks
WHERE task_name::text = %(task_name)s::text AND idempotency_key = %(idempotency_key)s::text

-- name: find_unique_task
-- The task that holds this unique key, until the task is claimed or until it has ended, by the unique index on
-- (task_name, unique_key). The condition must match the index's condition exactly.
SELECT id::text, idempotency_sha FROM horsies_tasks
WHERE task_name::text = %(task_name)s::text AND unique_key = %(idempotency_key)s::text
  AND unique_key IS NOT NULL
  AND CASE WHEN unique_while = text 'open' THEN status::text IN (text 'PENDING', text 'CLAIMED', text 'RUNNING')
      ELSE status::text = text 'PENDING' AND generation = 0 AND retry_count = 0 END

-- name: read_outcomes
-- The outcomes of tasks, for any number of waiters at the same time, by primary key.
SELECT id::text, task_name, status, result, failed_reason, error_code
FROM horsies_tasks WHERE id = ANY(%(ids)s::uuid[])

-- name: read_task
-- One task for handle.info, by primary key. The result and the reason for the failure can be large and are returned
-- only on request.
SELECT id::text AS task_id, task_name, status, queue_name, priority, retry_count, max_retries, next_retry_at,
    sent_at, enqueued_at, claimed_at, started_at, completed_at, failed_at, worker_hostname, worker_pid,
    worker_process_name, error_code,
    CASE WHEN %(include_result)s THEN result END AS result,
    CASE WHEN %(include_failed_reason)s THEN failed_reason END AS failed_reason
FROM horsies_tasks WHERE id = %(id)s::uuid

-- name: read_logs
-- The logged lines of one task's attempts, oldest first; if an attempt is given, only its lines.
SELECT attempt, body, dropped, cut_after, created_at FROM horsies_task_logs
WHERE task_id = %(id)s::uuid AND (%(attempt)s::integer IS NULL OR attempt = %(attempt)s)
ORDER BY generation

-- name: read_attempts
-- The finished attempts of one task, newest first, by the unique index on (task_id, attempt).
SELECT task_id::text, attempt, outcome, will_retry, started_at, finished_at, error_code, error_message,
    failed_reason, worker_id, worker_hostname, worker_pid, worker_process_name, retry_reason,
    fingerprint, exception_type, raised_in
FROM horsies_task_attempts WHERE task_id = %(id)s::uuid ORDER BY attempt DESC

-- name: read_progress
-- One task's latest progress report, by primary key.
SELECT attempt, done, total, note, reported_at FROM horsies_task_progress WHERE task_id = %(id)s::uuid

-- name: cancel_tasks
-- Cancel waiting tasks and, if "running" is set, request RUNNING tasks to stop; see horsies_cancel_tasks_v1.
SELECT id::text, was_status, applied FROM horsies_cancel_tasks_v1(%(ids)s::uuid[], %(running)s::boolean)
