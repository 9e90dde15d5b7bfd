-- Statements for use after the database has refused a batch of changes. They find the tasks of the batch one by one,
-- except tasks that wait for their next attempt, and they keep the record of blocked tasks and runs. All of them are
-- rarely used, and none changes a task.

-- name: note_blocked
-- Record blocked tasks or runs, one row for each. A row is returned only if it is new, so that only one worker logs it,
-- with the task's options, which contain its headers. The current state is stored too, so that a later change of the
-- task or run can be noticed. Parameters: a refused change: its task or run, the worker, and the error on one line.
INSERT INTO horsies_blocked AS known (id, kind, workflow_id, status, generation, action, error, worker_id)
SELECT task.id, 'task', task.workflow_id, task.status, task.generation, %(action)s, %(error)s, %(worker_id)s
FROM horsies_tasks AS task WHERE task.id = %(id)s::uuid AND NOT %(is_run)s::boolean
UNION ALL
SELECT run.id, 'run', run.id, run.status, 0, %(action)s, %(error)s, %(worker_id)s
FROM horsies_workflows AS run WHERE run.id = %(id)s::uuid AND %(is_run)s::boolean
ON CONFLICT (id, kind) DO UPDATE SET
    status = EXCLUDED.status, generation = EXCLUDED.generation, action = EXCLUDED.action,
    error = EXCLUDED.error, worker_id = EXCLUDED.worker_id, since = EXCLUDED.since
WHERE (known.status, known.generation) IS DISTINCT FROM (EXCLUDED.status, EXCLUDED.generation)
RETURNING known.id::text, (
    SELECT task.task_options FROM horsies_tasks AS task WHERE task.id = known.id AND known.kind = 'task'
) AS task_options

-- name: limit_lock_wait
-- Limit the waits for locks in the rest of the transaction. A task that is alone in its transaction need not wait long
-- for a lock, because its change is tried again later.
SELECT set_config('lock_timeout', %(milliseconds)s::integer::text, true) AS setting

-- name: list_blocked
-- The blocked tasks and runs, oldest first, with the total count.
SELECT id::text, kind, workflow_id::text, action, error, worker_id, since,
    extract(epoch FROM clock_timestamp() - since)::float8 AS blocked_seconds, count(*) OVER () AS total
FROM horsies_blocked_v1() ORDER BY since, id LIMIT %(limit)s

-- name: delete_unblocked
-- Delete the rows of tasks and runs that are no longer in the state in which they were blocked.
DELETE FROM horsies_blocked AS known
WHERE NOT EXISTS (SELECT FROM horsies_blocked_v1() AS kept WHERE (kept.id, kept.kind) = (known.id, known.kind))
RETURNING known.id::text

-- name: find_late
-- The tasks that expire_tasks would expire, by the index on deadlines. Parameters: how many tasks to find, and which to
-- exclude.
SELECT id::text, workflow_id::text FROM horsies_tasks
WHERE status = 'PENDING' AND good_until IS NOT NULL AND good_until <= now() AND id <> ALL(%(excluded)s::uuid[])
ORDER BY good_until LIMIT %(limit)s

-- name: find_late_runs
-- The runs that end_late_runs would end, by the index that it uses.
SELECT task_id::text AS id, (
    SELECT task.workflow_id::text FROM horsies_tasks AS task WHERE task.id = deadline.task_id) AS workflow_id
FROM horsies_deadlines AS deadline
WHERE reached_at IS NULL AND ends_at <= now() AND task_id <> ALL(%(excluded)s::uuid[])
ORDER BY ends_at LIMIT %(limit)s

-- name: find_lapsed
-- The tasks that release_lapsed would release, by the index that it uses.
SELECT id::text, workflow_id::text FROM horsies_tasks
WHERE status = 'CLAIMED' AND claim_expires_at <= now() AND id <> ALL(%(excluded)s::uuid[])
ORDER BY claim_expires_at LIMIT %(limit)s

-- name: find_unheld
-- The tasks that release_unstarted would release. Parameters: a worker, and the attempts that it actually holds.
SELECT task.id::text, task.workflow_id::text, task.generation FROM horsies_tasks AS task
WHERE task.claimed_by_worker_id = %(worker_id)s AND task.status IN ('CLAIMED', 'RUNNING')
  AND NOT EXISTS (
      SELECT FROM unnest(%(held_ids)s::uuid[], %(held_generations)s::integer[]) AS held (id, generation)
      WHERE held.id = task.id AND held.generation = task.generation)
ORDER BY task.id

-- name: find_due
-- The tasks that a claim would take, queue by queue in the given order: tasks without a key by the claim index, and the
-- first task of each key. With "names", only tasks with these names that have been due for the grace period, like the
-- tasks that claim_unresolvable takes; runs of durable functions are left out.
SELECT due.id::text, due.workflow_id::text, queue.name AS queue_name, due.priority,
    due.enqueued_at::text AS enqueued_at, due.lane
FROM unnest(%(queues)s::text[]) WITH ORDINALITY AS queue (name, place)
CROSS JOIN (
    SELECT CASE WHEN %(names)s::text[] IS NOT NULL THEN ARRAY(
        SELECT one.name FROM unnest(%(names)s::text[]) AS one (name) WHERE NOT horsies_is_durable_v1(one.name)) END
) AS failing (names)
CROSS JOIN LATERAL ((
    SELECT task.id, task.workflow_id, task.priority, task.enqueued_at, task.lane FROM horsies_tasks AS task
    WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue.name
      AND task.enqueued_at <= clock_timestamp() - %(grace_seconds)s::float8 * interval '1 second'
      AND (task.good_until IS NULL OR task.good_until > clock_timestamp())
      AND task.id <> ALL(%(excluded)s::uuid[]) AND task.task_name <> ALL(%(unknown_names)s::text[])
      AND NOT horsies_is_refused(task.id, %(refused_by)s::text[], clock_timestamp())
      AND (failing.names IS NULL OR task.task_name = ANY(failing.names))
    ORDER BY task.priority, task.enqueued_at, task.id LIMIT %(limit)s)
    UNION ALL
    SELECT head.* FROM horsies_first_of_lanes_v1(
        queue.name, %(grace_seconds)s::float8, %(excluded)s::uuid[], %(unknown_names)s::text[],
        %(refused_by)s::text[], failing.names, %(limit)s::integer) AS head) AS due
WHERE NOT EXISTS (
    SELECT FROM horsies_queues AS stored WHERE stored.queue_name = queue.name AND stored.paused_at IS NOT NULL)
ORDER BY queue.place, due.priority, due.enqueued_at, due.id LIMIT %(limit)s
