-- Statements for tasks that a worker has claimed but cannot call, because it lacks their sub-workflow or the stored
-- call does not fit its parameters. None of these statements changes a task.

-- name: refuse_tasks
-- Record claimed tasks that this worker cannot call, with the fingerprint of its parameters. All workers with that
-- fingerprint exclude the tasks from their claims, first for the grace period, and then for a limited time after each
-- check. If an encryption key is missing, 'key:' and the id of the key take the place of the fingerprint, and workers
-- without that key exclude the task for an hour. If a worker has the key but cannot decrypt the payload with it,
-- ':damaged' follows the id. If the store of the payload does not respond, ':unreachable' follows the id of the store,
-- and workers exclude the task for some seconds. Parameters: tasks that this worker cannot call, as columns, with the
-- fingerprints of its own parameters.
INSERT INTO horsies_refusals AS known (task_id, fingerprint, worker_id, message, until)
SELECT asked.id, asked.fingerprint, %(worker_id)s, asked.message,
    clock_timestamp() + CASE WHEN asked.fingerprint LIKE 'key:%%:unreachable' THEN interval '10 seconds'
        WHEN starts_with(asked.fingerprint, 'key:') THEN interval '1 hour'
        ELSE %(grace_seconds)s::float8 * interval '1 second' END
FROM unnest(%(ids)s::uuid[], %(fingerprints)s::text[], %(messages)s::text[]) AS asked (id, fingerprint, message)
ON CONFLICT (task_id, fingerprint) DO UPDATE SET
    worker_id = EXCLUDED.worker_id, message = EXCLUDED.message,
    until = CASE WHEN starts_with(known.fingerprint, 'key:') THEN EXCLUDED.until
        ELSE greatest(known.since + %(grace_seconds)s::float8 * interval '1 second',
            clock_timestamp() + %(pause_seconds)s::float8 * interval '1 second') END
RETURNING known.task_id::text AS id, known.fingerprint,
    extract(epoch FROM known.until - clock_timestamp())::float8 AS seconds

-- name: find_takers
-- Return for each of these refused tasks whether a worker of its queue may be able to run it ("is_known"), and whether
-- such a worker was present, or the first refusal occurred, within the grace period ("is_recent"). A worker may be able
-- to run a task if it registered the task or sub-workflow with parameters that have not refused this task, or if it
-- registered no names at all. "has_record" means that a run of a durable function has recorded steps; such a run is
-- never failed because of its arguments. Parameters: refused tasks, as columns; "kinds" are "tasks" or "workflows".
SELECT asked.id::text, count(worker.worker_id) FILTER (WHERE worker.stopped_at IS NULL) > 0 AS is_known,
    count(worker.worker_id) > 0
        OR coalesce((SELECT min(refusal.since) FROM horsies_refusals AS refusal WHERE refusal.task_id = asked.id)
                    > now() - %(grace_seconds)s::float8 * interval '1 second', true) AS is_recent,
    EXISTS (SELECT FROM horsies_steps AS step WHERE step.task_id = asked.id) AS has_record
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

-- name: list_refused
-- Due tasks that every open worker on their queue has refused, by queue and by the task or sub-workflow that they need.
-- "is_known" means that one of the queue's workers has the task or sub-workflow, with parameters that the call does not
-- fit. "missing_key" is an encryption key of the payload that none of these workers has. Queues without a worker are
-- left out. At most "limit" refusals are read, and one task for each, by its primary key. Parameters: how many refusals
-- to read.
WITH refused AS MATERIALIZED (
    SELECT task_id, fingerprint, message, since FROM horsies_refusals
    ORDER BY task_id, fingerprint LIMIT %(limit)s::integer),
calls AS (
    SELECT task_id, array_agg(fingerprint::text) AS fingerprints, min(since) AS since,
        (array_agg(message ORDER BY since DESC))[1] AS message,
        max(substr(fingerprint, 5)) FILTER (WHERE starts_with(fingerprint, 'key:')) AS missing_key
    FROM refused GROUP BY task_id),
waiting AS (
    SELECT task.queue_name, task.kind, task.name, calls.fingerprints, calls.missing_key, count(*) AS tasks,
        min(calls.since) AS since, min(calls.message) AS message
    FROM calls CROSS JOIN LATERAL (
        SELECT found.queue_name::text, CASE node.kind WHEN 'workflow' THEN 'workflows' ELSE 'tasks' END AS kind,
            CASE node.kind WHEN 'workflow' THEN node.sub_definition_key ELSE found.task_name END::text AS name
        FROM horsies_tasks AS found
        LEFT JOIN horsies_workflow_tasks AS node
            ON node.workflow_id = found.workflow_id AND node.task_index = found.workflow_node_index
        WHERE found.id = calls.task_id AND found.status = 'PENDING' AND NOT (found.held AND found.lane IS NULL)
          AND found.enqueued_at <= now()
        LIMIT 1) AS task
    GROUP BY task.queue_name, task.kind, task.name, calls.fingerprints, calls.missing_key)
SELECT waiting.queue_name, waiting.name, bool_or(servers.is_known) AS is_known,
    sum(waiting.tasks)::bigint AS tasks, min(waiting.since) AS since, min(waiting.message) AS message,
    waiting.missing_key
FROM waiting CROSS JOIN LATERAL (
    SELECT bool_or(known.fingerprint IS NOT NULL) AS is_known,
        bool_or((worker.known_tasks IS NULL OR known.fingerprint <> ALL(waiting.fingerprints))
            AND (waiting.missing_key IS NULL
                OR coalesce(worker.known_tasks -> 'keys' ? waiting.missing_key, false))) AS is_runnable
    FROM horsies_workers AS worker
    CROSS JOIN LATERAL (
        SELECT worker.known_tasks -> waiting.kind ->> waiting.name AS fingerprint) AS known
    WHERE worker.stopped_at IS NULL AND waiting.queue_name = ANY(worker.queues)
    HAVING count(*) > 0) AS servers
WHERE servers.is_runnable IS NOT TRUE
GROUP BY waiting.queue_name, waiting.name, waiting.missing_key ORDER BY waiting.queue_name, waiting.name

-- name: forget_refusals
-- Delete the refusals of tasks that are about to fail, so that the grace period starts again if a task is retried.
DELETE FROM horsies_refusals WHERE task_id = ANY(%(ids)s::uuid[]) RETURNING task_id::text AS id

-- name: delete_refusals
-- Delete refusals whose task has ended or was deleted.
DELETE FROM horsies_refusals AS refusal
WHERE NOT EXISTS (
    SELECT FROM horsies_tasks AS task
    WHERE task.id = refusal.task_id AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING'))
RETURNING refusal.task_id::text AS id
