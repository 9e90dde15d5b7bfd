-- Statements for single look-ups: search by argument, groups of failures, and tasks related to a task. Each reads a
-- bounded number of rows, regardless of the length of the history.

-- name: search_tasks
-- The newest tasks whose arguments contain the texts in "key" and "needle". The arguments are compared as text and not
-- as jsonb, because manually stored arguments need not be valid JSON, and jsonb does not allow \u0000. The caller
-- parses the few rows that are found and keeps the exact matches. The window bounds the scan; texts above max_bytes are
-- skipped before they are decompressed. "positional" lists the tasks in which the searched name is a positional
-- parameter, so that their text does not contain the name.
SELECT newest.id::text, task_name, queue_name, status, retry_count, max_retries, error_code, created_at,
    enqueued_at, started_at, finished_at, worker_hostname, worker_pid,
    extract(epoch FROM now() - created_at)::float8 AS age_seconds, args, kwargs
FROM (
    SELECT id, task_name, queue_name, status, retry_count, max_retries, error_code, created_at, enqueued_at,
        started_at, coalesce(completed_at, failed_at) AS finished_at, worker_hostname, worker_pid,
        claimed_by_worker_id, args, kwargs
    FROM horsies_tasks WHERE id < %(before)s::uuid AND id >= %(since)s::uuid
    ORDER BY id DESC LIMIT %(window)s::integer) AS newest
WHERE (cardinality(%(statuses)s::text[]) = 0 OR status = ANY(%(statuses)s::text[]))
  AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
  AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
  AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
  AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
       OR worker_hostname = ANY(%(workers)s::text[]))
  AND (NOT %(retried_only)s::boolean OR retry_count > 0)
  AND coalesce(octet_length(args), 0) + coalesce(octet_length(kwargs), 0) <= %(max_bytes)s::integer
  AND (strpos(kwargs, %(key)s) > 0 AND strpos(kwargs, %(needle)s) > 0
       OR strpos(args, %(key)s) > 0 AND strpos(args, %(needle)s) > 0
       OR task_name = ANY(%(positional)s::text[]) AND strpos(args, %(needle)s) > 0)
ORDER BY newest.id DESC LIMIT %(limit)s::integer

-- name: end_of_attempts
-- The id of the oldest of the newest "sample" attempts, by an index-only scan of the primary key. If no row is
-- returned, all attempts are in the sample.
SELECT id, finished_at FROM horsies_task_attempts ORDER BY id DESC OFFSET %(sample)s::integer - 1 LIMIT 1

-- name: group_failures
-- The newest failed attempts by task, error code and fingerprint. Names are scalar subqueries, because a join might be
-- planned as a hash over the whole history. A failure is final unless the task is retried. An attempt that an operator
-- cancelled is not a failure. "first_at" and the two releases come from the first and the newest attempt on record with
-- the same fingerprint, by the index on fingerprints. An encrypted message is shortened later, after it is decrypted.
-- The times are for a sparkline. Parameters: the first id to read (from_id), the maximum number of failed attempts, and
-- task names; an empty list matches every task.
WITH newest AS MATERIALIZED (
    SELECT id, task_id, will_retry, coalesce(error_code, '') AS error_code, worker_hostname,
        worker_id, finished_at, fingerprint, exception_type, raised_in
    FROM horsies_task_attempts WHERE outcome <> 'COMPLETED'
        AND error_code IS DISTINCT FROM 'TASK_CANCELLED' AND id >= %(from_id)s::bigint
    ORDER BY id DESC LIMIT %(limit)s::integer),
named AS MATERIALIZED (
    SELECT newest.*,
        (SELECT task.task_name FROM horsies_tasks AS task WHERE task.id = newest.task_id) AS task_name
    FROM newest),
grouped AS MATERIALIZED (
    SELECT task_name, nullif(error_code, '') AS error_code, fingerprint, count(*) AS total,
        count(*) FILTER (WHERE NOT will_retry) AS final, min(finished_at) AS first_at, max(finished_at) AS last_at,
        (array_agg(exception_type ORDER BY id DESC))[1] AS exception_type,
        (array_agg(raised_in ORDER BY id DESC))[1] AS raised_in,
        max(id) AS newest_id,
        (array_agg(task_id::text ORDER BY id DESC))[1] AS newest_task_id,
        (array_agg(worker_id ORDER BY id DESC))[1] AS newest_worker_id,
        (array_agg(DISTINCT worker_hostname::text) FILTER (WHERE worker_hostname IS NOT NULL))[1:5] AS hosts,
        array_agg(extract(epoch FROM finished_at)::float8) AS times
    FROM named
    WHERE task_name IS NOT NULL
      AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
    GROUP BY task_name, named.error_code, fingerprint
    ORDER BY total DESC, task_name, named.error_code, fingerprint LIMIT 50)
SELECT grouped.task_name, grouped.error_code, grouped.total, grouped.final,
    coalesce(earliest.finished_at, grouped.first_at) AS first_at, grouped.last_at,
    (SELECT left(attempt.error_message, CASE WHEN starts_with(attempt.error_message, '{"__horsies_encrypted__"')
        THEN 20000 ELSE 200 END)
        FROM horsies_task_attempts AS attempt WHERE attempt.id = grouped.newest_id) AS message,
    grouped.newest_task_id, grouped.hosts, grouped.times, grouped.fingerprint, grouped.exception_type,
    grouped.raised_in,
    (SELECT worker.release FROM horsies_workers AS worker WHERE worker.worker_id = earliest.worker_id)
        AS first_release,
    (SELECT worker.release FROM horsies_workers AS worker WHERE worker.worker_id = grouped.newest_worker_id)
        AS last_release
FROM grouped LEFT JOIN LATERAL (
    SELECT attempt.finished_at, attempt.worker_id FROM horsies_task_attempts AS attempt
    WHERE attempt.fingerprint = grouped.fingerprint ORDER BY attempt.id LIMIT 1) AS earliest ON true
ORDER BY grouped.total DESC, grouped.task_name, grouped.error_code, grouped.fingerprint

-- name: read_failure
-- One group of failures: up to "limit" of its newest attempts, by the index on fingerprints, and the first attempt on
-- record. The columns are the same as those of group_failures; no row means that no attempt on record has this
-- fingerprint.
WITH newest AS MATERIALIZED (
    SELECT id, task_id, will_retry, error_code, worker_hostname, worker_id, finished_at, exception_type, raised_in
    FROM horsies_task_attempts WHERE fingerprint = %(fingerprint)s::text
    ORDER BY id DESC LIMIT %(limit)s::integer),
last AS MATERIALIZED (SELECT * FROM newest ORDER BY id DESC LIMIT 1),
earliest AS MATERIALIZED (
    SELECT finished_at, worker_id FROM horsies_task_attempts WHERE fingerprint = %(fingerprint)s::text
    ORDER BY id LIMIT 1)
SELECT coalesce((SELECT task.task_name::text FROM horsies_tasks AS task WHERE task.id = last.task_id), '')
        AS task_name,
    last.error_code, (SELECT count(*) FROM newest) AS total,
    (SELECT count(*) FROM newest WHERE NOT will_retry) AS final, earliest.finished_at AS first_at,
    last.finished_at AS last_at,
    (SELECT left(attempt.error_message, CASE WHEN starts_with(attempt.error_message, '{"__horsies_encrypted__"')
        THEN 20000 ELSE 200 END)
        FROM horsies_task_attempts AS attempt WHERE attempt.id = last.id) AS message, last.task_id::text AS newest_task_id,
    (SELECT (array_agg(DISTINCT worker_hostname::text))[1:5] FROM newest WHERE worker_hostname IS NOT NULL) AS hosts,
    ARRAY(SELECT extract(epoch FROM finished_at)::float8 FROM newest) AS times,
    %(fingerprint)s::text AS fingerprint, last.exception_type, last.raised_in,
    (SELECT worker.release FROM horsies_workers AS worker WHERE worker.worker_id = earliest.worker_id)
        AS first_release,
    (SELECT worker.release FROM horsies_workers AS worker WHERE worker.worker_id = last.worker_id) AS last_release
FROM last CROSS JOIN earliest

-- name: list_resent
-- The tasks that an operator created by sending this task again, by the index on retried_from_task_id.
SELECT id::text, status, created_at FROM horsies_tasks WHERE retried_from_task_id = %(id)s::uuid
ORDER BY horsies_tasks.id LIMIT 20

-- name: find_subject
-- Whether an id belongs to a task or to a run, by two primary key probes.
SELECT 'task' AS kind FROM horsies_tasks WHERE id = %(id)s::uuid
UNION ALL SELECT 'run' FROM horsies_workflows WHERE id = %(id)s::uuid

-- name: newest_trace
-- The span of a task's newest attempt with a span; a task has few attempts.
SELECT traceparent FROM horsies_task_attempts WHERE task_id = %(id)s::uuid AND traceparent IS NOT NULL
ORDER BY attempt DESC LIMIT 1

-- name: newest_heartbeat
-- The latest heartbeat of a running task: one index probe.
SELECT sent_at FROM horsies_heartbeats WHERE task_id = %(id)s::uuid AND role = 'runner'
ORDER BY sent_at DESC LIMIT 1

-- name: read_request
-- One task in the same form as a claim returns it, but without claiming it: the columns are the same as those of
-- claim_tasks.
SELECT id::text, generation, task_name::text, queue_name::text, args, kwargs, retry_count, max_retries,
    task_options, NULL::integer AS timeout_ms, NULL::integer AS worker_pid, workflow_id::text, workflow_node_index,
    workflow_item_index, workflow_inputs, priority, enqueued_at::text AS enqueued_at,
    concat(sent_at, E'\n', enqueued_at, E'\n', good_until, E'\n', scheduled_for, E'\n', workflow_item_index,
        E'\n', workflow_id, E'\n',
        (SELECT node.node_id FROM horsies_workflow_tasks AS node
         WHERE node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index),
        E'\n', schedule_name) AS details,
    burst, lane
FROM horsies_tasks AS task WHERE id = %(id)s::uuid
