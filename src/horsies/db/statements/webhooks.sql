-- Statements on webhooks and on the findings that webhooks announce.

-- name: store_webhooks
-- Store which events the application's webhooks subscribe to. A webhook that the application no longer has is deleted
-- by the first worker that starts after the last worker with that webhook has stopped. Rows without a change are not
-- written. Parameters: the webhooks as JSON, and the queues of the application.
WITH configured AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(webhooks)s::text::jsonb) AS hook (
        name text, events text[], task_names text[], queue_name text, priority integer, max_retries integer,
        task_options text, timeout_ms integer, retention_seconds float8)),
removed AS (
    DELETE FROM horsies_webhooks AS stored
    WHERE stored.queue_name = ANY(%(queues)s::text[]) AND stored.name NOT IN (SELECT configured.name FROM configured)
      AND NOT EXISTS (
          SELECT FROM horsies_workers AS worker
          WHERE worker.stopped_at IS NULL AND worker.known_tasks -> 'tasks' ? ('horsies.webhook.' || stored.name)))
INSERT INTO horsies_webhooks AS stored (
    name, events, task_names, queue_name, priority, max_retries, task_options, timeout_ms, retention)
SELECT configured.name, configured.events, configured.task_names, configured.queue_name, configured.priority,
    configured.max_retries, configured.task_options, configured.timeout_ms,
    configured.retention_seconds * interval '1 second'
FROM configured ORDER BY configured.name
ON CONFLICT (name) DO UPDATE SET
    events = EXCLUDED.events, task_names = EXCLUDED.task_names, queue_name = EXCLUDED.queue_name,
    priority = EXCLUDED.priority, max_retries = EXCLUDED.max_retries, task_options = EXCLUDED.task_options,
    timeout_ms = EXCLUDED.timeout_ms, retention = EXCLUDED.retention, updated_at = clock_timestamp()
WHERE (stored.events, stored.task_names, stored.queue_name, stored.priority, stored.max_retries, stored.task_options,
        stored.timeout_ms, stored.retention)
    IS DISTINCT FROM (EXCLUDED.events, EXCLUDED.task_names, EXCLUDED.queue_name, EXCLUDED.priority,
        EXCLUDED.max_retries, EXCLUDED.task_options, EXCLUDED.timeout_ms, EXCLUDED.retention)

-- name: ask_for_findings
-- Nothing -> PENDING for the task that runs the checks, once a minute in the whole cluster, because the minute is the
-- task's idempotency key. A task that has not started within its minute expires.
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at, good_until,
    max_retries, task_options, timeout_ms, retention, enqueue_sha, idempotency_key, idempotency_sha)
SELECT horsies_new_id(), %(task_name)s::text, %(queue_name)s::text, %(priority)s::integer, '[]', '{}', minute.now_at,
    minute.now_at, minute.now_at, minute.now_at, minute.now_at + interval '1 minute', 0, %(task_options)s::text,
    %(timeout_ms)s::integer, interval '1 hour', encode(sha256(convert_to(minute.name, 'UTF8')), 'hex'), minute.name,
    encode(sha256(convert_to(minute.name, 'UTF8')), 'hex')
FROM (SELECT now() AS now_at, floor(extract(epoch FROM now()) / 60)::text AS name) AS minute
ON CONFLICT DO NOTHING

-- name: record_findings
-- Open and close findings and announce the differences; see horsies_record_findings_v1.
SELECT horsies_record_findings_v1(%(found)s::text::jsonb, %(checks)s::text[]) AS announced
