-- Statements for tasks that a worker has claimed and cannot call: it lacks their sub-workflow, or the stored call
-- does not fit its parameters. None of them changes a task.

-- name: refuse_tasks
-- Write down claimed tasks that this worker cannot call, by the fingerprint of its parameters. All workers with
-- that fingerprint leave them out of their claims: for the grace period, and then for a while after each look.
INSERT INTO horsies_refusals AS known (task_id, fingerprint, worker_id, message, until)
SELECT asked.id, asked.fingerprint, %(worker_id)s, asked.message,
    clock_timestamp() + %(grace_seconds)s::float8 * interval '1 second'
FROM unnest(%(ids)s::uuid[], %(fingerprints)s::text[], %(messages)s::text[]) AS asked (id, fingerprint, message)
ON CONFLICT (task_id, fingerprint) DO UPDATE SET
    worker_id = EXCLUDED.worker_id, message = EXCLUDED.message,
    until = greatest(known.since + %(grace_seconds)s::float8 * interval '1 second',
        clock_timestamp() + %(pause_seconds)s::float8 * interval '1 second')
RETURNING known.task_id::text AS id, known.fingerprint,
    extract(epoch FROM known.until - clock_timestamp())::float8 AS seconds

-- name: find_takers
-- For each of these refused tasks: whether a worker of its queue may run it ("is_known"), and whether one could
-- within the grace period, or the first refusal is not as old ("is_recent"). A worker may if it registered the
-- task or sub-workflow with parameters that have not refused this task, or registered no names at all.
SELECT asked.id::text, count(worker.worker_id) FILTER (WHERE worker.stopped_at IS NULL) > 0 AS is_known,
    count(worker.worker_id) > 0
        OR coalesce((SELECT min(refusal.since) FROM horsies_refusals AS refusal WHERE refusal.task_id = asked.id)
                    > now() - %(grace_seconds)s::float8 * interval '1 second', true) AS is_recent
FROM unnest(%(ids)s::uuid[], %(kinds)s::text[], %(names)s::text[], %(queues)s::text[])
    AS asked (id, kind, name, queue_name)
LEFT JOIN horsies_workers AS worker
    ON asked.queue_name = ANY(worker.queues)
    AND (worker.stopped_at IS NULL
         OR worker.stopped_at > now() - %(grace_seconds)s::float8 * interval '1 second')
    AND (worker.known_tasks IS NULL OR worker.known_tasks -> asked.kind ? asked.name)
    AND NOT EXISTS (
        SELECT FROM horsies_refusals AS refusal
        WHERE refusal.task_id = asked.id
          AND refusal.fingerprint = worker.known_tasks -> asked.kind ->> asked.name)
GROUP BY asked.id

-- name: forget_refusals
-- Of tasks that fail now: if one is retried, its grace period begins anew.
DELETE FROM horsies_refusals WHERE task_id = ANY(%(ids)s::uuid[]) RETURNING task_id::text AS id

-- name: delete_refusals
-- Rows whose task has ended or is gone.
DELETE FROM horsies_refusals AS refusal
WHERE NOT EXISTS (
    SELECT FROM horsies_tasks AS task
    WHERE task.id = refusal.task_id AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING'))
RETURNING refusal.task_id::text AS id
