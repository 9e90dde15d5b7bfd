-- Statements of durable functions: the steps of a run, its waits and its signals.

-- name: record_step
-- A step of a running attempt: one row, in one transaction. Without a row in return the step is recorded already, by
-- an earlier attempt or by this one before its answer was lost; or the run belongs to another attempt.
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

-- name: load_steps
-- All steps of a run, in the order in which they were recorded.
SELECT name, position, kind, result, error,
    extract(epoch FROM due_at - clock_timestamp())::float8 AS left_seconds
FROM horsies_steps WHERE task_id = %(task_id)s::uuid ORDER BY position, name

-- name: read_step
-- A step that is recorded already. Without a row the run belongs to another attempt, which continues it.
SELECT step.name, step.position, step.kind, step.result, step.error,
    extract(epoch FROM step.due_at - clock_timestamp())::float8 AS left_seconds
FROM horsies_steps AS step JOIN horsies_tasks AS task ON task.id = step.task_id
WHERE step.task_id = %(task_id)s::uuid AND step.name = %(name)s AND task.generation = %(generation)s::integer
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'

-- name: park_tasks
-- RUNNING -> PENDING for runs of durable functions that wait; see horsies_park_v1.
SELECT parked::text AS task_id FROM horsies_park_v1(
    %(worker_id)s, %(ids)s::uuid[], %(generations)s::integer[], %(requests)s::text[]) AS parked

-- name: take_signal
SELECT kind, result, error FROM horsies_take_signal_v1(
    %(worker_id)s, %(task_id)s::uuid, %(generation)s::integer, %(step)s, %(position)s::integer,
    %(names)s::text[])

-- name: signal_task
SELECT horsies_signal_task_v1(%(task_id)s::uuid, %(name)s, %(value)s) AS answer

-- name: resume_task
SELECT horsies_resume_task_v1(%(task_id)s::uuid) AS answer

-- name: reset_task
SELECT horsies_reset_task_v1(%(task_id)s::uuid, %(step)s) AS answer

-- name: read_run
-- A run of a durable function, and what it waits for if it is parked.
SELECT task.task_name, task.status, task.generation, task.held, parked.since, parked.until, parked.signals,
    parked.children::text[] AS children, parked.problem
FROM horsies_tasks AS task LEFT JOIN horsies_parked AS parked
    ON parked.task_id = task.id AND parked.generation = task.generation
    AND coalesce(task.status, '') = 'PENDING'
WHERE task.id = %(task_id)s::uuid

-- name: list_steps
-- The recorded steps of a run, as people see them.
SELECT name, position, kind, result, error, due_at, attempt, started_at, ended_at
FROM horsies_steps WHERE task_id = %(task_id)s::uuid ORDER BY position, name

-- name: read_call
-- The call of a run, for a replay of its code.
SELECT task_name, status, coalesce(args, '[]') AS args, coalesce(kwargs, '{}') AS kwargs
FROM horsies_tasks WHERE id = %(task_id)s::uuid
