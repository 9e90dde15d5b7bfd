-- Statements for the search by parts of names, keys of runs, beginnings of ids, and words in error messages. Each reads
-- a bounded number of rows, regardless of the length of the history.

-- name: find_by_prefix
-- Tasks and runs whose ids are in this range, newest first: one range in each primary key.
SELECT found.kind, found.id::text AS id, found.name, found.status FROM (
    (SELECT 'task' AS kind, id, task_name::text AS name, status::text AS status FROM horsies_tasks
     WHERE id >= %(first)s::uuid AND id <= %(last)s::uuid ORDER BY id DESC LIMIT %(limit)s::integer)
    UNION ALL
    (SELECT 'run', id, name::text, status::text FROM horsies_workflows
     WHERE id >= %(first)s::uuid AND id <= %(last)s::uuid ORDER BY id DESC LIMIT %(limit)s::integer)) AS found
ORDER BY found.id DESC LIMIT %(limit)s::integer

-- name: search_task_names
-- Names of tasks that contain the text, with the number of their attempts in the last day. The names come from the
-- counts by minute, and from the newest workers, which also know names without attempts.
SELECT found.name, sum(found.attempts)::bigint AS total FROM (
    SELECT task_name::text AS name, done + failed + retried + crashed + stopped AS attempts FROM horsies_measures
    WHERE minute >= now() - interval '1 day' AND strpos(lower(task_name), %(text)s) > 0
    UNION ALL
    SELECT known.name, 0 FROM (
        SELECT worker.known_tasks FROM horsies_workers AS worker
        WHERE worker.stopped_at IS NULL ORDER BY worker.worker_id DESC LIMIT 20) AS newest,
        LATERAL jsonb_object_keys(newest.known_tasks -> 'tasks') AS known (name)
    WHERE strpos(lower(known.name), %(text)s) > 0) AS found
WHERE found.name <> '' GROUP BY found.name ORDER BY total DESC, found.name LIMIT %(limit)s::integer

-- name: search_schedules
-- Names are searched in the index alone; table rows are read only for matching names.
SELECT found.schedule_name::text AS name, (
    SELECT state.run_count::bigint FROM horsies_schedule_state AS state WHERE state.schedule_name = found.schedule_name
) AS total
FROM (SELECT schedule_name FROM horsies_schedule_state
      WHERE strpos(lower(schedule_name), %(text)s) > 0 ORDER BY schedule_name LIMIT %(limit)s::integer) AS found
ORDER BY found.schedule_name

-- name: search_runs
-- The newest runs whose key or name contains the text, and the number of all such runs.
SELECT newest.id::text AS id, newest.name::text AS name, newest.workflow_key AS key, newest.status::text AS status,
    count(*) OVER () AS total
FROM (SELECT id, name, workflow_key, status FROM horsies_workflows
      ORDER BY created_at DESC, id DESC LIMIT %(window)s::integer) AS newest
WHERE strpos(lower(newest.workflow_key), %(text)s) > 0 OR strpos(lower(newest.name), %(text)s) > 0
ORDER BY newest.id DESC LIMIT %(limit)s::integer

-- name: search_errors
-- Failures among the newest attempts whose message, code, exception class or place in the code contains the text,
-- grouped by task and fingerprint. Names are scalar subqueries, because a join might be planned as a hash over the
-- whole history.
WITH newest AS MATERIALIZED (
    SELECT id, task_id, outcome, coalesce(error_code, '') AS error_code, left(error_message, 2000) AS message,
        fingerprint, exception_type, raised_in
    FROM horsies_task_attempts ORDER BY id DESC LIMIT %(window)s::integer),
named AS MATERIALIZED (
    SELECT newest.*, (SELECT task.task_name::text FROM horsies_tasks AS task WHERE task.id = newest.task_id) AS name
    FROM newest WHERE outcome <> 'COMPLETED'
      AND (strpos(lower(message), %(text)s) > 0 OR strpos(lower(error_code), %(text)s) > 0
           OR strpos(lower(exception_type), %(text)s) > 0 OR strpos(lower(raised_in), %(text)s) > 0
           OR fingerprint = %(text)s))
SELECT name, nullif(error_code, '') AS error_code, count(*) AS total,
    (array_agg(left(message, 200) ORDER BY id DESC))[1] AS message,
    (array_agg(task_id::text ORDER BY id DESC))[1] AS task_id, fingerprint,
    (array_agg(exception_type ORDER BY id DESC))[1] AS exception_type
FROM named WHERE name IS NOT NULL GROUP BY name, named.error_code, fingerprint
ORDER BY total DESC, name LIMIT %(limit)s::integer
