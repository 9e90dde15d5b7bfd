-- Statements of durable functions: the steps of a run, its waits and its signals.

-- name: record_step
-- Record a step of a running attempt: one row, in one transaction. If no row is returned, either the step was recorded
-- already (by an earlier attempt, or by this attempt, which lost the response), or the run belongs to another attempt.
INSERT INTO horsies_steps (
    task_id, name, position, kind, result, error, due_at, attempt, started_at, ended_at)
SELECT task.id, %(name)s, %(position)s::integer, %(kind)s, %(result)s::text, %(error)s::text,
    clock_timestamp() + %(due_seconds)s::float8 * interval '1 second', task.retry_count + 1,
    clock_timestamp() - %(run_us)s::bigint * interval '1 microsecond', clock_timestamp()
FROM horsies_tasks AS task
WHERE task.id = %(task_id)s::uuid AND task.generation = %(generation)s::integer
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
ON CONFLICT (task_id, name) DO NOTHING
RETURNING name

-- name: hold_run
-- Lock the row of a run until the transaction has committed. Between this statement and the COMMIT, no other attempt
-- can start and no cancellation can be accepted. If no row is returned, the run belongs to another attempt.
SELECT id::text AS task_id FROM horsies_tasks AS task
WHERE task.id = %(task_id)s::uuid AND task.generation = %(generation)s::integer
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
FOR SHARE

-- name: limit_run
-- Store the deadline of a run at its first call. "is_late" means that the run was cancelled because of its deadline. If
-- no row is returned, the run belongs to another attempt.
WITH mine AS (
    SELECT task.id FROM horsies_tasks AS task
    WHERE task.id = %(task_id)s::uuid AND task.generation = %(generation)s::integer
      AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'),
stored AS (
    INSERT INTO horsies_deadlines (task_id, ends_at)
    SELECT mine.id, clock_timestamp() + %(seconds)s::float8 * interval '1 second' FROM mine
    ON CONFLICT (task_id) DO NOTHING)
SELECT EXISTS (
    SELECT FROM horsies_deadlines AS known WHERE known.task_id = mine.id AND known.reached_at IS NOT NULL) AS is_late
FROM mine

-- name: end_late_runs
-- PENDING, CLAIMED or RUNNING -> CANCELLED after the deadline of the run, and after its clean-up; see
-- horsies_end_late_runs_v1.
SELECT ended::text AS id FROM horsies_end_late_runs_v1(
    %(limit)s::integer, %(excluded)s::uuid[], %(only)s::uuid[]) AS ended

-- name: load_steps
-- All steps of a run, in the order in which they were recorded. The record of what the run waited for is deleted,
-- because the wait is over.
WITH over AS (
    DELETE FROM horsies_parked AS parked
    WHERE parked.task_id = %(task_id)s::uuid AND parked.generation < %(generation)s::integer)
SELECT name, position, kind, result, error,
    extract(epoch FROM due_at - clock_timestamp())::float8 AS left_seconds
FROM horsies_steps WHERE task_id = %(task_id)s::uuid ORDER BY position, name

-- name: read_step
-- Return a step that was recorded already. If no row is returned, the run belongs to another attempt, which continues
-- the run.
SELECT step.name, step.position, step.kind, step.result, step.error,
    extract(epoch FROM step.due_at - clock_timestamp())::float8 AS left_seconds
FROM horsies_steps AS step JOIN horsies_tasks AS task ON task.id = step.task_id
WHERE step.task_id = %(task_id)s::uuid AND step.name = %(name)s AND task.generation = %(generation)s::integer
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'

-- name: park_tasks
-- RUNNING -> PENDING for runs of durable functions that wait; see horsies_park_v1.
SELECT parked::text AS task_id FROM horsies_park_v1(
    %(worker_id)s, %(ids)s::uuid[], %(generations)s::integer[], %(requests)s::text[]) AS parked

-- name: clean_up_runs
-- RUNNING -> PENDING for runs with an accepted cancel that have clean-up steps; see horsies_clean_up_v1.
SELECT run::text AS task_id FROM horsies_clean_up_v1(
    %(worker_id)s, %(ids)s::uuid[], %(generations)s::integer[]) AS run

-- name: take_signal
SELECT kind, result, error FROM horsies_take_signal_v1(
    %(worker_id)s, %(task_id)s::uuid, %(generation)s::integer, %(step)s, %(position)s::integer,
    %(names)s::text[])

-- name: find_events
-- Return the children in this list that have ended, and the signals that are stored for the run.
SELECT child.id::text AS name FROM unnest(%(children)s::uuid[]) AS child (id) WHERE horsies_has_ended(child.id)
UNION ALL
SELECT DISTINCT sent.name FROM horsies_task_signals AS sent
WHERE sent.task_id = %(task_id)s::uuid AND sent.name = ANY(%(signals)s::text[])

-- name: signal_task
SELECT horsies_signal_task_v1(%(task_id)s::uuid, %(name)s, %(value)s) AS answer

-- name: resume_task
SELECT horsies_resume_task_v1(%(task_id)s::uuid) AS answer

-- name: reset_task
SELECT horsies_reset_task_v1(%(task_id)s::uuid, %(step)s) AS answer

-- name: read_run
-- A run of a durable function, what it waits for if it is parked, and what workers have registered about its function.
-- The start of its arguments shows whether they are encrypted.
SELECT task.task_name, task.status, task.generation, task.held, parked.since, parked.until, parked.signals,
    parked.children::text[] AS children, parked.problem, defaults.is_durable, defaults.signals AS declared,
    coalesce(defaults.encrypts, false) AS encrypts, left(task.args, 64) AS args_start,
    left(task.kwargs, 64) AS kwargs_start, deadline.ends_at AS deadline
FROM horsies_tasks AS task LEFT JOIN horsies_parked AS parked
    ON parked.task_id = task.id AND parked.generation = task.generation
    AND coalesce(task.status, '') = 'PENDING'
LEFT JOIN horsies_task_defaults AS defaults ON defaults.task_name = task.task_name
LEFT JOIN horsies_deadlines AS deadline ON deadline.task_id = task.id
WHERE task.id = %(task_id)s::uuid

-- name: list_steps
-- The recorded steps of a run.
SELECT name, position, kind, result, error, due_at, attempt, started_at, ended_at
FROM horsies_steps WHERE task_id = %(task_id)s::uuid ORDER BY position, name

-- name: list_newest_steps
-- The newest steps of a run, for a page. A result is left out if it is larger than "max_bytes", or if "payload" is not
-- set.
SELECT name, position, kind, octet_length(result) AS result_bytes,
    CASE WHEN %(payload)s::boolean AND octet_length(result) <= %(max_bytes)s::integer THEN result END AS result,
    error, due_at, attempt, started_at, ended_at
FROM horsies_steps WHERE task_id = %(task_id)s::uuid ORDER BY position DESC, name LIMIT %(limit)s

-- name: find_held_runs
-- Runs that are held because their code does not fit their recorded steps, oldest first, with the total count.
SELECT task.id::text, task.task_name, parked.problem, parked.since, count(*) OVER () AS total
FROM horsies_parked AS parked JOIN horsies_tasks AS task
    ON task.id = parked.task_id AND task.generation = parked.generation
WHERE parked.problem IS NOT NULL AND coalesce(task.status, '') = 'PENDING'
ORDER BY parked.since, task.id LIMIT %(limit)s

-- name: count_parked
-- The number of parked runs, and of runs that are held because their code does not fit their recorded steps; both
-- together are exact up to "most".
SELECT count(*) FILTER (WHERE wait.problem IS NULL) AS parked,
    count(*) FILTER (WHERE wait.problem IS NOT NULL) AS held
FROM (SELECT parked.problem FROM horsies_parked AS parked JOIN horsies_tasks AS task
          ON task.id = parked.task_id AND task.generation = parked.generation
      WHERE coalesce(task.status, '') = 'PENDING' LIMIT %(most)s::integer + 1) AS wait

-- name: list_newest_runs
-- The newest runs of durable functions, or only the failed runs, by one index probe for recorded steps for each of the
-- newest "window" runs. A run's status is a scalar subquery, because a join might be planned as a hash over the whole
-- history.
WITH RECURSIVE runs AS (
    (SELECT task_id FROM horsies_steps ORDER BY task_id DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT step.task_id FROM horsies_steps AS step
            WHERE step.task_id < runs.task_id ORDER BY step.task_id DESC LIMIT 1)
    FROM runs WHERE runs.task_id IS NOT NULL)
SELECT newest.task_id::text FROM (
    SELECT task_id, (SELECT task.status FROM horsies_tasks AS task WHERE task.id = runs.task_id) AS status
    FROM runs WHERE task_id IS NOT NULL LIMIT %(window)s::integer) AS newest
WHERE newest.status = 'FAILED' OR NOT %(failed_only)s::boolean
ORDER BY newest.task_id DESC LIMIT %(limit)s::integer

-- name: read_call
-- The name and arguments of a run, for a replay of its code.
SELECT task_name, status, coalesce(args, '[]') AS args, coalesce(kwargs, '{}') AS kwargs
FROM horsies_tasks WHERE id = %(task_id)s::uuid
