-- The test clock: simulates the passing of time by moving the stored times of waiting tasks back.

-- name: advance_tasks
-- Make PENDING tasks become due, and expire, earlier by this many seconds. "only" lists tasks; a run in the list stands
-- for all of its tasks. Parameters: the number of seconds that pass; "only" limits the change to these tasks and runs.
UPDATE horsies_tasks SET
    enqueued_at = enqueued_at - %(seconds)s::float8 * interval '1 second',
    good_until = good_until - %(seconds)s::float8 * interval '1 second',
    next_retry_at = next_retry_at - %(seconds)s::float8 * interval '1 second'
WHERE status = 'PENDING'
  AND (%(only)s::uuid[] IS NULL OR id = ANY(%(only)s::uuid[]) OR workflow_id = ANY(%(only)s::uuid[]))
RETURNING id::text

-- name: advance_nodes
-- Make nodes whose task has not been inserted yet become due, and expire, earlier by this many seconds.
UPDATE horsies_workflow_tasks SET
    not_before = not_before - %(seconds)s::float8 * interval '1 second',
    good_until = good_until - %(seconds)s::float8 * interval '1 second'
WHERE enqueued_at IS NULL AND completed_at IS NULL AND (not_before IS NOT NULL OR good_until IS NOT NULL)
  AND (%(only)s::uuid[] IS NULL OR workflow_id = ANY(%(only)s::uuid[]))
RETURNING workflow_id::text AS id

-- name: advance_schedules
-- Move the next slots of schedules: back for a transaction that reads due schedules, and forward again afterwards.
UPDATE horsies_schedule_state SET next_run_at = next_run_at - %(slots)s::float8 * interval '1 second',
    resumed_at = resumed_at - %(pauses)s::float8 * interval '1 second'
WHERE next_run_at IS NOT NULL
RETURNING schedule_name AS id

-- name: advance_deadlines
-- Make the deadlines of durable functions earlier.
UPDATE horsies_deadlines SET ends_at = ends_at - %(seconds)s::float8 * interval '1 second'
WHERE reached_at IS NULL
RETURNING task_id::text AS id

-- name: advance_steps
-- Make the recorded sleeps and time limits of durable functions end earlier.
UPDATE horsies_steps SET due_at = due_at - %(seconds)s::float8 * interval '1 second'
WHERE due_at IS NOT NULL
RETURNING task_id::text AS id
