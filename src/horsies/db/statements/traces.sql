-- Statements on the spans of attempts; a worker runs them only if its application uses tracing.

-- name: store_traces
-- Store the spans of recorded attempts, by the unique key of an attempt. An attempt that was not recorded has no span.
-- Parameters: attempts and their spans, as columns.
UPDATE horsies_task_attempts AS recorded SET traceparent = traced.traceparent
FROM unnest(%(ids)s::uuid[], %(attempts)s::integer[], %(traceparents)s::text[])
    AS traced (id, attempt, traceparent)
WHERE recorded.task_id = traced.id AND recorded.attempt = traced.attempt
RETURNING recorded.task_id::text AS id

-- name: read_traces
-- The spans of these attempts, by the unique key of an attempt. Parameters: attempts, as columns.
SELECT recorded.task_id::text AS id, recorded.traceparent
FROM unnest(%(ids)s::uuid[], %(attempts)s::integer[]) AS wanted (id, attempt)
JOIN horsies_task_attempts AS recorded ON recorded.task_id = wanted.id AND recorded.attempt = wanted.attempt
WHERE recorded.traceparent IS NOT NULL
