-- Interventions of operators: pause and resume queues, send a task again.

-- name: pause_queue
-- No worker claims from the queue any more; running tasks go on. Pausing again keeps the first time.
INSERT INTO horsies_queues AS queue (queue_name, paused_at) VALUES (%(name)s, clock_timestamp())
ON CONFLICT (queue_name) DO UPDATE SET
    paused_at = coalesce(queue.paused_at, clock_timestamp()), updated_at = clock_timestamp()
RETURNING queue.queue_name AS name, queue.paused_at

-- name: resume_queue
-- Workers claim from the queue again at once: a notification wakes them, as for a new task.
WITH resumed AS (
    INSERT INTO horsies_queues AS queue (queue_name) VALUES (%(name)s)
    ON CONFLICT (queue_name) DO UPDATE SET paused_at = NULL, updated_at = clock_timestamp()
    RETURNING queue.queue_name AS name, queue.paused_at)
SELECT resumed.name, resumed.paused_at
FROM resumed CROSS JOIN LATERAL pg_notify('task_queue_' || resumed.name, '') AS woken

-- name: resend_task
-- Nothing -> PENDING, copied from a task that has ended. That row stays; the new one refers to it, starts its
-- retries anew, and drops the idempotency key and a past deadline. Its span links to the first send and is
-- not a child of it. Returns the row it found, if any.
WITH met AS MATERIALIZED (SELECT * FROM horsies_tasks WHERE id = %(id)s::uuid),
sent AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, retention, enqueue_sha, retried_from_task_id)
    SELECT %(new_id)s::uuid, task_name, queue_name, priority, args, kwargs, now(), now(),
        CASE WHEN good_until > now() THEN good_until END, max_retries,
        replace(task_options, '"trace":{"traceparent"', '"trace":{"later":"1","traceparent"'), timeout_ms, retention,
        enqueue_sha, id
    FROM met WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') AND workflow_id IS NULL
    RETURNING id)
SELECT met.status AS was_status, met.workflow_id IS NOT NULL AS in_workflow, sent.id::text AS new_id
FROM met LEFT JOIN sent ON true

-- name: send_notification
-- A notification on any channel: a ping to the workers, a pong to the process that asked.
SELECT pg_notify(%(channel)s, %(payload)s) IS NOT NULL AS sent
