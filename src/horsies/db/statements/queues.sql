-- Changes by operators: pause and resume queues, and send a task again.

-- name: pause_queue
-- Pause a queue: workers stop claiming from it; running tasks continue. Pausing a paused queue keeps the original time.
-- The notification makes workers return the queue's tasks that have not started.
WITH paused AS (
    INSERT INTO horsies_queues AS queue (queue_name, paused_at) VALUES (%(name)s, clock_timestamp())
    ON CONFLICT (queue_name) DO UPDATE SET
        paused_at = coalesce(queue.paused_at, clock_timestamp()), updated_at = clock_timestamp()
    RETURNING queue.queue_name AS name, queue.paused_at)
SELECT paused.name, paused.paused_at
FROM paused CROSS JOIN LATERAL pg_notify('horsies_pause', paused.name) AS noticed

-- name: resume_queue
-- Resume a queue: workers claim from it again immediately, because they are notified as for a new task.
WITH resumed AS (
    INSERT INTO horsies_queues AS queue (queue_name) VALUES (%(name)s)
    ON CONFLICT (queue_name) DO UPDATE SET paused_at = NULL, updated_at = clock_timestamp()
    RETURNING queue.queue_name AS name, queue.paused_at)
SELECT resumed.name, resumed.paused_at
FROM resumed CROSS JOIN LATERAL pg_notify('task_queue_' || resumed.name, '') AS woken

-- name: resend_tasks
-- Nothing -> PENDING for new tasks, copied from tasks that have ended. The rows of the original tasks stay. A new row
-- refers to its original, counts its retries from zero, and has no idempotency key and no deadline in the past. With
-- "once", tasks that have already been sent again are skipped. The span of a new task links to the original send and is
-- not its child. If a new id already exists, an earlier try of the same request inserted it and its response was lost.
-- A redacted task is not sent again, because its arguments were removed. The lock makes this statement wait for an
-- erasure that has begun: otherwise the copy would keep the erased arguments, and refer to deleted objects. A copy
-- shares the large payload in its arguments with its original. Returns the original rows that were found. Parameters:
-- "once" skips tasks that have already been sent again.
WITH met AS MATERIALIZED (
    SELECT task.*, asked.new_id, %(once)s::boolean AND EXISTS (
        SELECT FROM horsies_tasks AS again WHERE again.retried_from_task_id = asked.id) AS was_resent
    FROM unnest(%(ids)s::uuid[], %(new_ids)s::uuid[]) AS asked (id, new_id)
    CROSS JOIN LATERAL (SELECT * FROM horsies_tasks WHERE id = asked.id OFFSET 0 FOR SHARE) AS task),
sent AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, retention, enqueue_sha, retried_from_task_id, burst, lane_key, lane, held)
    SELECT new_id, task_name, queue_name, priority, args, kwargs, now(), now(),
        CASE WHEN good_until > now() THEN good_until END, max_retries,
        replace(task_options, '"trace":{"traceparent"', '"trace":{"later":"1","traceparent"'),
        timeout_ms, retention, enqueue_sha, id, burst, lane_key, lane, lane_key IS NOT NULL
    FROM met WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') AND workflow_id IS NULL
      AND NOT was_resent AND redacted_at IS NULL
    ON CONFLICT DO NOTHING
    RETURNING id, retried_from_task_id, args, kwargs),
shared AS (
    INSERT INTO horsies_payload_owners (owner_id, payload_id)
    SELECT sent.id, owner.payload_id FROM sent
    JOIN horsies_payload_owners AS owner ON owner.owner_id = sent.retried_from_task_id
    WHERE strpos(sent.args, owner.payload_id::text) > 0 OR strpos(sent.kwargs, owner.payload_id::text) > 0)
SELECT met.status AS was_status, met.workflow_id IS NOT NULL AS in_workflow, met.was_resent,
    met.redacted_at IS NOT NULL AS is_redacted, sent.id::text AS new_id
FROM met LEFT JOIN sent ON sent.id = met.new_id

-- name: edit_resent
-- Replace the arguments of a task that was resent in this transaction, before other transactions can see it. The copy
-- no longer shares large payloads that only the original arguments refer to.
WITH edited AS (
    UPDATE horsies_tasks SET args = %(args)s, kwargs = %(kwargs)s
    WHERE id = %(id)s::uuid AND status = 'PENDING' AND generation = 0
    RETURNING id, args, kwargs)
DELETE FROM horsies_payload_owners AS owner USING edited
WHERE owner.owner_id = edited.id
  AND strpos(edited.args, owner.payload_id::text) = 0 AND strpos(edited.kwargs, owner.payload_id::text) = 0

-- name: send_notification
-- Send a notification on any channel: a ping to the workers, or a pong to the process that sent a ping.
SELECT pg_notify(%(channel)s, %(payload)s) IS NOT NULL AS sent
