-- Statements of a worker's turn. Each statement that changes a task requires the old status, the owner and the
-- generation; a row that does not match now belongs to another worker. The conditions use the idioms "opaque status"
-- and "by position", so no call may list a task twice: see "Plans made on an empty table" in functions/20_claim.sql. In
-- statements that recovery uses too, a NULL owner matches a row without an owner.

-- name: complete_tasks
-- RUNNING -> COMPLETED with the result, and the attempt row, in one statement. A task may have waited in its child
-- after the claim, so its start is computed from its run time ("runs_us"), if known. If this transaction has waited for
-- more than a second, for a lock or a stalled disk, the wait is subtracted, because the task had ended before.
WITH finished AS (
    UPDATE horsies_tasks AS task SET
        status = 'COMPLETED', completed_at = clock_timestamp(), updated_at = clock_timestamp(),
        started_at = coalesce(least(clock_timestamp(), now() + interval '1 second') - interval '1 microsecond'
            * (%(runs_us)s::bigint[])[array_position(%(ids)s::uuid[], task.id)], task.started_at),
        result = (%(results)s::text[])[array_position(%(ids)s::uuid[], task.id)], next_retry_at = NULL
    WHERE task.id = ANY(%(ids)s::uuid[])
      AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
      AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
    RETURNING task.id, task.retry_count, task.started_at, task.completed_at, task.worker_hostname,
        task.worker_pid, task.worker_process_name)
INSERT INTO horsies_task_attempts (
    task_id, attempt, outcome, started_at, finished_at, worker_id, worker_hostname, worker_pid,
    worker_process_name)
SELECT id, retry_count + 1, 'COMPLETED', started_at, completed_at, %(worker_id)s, worker_hostname, worker_pid,
    worker_process_name
FROM finished
ON CONFLICT (task_id, attempt) DO NOTHING
RETURNING task_id::text

-- name: find_completed
-- The attempts in this list that their child has recorded as a success in the task's transaction. This query must
-- follow the statements that would record a different outcome, because those statements wait until the child's
-- transaction has ended.
SELECT task.id::text AS task_id FROM horsies_tasks AS task
WHERE task.id = ANY(%(ids)s::uuid[]) AND task.status = 'COMPLETED'
  AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]

-- name: retry_tasks
-- RUNNING -> PENDING, due after the delay, and the attempt row. A task whose retry would start at or after good_until
-- does not match; fail_tasks, which runs next on the same rows, fails it. For a task without a policy, "max_retries"
-- raises the limit to that of the rule that retries the task; for a task that returns to its queue because its worker
-- stops, it raises the limit by one.
WITH report AS MATERIALIZED (
    SELECT ARRAY(
        SELECT clock_timestamp() + delay * interval '1 second'
        FROM unnest(%(delays_seconds)s::float8[]) WITH ORDINALITY AS sent (delay, place) ORDER BY place) AS due_at),
finished AS (
    UPDATE horsies_tasks AS task SET
        status = 'PENDING', retry_count = task.retry_count + 1, claimed_by_worker_id = NULL,
        claimed_at = NULL, next_retry_at = report.due_at[array_position(%(ids)s::uuid[], task.id)],
        lane = CASE WHEN task.lane IS NOT NULL AND task.workflow_id IS NOT NULL
            THEN horsies_returned_lane_v1(task.lane, task.workflow_id) ELSE task.lane END,
        -- A task of a fifo lane keeps its place, even if the clock was set back after its send: see updated_at.
        enqueued_at = CASE WHEN task.lane IS NOT NULL AND horsies_keeps_place_v1(task.queue_name, task.lane)
            THEN task.enqueued_at ELSE report.due_at[array_position(%(ids)s::uuid[], task.id)] END,
        started_at = coalesce(least(clock_timestamp(), now() + interval '1 second') - interval '1 microsecond'
            * (%(runs_us)s::bigint[])[array_position(%(ids)s::uuid[], task.id)], task.started_at),
        max_retries = greatest(task.max_retries,
            (%(max_retries)s::integer[])[array_position(%(ids)s::uuid[], task.id)]),
        -- Tasks are in the index of their lane only if they are due at updated_at.
        updated_at = greatest(clock_timestamp(), CASE WHEN task.lane IS NOT NULL
            AND horsies_keeps_place_v1(task.queue_name, task.lane) THEN task.enqueued_at END)
    FROM report
    WHERE task.id = ANY(%(ids)s::uuid[])
      AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
      AND task.claimed_by_worker_id IS NOT DISTINCT FROM %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
      AND task.cancel_requested_at IS NULL
      AND (task.good_until IS NULL
           OR report.due_at[array_position(%(ids)s::uuid[], task.id)] < task.good_until)
    RETURNING task.id, task.retry_count, task.started_at, task.worker_hostname, task.worker_pid,
        task.worker_process_name, array_position(%(ids)s::uuid[], task.id) AS place)
INSERT INTO horsies_task_attempts (
    task_id, attempt, outcome, will_retry, started_at, finished_at, error_code, error_message, failed_reason,
    retry_reason, fingerprint, exception_type, raised_in, worker_id, worker_hostname, worker_pid,
    worker_process_name)
SELECT id, retry_count, (%(outcomes)s::text[])[place], true, started_at, clock_timestamp(),
    (%(error_codes)s::text[])[place], (%(error_messages)s::text[])[place],
    (%(failed_reasons)s::text[])[place], (%(retry_reasons)s::text[])[place],
    (%(fingerprints)s::text[])[place], (%(exception_types)s::text[])[place], (%(raised_in)s::text[])[place],
    %(worker_id)s, worker_hostname, worker_pid, worker_process_name
FROM finished
ON CONFLICT (task_id, attempt) DO NOTHING
RETURNING task_id::text

-- name: fail_tasks
-- RUNNING -> FAILED, or CANCELLED for a task stopped by a cancellation, and the attempt row. With "only_cancelled",
-- only tasks with an accepted cancellation match: these tasks are cancelled instead of returned to their queues.
WITH finished AS (
    UPDATE horsies_tasks AS task SET
        status = (%(statuses)s::text[])[array_position(%(ids)s::uuid[], task.id)],
        failed_at = clock_timestamp(), updated_at = clock_timestamp(),
        result = (%(results)s::text[])[array_position(%(ids)s::uuid[], task.id)],
        error_code = (%(error_codes)s::text[])[array_position(%(ids)s::uuid[], task.id)],
        failed_reason = (%(failed_reasons)s::text[])[array_position(%(ids)s::uuid[], task.id)],
        fingerprint = (%(fingerprints)s::text[])[array_position(%(ids)s::uuid[], task.id)],
        started_at = coalesce(least(clock_timestamp(), now() + interval '1 second') - interval '1 microsecond'
            * (%(runs_us)s::bigint[])[array_position(%(ids)s::uuid[], task.id)], task.started_at),
        next_retry_at = NULL
    WHERE task.id = ANY(%(ids)s::uuid[])
      AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
      AND task.claimed_by_worker_id IS NOT DISTINCT FROM %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
      AND (task.cancel_requested_at IS NOT NULL OR NOT %(only_cancelled)s::boolean)
    RETURNING task.id, task.retry_count, task.started_at, task.error_code, task.failed_reason, task.fingerprint,
        task.worker_hostname, task.worker_pid, task.worker_process_name,
        array_position(%(ids)s::uuid[], task.id) AS place)
INSERT INTO horsies_task_attempts (
    task_id, attempt, outcome, started_at, finished_at, error_code, error_message, failed_reason,
    retry_reason, fingerprint, exception_type, raised_in, worker_id, worker_hostname, worker_pid,
    worker_process_name)
SELECT id, retry_count + 1, (%(outcomes)s::text[])[place], started_at, clock_timestamp(), error_code,
    (%(error_messages)s::text[])[place], failed_reason, (%(retry_reasons)s::text[])[place], fingerprint,
    (%(exception_types)s::text[])[place], (%(raised_in)s::text[])[place], %(worker_id)s, worker_hostname, worker_pid,
    worker_process_name
FROM finished
ON CONFLICT (task_id, attempt) DO NOTHING
RETURNING task_id::text

-- name: store_logs
-- Store the lines that attempts have logged, in the transaction that records their outcomes. The lines of an attempt
-- that this worker no longer owns are stored too, because its code ran; for a deleted or redacted task nothing is
-- stored. The lock makes an erasure at the same time wait, so that it sees these lines. The row of a recorded outcome is
-- already locked by this transaction. Other locked rows are skipped, because a turn must not wait to store lines.
INSERT INTO horsies_task_logs (task_id, generation, attempt, body, dropped, cut_after)
SELECT task.id, log.generation, log.attempt, log.body, log.dropped, log.cut_after
FROM unnest(%(ids)s::uuid[], %(generations)s::integer[], %(attempts)s::integer[], %(bodies)s::text[],
    %(dropped)s::integer[], %(cut_after)s::integer[]) AS log (id, generation, attempt, body, dropped, cut_after)
JOIN horsies_tasks AS task ON task.id = log.id AND task.generation >= log.generation AND task.redacted_at IS NULL
FOR SHARE OF task SKIP LOCKED
ON CONFLICT (task_id, generation) DO NOTHING
RETURNING task_id::text

-- name: start_tasks
-- CLAIMED -> RUNNING for tasks claimed ahead of time, each in a child that is now idle, if the lease is still valid and
-- no pause has returned the task to its queue. Tasks that do not match were lost or released: their code has not
-- started, so no attempt is recorded.
UPDATE horsies_tasks AS task SET
    status = 'RUNNING', claimed = false, claim_expires_at = NULL, started_at = clock_timestamp(),
    worker_pid = (%(pids)s::integer[])[array_position(%(ids)s::uuid[], task.id)],
    worker_process_name = 'worker-' || (%(pids)s::integer[])[array_position(%(ids)s::uuid[], task.id)],
    updated_at = clock_timestamp()
WHERE task.id = ANY(%(ids)s::uuid[])
  AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'CLAIMED'
  AND task.claim_expires_at > clock_timestamp() AND NOT (task.held AND task.lane IS NULL)
  AND (task.good_until IS NULL OR task.good_until > clock_timestamp())
RETURNING task.id::text, task.worker_pid

-- name: claim_tasks
-- PENDING -> RUNNING for idle children, PENDING -> CLAIMED for prefetched tasks; see horsies_claim_v1.
SELECT id, generation, task_name, queue_name, args, kwargs, retry_count, max_retries, task_options,
    timeout_ms, worker_pid, workflow_id, workflow_node_index, workflow_item_index, workflow_inputs, priority,
    enqueued_at::text AS enqueued_at, details, burst, lane
FROM horsies_claim_v1(
    %(worker_id)s, %(hostname)s, %(pids)s::integer[], %(prefetch)s, %(lease_ms)s, %(queues)s::text[],
    %(queue_limits)s::integer[], %(queue_caps)s::integer[], %(cluster_cap)s, %(counts_claimed)s,
    %(freed)s::integer[], %(marked_priorities)s::integer[], %(marked_moments)s::text[]::timestamptz[],
    %(marked_ids)s::uuid[], %(looks_everywhere)s, %(unknown_names)s::text[], %(refused_ids)s::uuid[],
    %(idle)s, %(short_names)s::text[], %(is_async)s::boolean, %(refused_by)s::text[],
    %(rate_seconds)s::float8[], %(rate_bursts)s::integer[], %(cursors)s::bigint[],
    %(freed_queues)s::text[], %(freed_lanes)s::bigint[], %(marked_lanes)s::bigint[], %(lane_priorities)s::integer[],
    %(lane_moments)s::text[]::timestamptz[], %(lane_ids)s::uuid[])

-- name: claim_behind_mark
-- PENDING -> RUNNING for idle children of a worker whose only queue has no cap and no rate: the tasks behind the mark
-- of its last claim, as horsies_claim_v1 finds them. It does without that function's loops, conditions and result set,
-- which take a seventh of a turn's instructions, and without a sort: the order of the pids is the order of the tasks.
-- The time of the statement, unlike the clock, is an index condition.
WITH due AS MATERIALIZED (
    SELECT ARRAY(
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = %(queue)s::text
          AND task.priority = %(marked_priority)s::integer AND task.enqueued_at <= statement_timestamp()
          AND (task.enqueued_at, task.id) > (%(marked_moment)s::text::timestamptz, %(marked_id)s::uuid)
          AND (task.good_until IS NULL OR task.good_until > statement_timestamp())
          AND NOT EXISTS (
              SELECT FROM horsies_queues AS stored
              WHERE stored.queue_name = %(queue)s::text AND stored.paused_at IS NOT NULL)
        ORDER BY task.enqueued_at, task.id LIMIT cardinality(%(pids)s::integer[]) FOR UPDATE SKIP LOCKED) AS ids),
begun AS (
    UPDATE horsies_tasks AS task SET
        status = 'RUNNING', generation = task.generation + 1, claimed = false, claim_expires_at = NULL,
        claimed_by_worker_id = %(worker_id)s, claimed_at = clock_timestamp(), started_at = clock_timestamp(),
        worker_pid = (%(pids)s::integer[])[array_position((SELECT due.ids FROM due), task.id)],
        worker_process_name = 'worker-' || (%(pids)s::integer[])[array_position((SELECT due.ids FROM due), task.id)],
        worker_hostname = %(hostname)s, updated_at = clock_timestamp()
    WHERE task.id = ANY((SELECT due.ids FROM due)::uuid[])
    RETURNING task.id, task.generation, task.task_name, task.queue_name, task.args, task.kwargs,
        task.retry_count, task.max_retries, task.task_options, task.timeout_ms, task.worker_pid,
        task.workflow_id, task.workflow_node_index, task.workflow_item_index, task.workflow_inputs,
        task.priority, task.enqueued_at, task.sent_at, task.good_until, task.scheduled_for,
        task.schedule_name, task.burst, task.lane)
SELECT begun.id::text, begun.generation, begun.task_name, begun.queue_name, begun.args, begun.kwargs,
    begun.retry_count, begun.max_retries, begun.task_options, begun.timeout_ms, begun.worker_pid,
    begun.workflow_id::text, begun.workflow_node_index, begun.workflow_item_index, begun.workflow_inputs,
    begun.priority, begun.enqueued_at::text,
    CASE WHEN begun.good_until IS NULL AND begun.workflow_id IS NULL AND begun.schedule_name IS NULL
        THEN concat(begun.sent_at, E'\n', begun.enqueued_at, E'\n\n\n\n\n\n')
        ELSE horsies_details_v1(
            begun.sent_at, begun.enqueued_at, begun.good_until, begun.scheduled_for, begun.workflow_item_index,
            begun.workflow_id, begun.workflow_node_index, begun.schedule_name) END AS details,
    begun.burst, begun.lane
FROM begun

-- name: claim_batch
-- PENDING -> RUNNING for the tasks that join a batched task in its child; see horsies_claim_batch_v1.
SELECT id, generation, task_name, queue_name, args, kwargs, retry_count, max_retries, task_options,
    timeout_ms, worker_pid, workflow_id, workflow_node_index, workflow_item_index, workflow_inputs, priority,
    enqueued_at::text AS enqueued_at, details, burst, lane
FROM horsies_claim_batch_v1(
    %(worker_id)s, %(hostname)s, %(heads)s::uuid[], %(pids)s::integer[], %(size)s, %(queue)s, %(lane)s,
    %(task_name)s, %(wanted)s, %(after_priority)s, %(after_at)s::text::timestamptz, %(queue_cap)s::integer,
    %(cluster_cap)s::integer, %(counts_claimed)s, %(rate_seconds)s::float8, %(rate_burst)s::integer,
    %(refused_ids)s::uuid[], %(refused_by)s::text[])

-- name: claim_unresolvable
-- PENDING -> RUNNING without a child, so that this worker can fail tasks that have been due for the grace period and
-- whose name no worker on their queue has known during it. A worker that registered no names may know any task. Runs of
-- durable functions are left out, because they wait for a worker that has their function. If every name is known to a
-- worker, no task row is read. If a batch of failures is refused, its tasks are tried one at a time, with "only"
-- restricting the statement to one task.
WITH unresolvable AS MATERIALIZED (
    SELECT queue.name AS queue_name, task.name AS task_name
    FROM unnest(%(queues)s::text[]) AS queue (name) CROSS JOIN unnest(%(names)s::text[]) AS task (name)
    WHERE NOT horsies_is_durable_v1(task.name) AND NOT EXISTS (
        SELECT FROM horsies_workers AS worker
        WHERE (worker.stopped_at IS NULL
               OR worker.stopped_at > now() - %(grace_seconds)s::float8 * interval '1 second')
          AND queue.name = ANY(worker.queues)
          AND (worker.known_tasks IS NULL OR worker.known_tasks -> 'tasks' ? task.name))),
chosen AS MATERIALIZED (
    SELECT due.id FROM unresolvable CROSS JOIN LATERAL (
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = unresolvable.queue_name
          AND task.task_name = unresolvable.task_name
          AND task.enqueued_at <= now() - %(grace_seconds)s::float8 * interval '1 second'
          AND (task.good_until IS NULL OR task.good_until > now())
          AND task.id <> ALL(%(excluded)s::uuid[])
          AND (%(only)s::uuid[] IS NULL OR task.id = ANY(%(only)s::uuid[]))
          AND NOT EXISTS (
              SELECT FROM horsies_queues AS stored
              WHERE stored.queue_name = task.queue_name AND stored.paused_at IS NOT NULL)
        ORDER BY task.priority, task.enqueued_at, task.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS due
    LIMIT %(limit)s),
keyed AS MATERIALIZED (
    SELECT unnest(horsies_lock_unresolvable_v1(
        unresolvable.queue_name, unresolvable.task_name, %(grace_seconds)s::float8, %(excluded)s::uuid[],
        %(only)s::uuid[], %(limit)s::integer)) AS id
    FROM unresolvable
    WHERE NOT EXISTS (
        SELECT FROM horsies_queues AS stored
        WHERE stored.queue_name = unresolvable.queue_name AND stored.paused_at IS NOT NULL)
    LIMIT %(limit)s)
UPDATE horsies_tasks AS task SET
    status = 'RUNNING', generation = task.generation + 1, claimed_by_worker_id = %(worker_id)s,
    claimed_at = clock_timestamp(), started_at = clock_timestamp(), worker_hostname = %(hostname)s,
    updated_at = clock_timestamp()
WHERE task.id = ANY(ARRAY(SELECT chosen.id FROM chosen UNION ALL SELECT keyed.id FROM keyed LIMIT %(limit)s))
RETURNING task.id::text, task.generation, task.task_name, task.queue_name, task.args, task.kwargs,
    task.retry_count, task.max_retries, task.task_options, task.timeout_ms, task.worker_pid,
    task.workflow_id::text, task.workflow_node_index, task.workflow_item_index, task.workflow_inputs,
    task.priority, task.enqueued_at::text AS enqueued_at, '' AS details, task.burst, task.lane

-- name: release_unstarted
-- RUNNING -> PENDING for tasks that this worker claimed but never gave to a child: the COMMIT of a claim was in doubt,
-- or no child could take them. The attempts that the worker still holds are excluded by id and generation, so that an
-- older attempt does not protect a later claim. User code has not started, so no attempt is counted. A task with an
-- accepted cancellation is cancelled instead; for that reason the roots of the tasks' workflows are locked first
-- (forced step). A cancelled run of a durable function begins its clean-up, if it has one.
WITH held AS MATERIALIZED (
    SELECT * FROM unnest(%(held_ids)s::uuid[], %(held_generations)s::integer[]) AS held (id, generation)),
roots AS MATERIALIZED (
    SELECT root.id FROM horsies_workflows AS root
    WHERE root.id = ANY(ARRAY(
        SELECT run.root_workflow_id
        FROM horsies_tasks AS mine JOIN horsies_workflows AS run ON run.id = mine.workflow_id
        WHERE mine.claimed_by_worker_id = %(worker_id)s AND mine.status IN ('CLAIMED', 'RUNNING')
          AND NOT EXISTS (
              SELECT FROM held WHERE held.id = mine.id AND held.generation = mine.generation)))
    ORDER BY root.id FOR NO KEY UPDATE),
cleaning AS MATERIALIZED (
    SELECT horsies_begin_clean_up_v1(ARRAY(
        SELECT mine.id FROM horsies_tasks AS mine
        WHERE mine.claimed_by_worker_id = %(worker_id)s AND mine.status IN ('CLAIMED', 'RUNNING')
          AND mine.cancel_requested_at IS NOT NULL AND (SELECT count(*) FROM roots) >= 0
          AND NOT EXISTS (
              SELECT FROM held WHERE held.id = mine.id AND held.generation = mine.generation))) AS id)
UPDATE horsies_tasks AS task SET
    status = CASE WHEN task.cancel_requested_at IS NULL THEN 'PENDING' ELSE 'CANCELLED' END,
    failed_at = CASE WHEN task.cancel_requested_at IS NULL THEN task.failed_at ELSE clock_timestamp() END,
    error_code = CASE WHEN task.cancel_requested_at IS NULL THEN task.error_code ELSE 'TASK_CANCELLED' END,
    claimed = false, claim_expires_at = NULL, claimed_by_worker_id = NULL, claimed_at = NULL,
    started_at = NULL, worker_pid = NULL, worker_hostname = NULL, worker_process_name = NULL,
    lane = CASE WHEN task.lane IS NOT NULL AND task.workflow_id IS NOT NULL
        THEN horsies_returned_lane_v1(task.lane, task.workflow_id) ELSE task.lane END,
    -- The task returns to its lane, even if the clock was set back after its send.
    updated_at = greatest(clock_timestamp(), task.enqueued_at)
WHERE task.claimed_by_worker_id = %(worker_id)s AND task.status IN ('CLAIMED', 'RUNNING')
  AND NOT EXISTS (SELECT FROM held WHERE held.id = task.id AND held.generation = task.generation)
  AND (SELECT count(*) FROM roots) >= 0 AND task.id <> ALL(ARRAY(SELECT cleaning.id FROM cleaning))
RETURNING task.id::text

-- name: expire_tasks
-- PENDING -> EXPIRED past good_until, by the index on deadlines, in batches; the roots of workflows are locked first
-- (forced step). A batch that the database refuses is repeated task by task, with "only" restricting the statement to
-- one task.
WITH late AS MATERIALIZED (
    SELECT task.id, task.workflow_id FROM horsies_tasks AS task
    WHERE task.status = 'PENDING' AND task.good_until IS NOT NULL AND task.good_until <= now()
      AND task.id <> ALL(%(excluded)s::uuid[])
      AND (%(only)s::uuid[] IS NULL OR task.id = ANY(%(only)s::uuid[]))
    ORDER BY task.good_until LIMIT %(limit)s),
roots AS MATERIALIZED (
    SELECT root.id FROM horsies_workflows AS root
    WHERE root.id = ANY(ARRAY(
        SELECT run.root_workflow_id FROM late JOIN horsies_workflows AS run ON run.id = late.workflow_id))
    ORDER BY root.id FOR NO KEY UPDATE)
UPDATE horsies_tasks AS task SET
    status = 'EXPIRED', failed_at = clock_timestamp(), updated_at = clock_timestamp(),
    error_code = 'TASK_EXPIRED', result = %(result)s
WHERE task.id = ANY(ARRAY(
    SELECT chosen.id FROM horsies_tasks AS chosen
    WHERE chosen.id = ANY(ARRAY(SELECT late.id FROM late)) AND (SELECT count(*) FROM roots) >= 0
      AND coalesce(chosen.status, '') = 'PENDING' AND chosen.good_until <= now() FOR UPDATE SKIP LOCKED))
RETURNING task.id::text

-- name: seconds_until_due
-- The seconds that an idle worker may sleep; see horsies_seconds_until_due_v1.
SELECT seconds, looked_at, overdue, NULL::float8 AS start_seconds,
    CASE WHEN %(last_look)s::timestamptz IS NULL THEN horsies_keyed_queues(%(queues)s::text[]) END AS keyed
FROM horsies_seconds_until_due_v1(%(queues)s::text[], %(last_look)s::timestamptz)

-- name: seconds_until_rated
-- The seconds that a worker may sleep if its queues have rates, and the time at which a queue that is held back by its
-- rate may start a task again.
SELECT seconds, looked_at, overdue,
    horsies_seconds_until_start_v1(%(queues)s::text[], %(last_look)s::timestamptz) AS start_seconds,
    CASE WHEN %(last_look)s::timestamptz IS NULL THEN horsies_keyed_queues(%(queues)s::text[]) END AS keyed
FROM horsies_seconds_until_due_v1(%(queues)s::text[], %(last_look)s::timestamptz)

-- name: look_at_keys
-- Move tasks with keys whose time has come to their lanes, and return when the next such task becomes due; see
-- horsies_look_at_keys_v1.
SELECT seconds, queues, promoted FROM horsies_look_at_keys_v1(%(queues)s::text[], %(limit)s)

-- name: find_cancel_requests
-- This worker's tasks with a request to cancel them, by the in-flight index; the notification about such a request is
-- only a hint.
SELECT id::text FROM horsies_tasks
WHERE claimed_by_worker_id = %(worker_id)s AND status IN ('CLAIMED', 'RUNNING')
  AND cancel_requested_at IS NOT NULL

-- name: send_heartbeats
-- Store heartbeats: one row for each task that has been running for longer than one interval, in one statement.
INSERT INTO horsies_heartbeats (task_id, sender_id, role, sent_at, hostname, pid)
SELECT task.id, %(worker_id)s::text, 'runner', clock_timestamp(), %(hostname)s, task.worker_pid
FROM unnest(%(ids)s::uuid[], %(generations)s::integer[]) AS held (id, generation)
JOIN horsies_tasks AS task ON task.id = held.id AND task.generation = held.generation
WHERE task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
RETURNING task_id::text

-- name: renew_claims
-- Extend the leases of the prefetched tasks that this worker holds.
UPDATE horsies_tasks AS task SET
    claim_expires_at = clock_timestamp() + %(lease_ms)s::integer * interval '1 millisecond',
    updated_at = clock_timestamp()
WHERE task.id = ANY(%(ids)s::uuid[])
  AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'CLAIMED'
  AND task.claimed_at > clock_timestamp() - %(max_age_ms)s::integer * interval '1 millisecond'
RETURNING task.id::text

-- name: release_lapsed
-- CLAIMED -> PENDING if the lease has lapsed: the worker has not started the task. "only" restricts the statement to
-- these tasks.
UPDATE horsies_tasks AS task SET
    status = 'PENDING', claimed = false, claim_expires_at = NULL, claimed_by_worker_id = NULL,
    claimed_at = NULL, worker_hostname = NULL, updated_at = greatest(clock_timestamp(), task.enqueued_at)
WHERE task.id = ANY(ARRAY(
    SELECT lapsed.id FROM horsies_tasks AS lapsed
    WHERE lapsed.status = 'CLAIMED' AND lapsed.claim_expires_at <= now()
      AND lapsed.id <> ALL(%(excluded)s::uuid[])
      AND (%(only)s::uuid[] IS NULL OR lapsed.id = ANY(%(only)s::uuid[]))
    ORDER BY lapsed.claim_expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING task.id::text

-- name: release_claimed
-- CLAIMED -> PENDING for tasks of a worker that died before it started them.
UPDATE horsies_tasks AS task SET
    status = 'PENDING', claimed = false, claim_expires_at = NULL, claimed_by_worker_id = NULL,
    claimed_at = NULL, worker_hostname = NULL, updated_at = greatest(clock_timestamp(), task.enqueued_at)
WHERE task.id = ANY(%(ids)s::uuid[])
  AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
  AND task.claimed_by_worker_id IS NOT DISTINCT FROM %(worker_id)s AND coalesce(task.status, '') = 'CLAIMED'
RETURNING task.id::text

-- name: store_progress
-- Store the latest progress of running attempts, one row per task; it replaces the progress of the previous attempt. A
-- report for an attempt that this worker no longer owns is ignored.
INSERT INTO horsies_task_progress AS known (task_id, attempt, done, total, note, reported_at)
SELECT task.id, task.retry_count + 1, (%(done)s::float8[])[report.place], (%(totals)s::float8[])[report.place],
    (%(notes)s::text[])[report.place], clock_timestamp()
FROM horsies_tasks AS task
CROSS JOIN LATERAL (SELECT array_position(%(ids)s::uuid[], task.id) AS place) AS report
WHERE task.id = ANY(%(ids)s::uuid[]) AND task.generation = (%(generations)s::integer[])[report.place]
  AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
ON CONFLICT (task_id) DO UPDATE SET
    attempt = excluded.attempt, done = excluded.done, total = excluded.total, note = excluded.note,
    reported_at = excluded.reported_at
RETURNING task_id::text
