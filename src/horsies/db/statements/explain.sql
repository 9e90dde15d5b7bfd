-- Statements that show why a task, node, run, queue or schedule is not making progress. Each statement reads a bounded
-- number of rows: single keys, partial indexes on open states, and lists with a limit. None of them returns the text of
-- another session's statement, because that text may contain arguments.

-- name: explain_task
-- One task by its key, with its node, run, queue and worker, its newest attempt and its newest heartbeat. "is_parked"
-- means that the task becomes due after an event. A task is blocked if the database refuses its next change.
SELECT task.id::text, task.task_name, task.queue_name, task.status, task.priority, task.retry_count,
    task.max_retries, task.timeout_ms, task.good_until, task.held, task.enqueued_at,
    CASE WHEN task.lane IS NULL THEN task.enqueued_at ELSE greatest(task.enqueued_at, task.next_retry_at) END
        = horsies_never_v1() AS is_parked, task.claimed_at, task.claim_expires_at, task.started_at,
    coalesce(task.completed_at, task.failed_at, task.updated_at) AS ended_at, task.cancel_requested_at,
    task.error_code, task.claimed_by_worker_id AS worker_id, task.worker_pid, task.workflow_id::text,
    task.workflow_item_index AS item_index, node.node_id, node.kind AS node_kind, node.signal_name,
    node.task_index AS node_index, node.max_parallel, node.items_total,
    CASE node.kind WHEN 'workflow' THEN node.sub_definition_key END AS definition_key,
    run.name AS run_name, run.status AS run_status, run.paused_at AS run_paused_at,
    coalesce(run.error::json #>> '{error_code,__builtin_task_code__}', run.error::json ->> 'error_code')
        AS run_error_code,
    queue.paused_at AS queue_paused_at, blocked.action AS blocked_action, blocked.error AS blocked_error,
    blocked.since AS blocked_since,
    owner.worker_id IS NOT NULL AS owner_is_known, owner.stopped_at AS owner_stopped_at,
    attempt.outcome AS last_outcome, attempt.error_code AS last_error_code, attempt.retry_reason,
    attempt.finished_at AS last_finished_at, attempt.will_retry, attempt.worker_hostname AS last_hostname,
    beat.sent_at AS heartbeat_at, progress.done AS progress_done, progress.total AS progress_total,
    now() AS looked_at, coalesce(task.task_options LIKE '{"async":true%%', false) AS is_async,
    parked.since AS parked_since, parked.signals AS parked_signals, parked.children::text[] AS parked_children,
    parked.problem AS parked_problem, task.lane_key, task.lane, task.next_retry_at,
    horsies_is_durable_v1(task.task_name) AS is_durable,
    EXISTS (SELECT FROM horsies_steps AS step WHERE step.task_id = task.id) AS has_record,
    deadline.ends_at AS deadline, deadline.reached_at IS NOT NULL AS is_late
FROM horsies_tasks AS task
LEFT JOIN horsies_workflow_tasks AS node
    ON node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index
LEFT JOIN horsies_workflows AS run ON run.id = task.workflow_id
LEFT JOIN horsies_queues AS queue ON queue.queue_name = task.queue_name
LEFT JOIN horsies_blocked AS blocked ON blocked.id = task.id AND blocked.kind = 'task'
    AND blocked.status = task.status AND blocked.generation = task.generation
LEFT JOIN horsies_workers AS owner ON owner.worker_id = task.claimed_by_worker_id
LEFT JOIN horsies_parked AS parked
    ON parked.task_id = task.id AND parked.generation = task.generation AND task.status = 'PENDING'
LEFT JOIN horsies_deadlines AS deadline ON deadline.task_id = task.id
LEFT JOIN horsies_task_progress AS progress
    ON progress.task_id = task.id AND progress.attempt = task.retry_count + 1
LEFT JOIN LATERAL (
    SELECT tried.* FROM horsies_task_attempts AS tried
    WHERE tried.task_id = task.id ORDER BY tried.attempt DESC LIMIT 1) AS attempt ON true
LEFT JOIN LATERAL (
    SELECT sign.sent_at FROM horsies_heartbeats AS sign
    WHERE sign.task_id = task.id AND sign.role = 'runner' AND sign.sent_at >= task.claimed_at
    ORDER BY sign.sent_at DESC LIMIT 1) AS beat ON true
WHERE task.id = %(id)s::uuid

-- name: list_knowledge
-- For every open worker, return whether it has registered this task or sub-workflow, and with which parameters. If the
-- worker cannot run this call, return the reason too: the parameters do not fit, or the worker lacks an encryption key
-- for the payload. A worker that has registered no names may know any task.
SELECT worker.worker_id, worker.known_tasks IS NULL OR known.fingerprint IS NOT NULL AS knows_task,
    known.fingerprint, refusal.message AS refusal, refusal.since AS refused_since,
    CASE WHEN starts_with(refusal.fingerprint, 'key:') THEN substr(refusal.fingerprint, 5) END AS missing_key
FROM horsies_workers AS worker
CROSS JOIN LATERAL (
    SELECT CASE WHEN %(definition_key)s::text IS NULL
        THEN worker.known_tasks -> 'tasks' ->> %(task_name)s::text
        ELSE worker.known_tasks -> 'workflows' ->> %(definition_key)s::text END AS fingerprint) AS known
LEFT JOIN LATERAL (
    SELECT noted.* FROM horsies_refusals AS noted
    WHERE noted.task_id = %(task_id)s::uuid AND (noted.fingerprint = known.fingerprint
        OR starts_with(noted.fingerprint, 'key:')
            AND NOT coalesce(worker.known_tasks -> 'keys' ? substr(noted.fingerprint, 5), false))
    ORDER BY noted.since DESC LIMIT 1) AS refusal ON true
WHERE worker.stopped_at IS NULL
ORDER BY worker.seen_at DESC LIMIT 1000

-- name: list_recovery_settings
-- The recovery settings of the open workers with the latest heartbeats, from their newest snapshots.
SELECT worker.worker_id, newest.recovery_config AS recovery
FROM (SELECT worker_id FROM horsies_workers WHERE stopped_at IS NULL ORDER BY seen_at DESC LIMIT 50) AS worker
CROSS JOIN LATERAL (
    SELECT state.recovery_config FROM horsies_worker_states AS state
    WHERE state.worker_id = worker.worker_id ORDER BY state.snapshot_at DESC LIMIT 1) AS newest

-- name: find_last_server
-- The worker of this queue that stopped last. Retention keeps the table small.
SELECT worker_id, name, hostname, pid, stopped_at, was_lost FROM horsies_workers
WHERE stopped_at IS NOT NULL AND %(name)s = ANY(queues) ORDER BY stopped_at DESC LIMIT 1

-- name: list_places
-- The tasks that occupy places under the caps, with their counts: first the tasks of this queue, oldest first. Uses the
-- in-flight index and counts in the same way as a claim; see horsies_in_flight.
SELECT task.id::text, task.queue_name, task.claimed_at,
    count(*) FILTER (WHERE task.queue_name = %(name)s) OVER () AS in_queue, count(*) OVER () AS in_cluster
FROM horsies_tasks AS task
WHERE task.status IN ('CLAIMED', 'RUNNING') AND (task.status = 'RUNNING' OR task.claim_expires_at > now())
  AND NOT EXISTS (
      SELECT FROM horsies_blocked AS blocked
      WHERE blocked.id = task.id AND blocked.kind = 'task' AND blocked.generation = task.generation
        AND blocked.status = task.status AND blocked.action IN ('record', 'recover'))
ORDER BY task.queue_name <> %(name)s, task.claimed_at, task.id LIMIT 5

-- name: read_meter
-- When a queue's rate allows the next start, and the seconds between two starts; no row if the queue has no rate.
SELECT horsies_starts_at(meter) AS starts_at, meter.seconds AS start_seconds FROM horsies_meters AS meter
WHERE meter.queue_name = %(name)s AND meter.lane = 0

-- name: list_rated_queues
-- The queues with these names whose rate has held tasks back within the last minute.
SELECT meter.queue_name::text AS name FROM horsies_meters AS meter
WHERE meter.queue_name = ANY(%(names)s::text[]) AND meter.lane = 0
  AND horsies_starts_at(meter) > now() - interval '1 minute'

-- name: list_newest_starts
-- For each of these workers that runs tasks, when the task that it started last started, and its oldest running task;
-- from the in-flight index.
SELECT task.claimed_by_worker_id::text AS worker_id, max(task.started_at) AS newest_at,
    min(task.started_at) AS oldest_at, (array_agg(task.id::text ORDER BY task.started_at, task.id))[1] AS oldest_id
FROM horsies_tasks AS task
WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.status = 'RUNNING' AND task.started_at IS NOT NULL
  AND task.claimed_by_worker_id = ANY(%(worker_ids)s::text[])
GROUP BY task.claimed_by_worker_id

-- name: count_ahead
-- The number of due tasks without a key that a claim takes before this task, up to "limit", and the number of keys that
-- take turns with them. Reads the front of the claim index for each priority, so that delayed tasks are never scanned.
WITH RECURSIVE levels AS (
    (SELECT priority FROM horsies_tasks
     WHERE status = 'PENDING' AND NOT held AND queue_name = %(name)s ORDER BY priority LIMIT 1)
    UNION ALL
    SELECT (SELECT task.priority FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = %(name)s
              AND task.priority > levels.priority ORDER BY task.priority LIMIT 1)
    FROM levels WHERE levels.priority < %(priority)s::integer)
SELECT count(*) AS due, horsies_count_lanes_v1(%(name)s::text, 100) AS keys FROM (
    SELECT FROM (SELECT * FROM levels LIMIT 200) AS levels CROSS JOIN LATERAL (
        SELECT FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = %(name)s
          AND task.priority = levels.priority AND task.enqueued_at <= now()
          AND (task.priority, task.enqueued_at, task.id)
              < (%(priority)s::integer, %(enqueued_at)s::timestamptz, %(id)s::uuid)
        ORDER BY task.enqueued_at, task.id LIMIT %(limit)s::integer) AS front
    LIMIT %(limit)s::integer) AS counted

-- name: count_ahead_in_lane
-- The number of due tasks in a lane that start before this task, up to "limit", and the number of keys that have turns
-- in between.
SELECT horsies_count_before_v1(
        %(name)s::text, %(lane)s::bigint, %(priority)s::integer, %(enqueued_at)s::timestamptz, %(id)s::uuid,
        %(limit)s::integer) AS due, horsies_count_lanes_v1(%(name)s::text, 100) AS keys

-- name: count_due
-- For each of these queues: the number of due and of delayed tasks, counted up to "limit" each, the first of them, and
-- whether the queue is paused.
WITH RECURSIVE levels AS (
    SELECT queue.name, (
        SELECT task.priority FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue.name
        ORDER BY task.priority LIMIT 1) AS priority
    FROM unnest(%(names)s::text[]) AS queue (name)
    UNION ALL
    SELECT levels.name, (
        SELECT task.priority FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = levels.name
          AND task.priority > levels.priority ORDER BY task.priority LIMIT 1)
    FROM levels WHERE levels.priority IS NOT NULL),
fronts AS MATERIALIZED (
    SELECT levels.name, front.due, front.delayed, front.first_at
    FROM (SELECT * FROM levels WHERE priority IS NOT NULL LIMIT 500) AS levels CROSS JOIN LATERAL (
        SELECT (
            SELECT count(*) FROM (
                SELECT FROM horsies_tasks AS task
                WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = levels.name
                  AND task.priority = levels.priority AND task.enqueued_at <= now()
                ORDER BY task.enqueued_at LIMIT %(limit)s::integer) AS counted) AS due, (
            SELECT count(*) FROM (
                SELECT FROM horsies_tasks AS task
                WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = levels.name
                  AND task.priority = levels.priority AND task.enqueued_at > now()
                ORDER BY task.enqueued_at LIMIT %(limit)s::integer) AS counted) AS delayed, (
            SELECT task.enqueued_at FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = levels.name
              AND task.priority = levels.priority ORDER BY task.enqueued_at LIMIT 1) AS first_at) AS front
    UNION ALL
    SELECT keyed.queue_name, keyed.due, keyed.delayed, keyed.first_due_at
    FROM horsies_count_keyed_v1(%(names)s::text[], %(limit)s::integer) AS keyed)
SELECT queue.name, coalesce(sum(fronts.due), 0)::bigint AS due,
    coalesce(sum(fronts.delayed), 0)::bigint AS delayed, min(fronts.first_at) AS first_at,
    stored.queue_name IS NOT NULL AS is_stored, stored.paused_at
FROM unnest(%(names)s::text[]) AS queue (name)
LEFT JOIN fronts ON fronts.name = queue.name
LEFT JOIN horsies_queues AS stored ON stored.queue_name = queue.name
GROUP BY queue.name, stored.queue_name, stored.paused_at

-- name: list_due_names
-- The task names among the first due tasks of each of these queues; at most 500 pairs of queue and priority, and 10,000
-- tasks. Parameters: names of queues or schedules.
WITH RECURSIVE levels AS (
    SELECT queue.name, (
        SELECT task.priority FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue.name
        ORDER BY task.priority LIMIT 1) AS priority
    FROM unnest(%(names)s::text[]) AS queue (name)
    UNION ALL
    SELECT levels.name, (
        SELECT task.priority FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = levels.name
          AND task.priority > levels.priority ORDER BY task.priority LIMIT 1)
    FROM levels WHERE levels.priority IS NOT NULL)
SELECT due.queue_name, due.name
FROM (SELECT levels.name AS queue_name, front.task_name::text AS name
      FROM (SELECT * FROM levels WHERE priority IS NOT NULL LIMIT 500) AS levels CROSS JOIN LATERAL (
          SELECT task.task_name FROM horsies_tasks AS task
          WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = levels.name
            AND task.priority = levels.priority AND task.enqueued_at <= now()
          ORDER BY task.enqueued_at, task.id LIMIT 1000) AS front
      LIMIT 10000) AS due
GROUP BY due.queue_name, due.name

-- name: list_task_sets
-- The task names of the workers that have not shut down. Workers of the same release register the same names, and a set
-- of ten thousand names takes 12 ms to list but only 1 ms to hash, so each distinct set is listed once, for one of its
-- workers.
SELECT alike.worker_ids, CASE WHEN worker.known_tasks IS NOT NULL
    THEN ARRAY(SELECT jsonb_object_keys(worker.known_tasks -> 'tasks')) END AS task_names
FROM (SELECT min(worker_id) AS first_id, array_agg(worker_id::text) AS worker_ids
      FROM horsies_workers WHERE stopped_at IS NULL
      GROUP BY jsonb_hash_extended(known_tasks, 0)) AS alike
JOIN horsies_workers AS worker ON worker.worker_id = alike.first_id

-- name: find_row_holder
-- The open transaction that has locked or changed this row. A role without pg_monitor sees no details of other roles'
-- sessions; a prepared transaction has no session.
SELECT held.pid, activity.application_name, activity.state, activity.xact_start AS since
FROM horsies_tasks AS task
JOIN pg_locks AS held ON held.locktype = 'transactionid' AND held.granted AND held.transactionid = task.xmax
LEFT JOIN pg_stat_activity AS activity ON activity.pid = held.pid
WHERE task.id = %(id)s::uuid AND held.pid IS DISTINCT FROM pg_backend_pid() LIMIT 1

-- name: find_task_transaction
-- The open transaction in which a task writes its rows and its outcome (tx), found by the name of its session.
SELECT pid, application_name, state, xact_start AS since FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'horsies:child-tx ' || %(id)s LIMIT 1

-- name: find_writers
-- Open transactions that have changed something, oldest first: one of them may have written a row that is not visible
-- yet. Prepared transactions are left out.
SELECT pid, application_name, state, xact_start AS since FROM pg_stat_activity
WHERE datname = current_database() AND backend_xid IS NOT NULL AND pid <> pg_backend_pid()
ORDER BY xact_start LIMIT 3

-- name: read_clock
-- This transaction's time.
SELECT now() AS now

-- name: list_map_places
-- The due and running items of a map, in order: they occupy the places under max_parallel. Due items come first in the
-- index on waiting items, so the search ends early.
SELECT place.id::text, place.status FROM (
    (SELECT task.id, task.status, task.workflow_item_index FROM horsies_tasks AS task
     WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.workflow_id = %(workflow_id)s::uuid
       AND task.workflow_node_index = %(node_index)s AND task.workflow_item_index IS NOT NULL
     ORDER BY task.claimed_by_worker_id LIMIT 5)
    UNION ALL
    (SELECT waiting.id, 'PENDING', waiting.workflow_item_index FROM (
        SELECT task.id, task.enqueued_at, task.workflow_item_index FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND task.workflow_item_index IS NOT NULL
          AND task.workflow_id = %(workflow_id)s::uuid AND task.workflow_node_index = %(node_index)s
        ORDER BY task.workflow_item_index LIMIT 200) AS waiting
     WHERE waiting.enqueued_at <> horsies_never_v1() LIMIT 5)) AS place
ORDER BY place.workflow_item_index LIMIT 5

-- name: explain_run
-- One run by its key, and the error that paused or ended it. With "node_id", that node as well; "task_index" is NULL
-- if the run has no such node. Nodes are found by the prefix of their key.
SELECT run.id::text, run.name, run.status, run.paused_at, run.completed_at, run.open_nodes, run.total_nodes,
    run.failed_nodes,
    coalesce(run.error::json #>> '{error_code,__builtin_task_code__}', run.error::json ->> 'error_code')
        AS error_code,
    CASE WHEN run.status = 'PAUSED' AND run.error IS NOT NULL THEN (
        SELECT failed.node_id FROM horsies_workflow_tasks AS failed
        WHERE failed.workflow_id = run.id AND failed.status = 'FAILED' AND failed.pauses
        ORDER BY failed.task_index LIMIT 1)
    WHEN run.status = 'FAILED' AND run.failed_nodes > 0 THEN (
        SELECT failed.node_id FROM horsies_workflow_tasks AS failed
        WHERE failed.workflow_id = run.id AND failed.status = 'FAILED'
        ORDER BY failed.completed_at, failed.task_index LIMIT 1) END AS failed_node,
    blocked.action AS blocked_action,
    blocked.error AS blocked_error, blocked.since AS blocked_since,
    node.task_index, node.status AS node_status, node.dependencies, node.join_type, node.min_success,
    now() AS looked_at
FROM horsies_workflows AS run
LEFT JOIN horsies_blocked AS blocked ON blocked.id = run.id AND blocked.kind = 'run'
    AND blocked.status = run.status
LEFT JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id AND node.node_id = %(node_id)s
WHERE run.id = %(id)s::uuid

-- name: list_open_nodes
-- The nodes of one run with these indexes, or all its open nodes, with their tasks and sub-runs; nodes that have
-- started come first.
SELECT node.task_index, node.node_id, node.kind, node.status, node.task_id::text,
    task.status AS task_status, node.items_total, node.items_open, node.items_bad,
    node.sub_workflow_id::text AS sub_run_id, child.status AS sub_run_status, node.completed_at,
    coalesce(node.started_at, node.enqueued_at) AS begun_at,
    coalesce(node.result::json #>> '{err,error_code,__builtin_task_code__}', task.error_code) AS error_code
FROM horsies_workflow_tasks AS node
LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
LEFT JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
WHERE node.workflow_id = %(id)s::uuid
  AND CASE WHEN %(indexes)s::integer[] IS NULL THEN node.status IN ('PENDING', 'READY', 'ENQUEUED', 'RUNNING')
      ELSE node.task_index = ANY(%(indexes)s::integer[]) END
ORDER BY node.status = 'PENDING', node.task_index LIMIT 20

-- name: explain_schedules
-- Schedules by their keys, each with an unfinished task or run, and the number of connected schedulers. Uses index
-- probes only.
SELECT state.schedule_name AS name, state.task_name, state.definition_key, state.owner, state.next_run_at,
    state.last_run_at, state.last_task_id::text, state.paused_at, state.skipped_at, state.skip_reason,
    coalesce(state.disabled_at >= state.updated_at, false) AS is_disabled, state.created_at,
    coalesce((
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.schedule_name = state.schedule_name AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
        LIMIT 1), (
        SELECT run.id FROM horsies_workflows AS run
        WHERE run.schedule_name = state.schedule_name AND run.status IN ('PENDING', 'RUNNING', 'PAUSED')
        LIMIT 1))::text AS unfinished_id,
    (SELECT count(*) FROM pg_stat_activity AS session
     WHERE session.datname = current_database() AND session.application_name = 'horsies:scheduler')
        AS schedulers,
    now() AS looked_at
FROM horsies_schedule_state AS state WHERE state.schedule_name = ANY(%(names)s::text[])
ORDER BY state.next_run_at, state.schedule_name
