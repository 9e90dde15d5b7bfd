-- Erasing: find the tasks and runs about one person, export them, and delete or redact them. Only tasks and runs that have ended are erased.

-- name: meet_erasures
-- The tasks and runs that an order lists, by primary key. A run counts as ended once its root and every task in its
-- tree have ended. "is_awaited" means that an open run of a durable function may still take the result.
SELECT task.id::text AS id, task.status::text AS status, task.created_at,
    coalesce(task.completed_at, task.failed_at) AS finished_at, false AS is_run,
    task.workflow_id IS NOT NULL AS is_part, EXISTS (
        SELECT FROM horsies_tasks AS waiting
        WHERE waiting.id = task.wakes_task_id AND waiting.status IN ('PENDING', 'CLAIMED', 'RUNNING')) AS is_awaited,
    task.redacted_at IS NOT NULL AS is_redacted
FROM horsies_tasks AS task WHERE task.id = ANY(%(ids)s::uuid[])
UNION ALL
SELECT root.id::text, CASE WHEN EXISTS (
        SELECT FROM horsies_workflows AS run JOIN horsies_tasks AS task ON task.workflow_id = run.id
        WHERE (run.id = root.id OR (run.root_workflow_id = root.id AND run.parent_workflow_id IS NOT NULL))
          AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')) THEN 'RUNNING' ELSE root.status::text END,
    root.created_at, root.completed_at, true, root.parent_workflow_id IS NOT NULL, EXISTS (
        SELECT FROM horsies_tasks AS waiting
        WHERE waiting.id = root.wakes_task_id AND waiting.status IN ('PENDING', 'CLAIMED', 'RUNNING')),
    root.redacted_at IS NOT NULL
FROM horsies_workflows AS root WHERE root.id = ANY(%(ids)s::uuid[])

-- name: read_erased_keys
-- The keys of tasks, and of the tasks of runs, that are about to be erased. A key that all calls of a task share does
-- not identify a person, so its limits and its pause are kept.
SELECT DISTINCT task.queue_name::text AS queue, task.lane_key AS key FROM horsies_tasks AS task
WHERE task.lane_key IS NOT NULL
  AND NOT EXISTS (SELECT FROM horsies_task_defaults AS defaults WHERE defaults.fixed_key = task.lane_key)
  AND (task.id = ANY(%(ids)s::uuid[]) OR task.workflow_id = ANY(ARRAY(
    SELECT run.id FROM horsies_workflows AS run
    WHERE run.id = ANY(%(ids)s::uuid[])
       OR (run.root_workflow_id = ANY(%(ids)s::uuid[]) AND run.parent_workflow_id IS NOT NULL))))

-- name: delete_tasks
-- Ended tasks -> nothing; a trigger deletes their attempts, logs, steps, signals and waits (horsies_delete_attempts).
-- Tasks of workflows are deleted with their run.
DELETE FROM horsies_tasks
WHERE id = ANY(%(ids)s::uuid[]) AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
  AND workflow_id IS NULL
RETURNING id::text

-- name: delete_runs
-- Ended runs -> nothing, as whole trees with their nodes, signals and tasks. The caller has locked the roots, and has
-- checked under that lock that every task in the trees has ended. Returns the ids of the roots and of all runs and
-- tasks below them.
WITH ended AS MATERIALIZED (
    SELECT root.id FROM horsies_workflows AS root
    WHERE root.id = ANY(%(ids)s::uuid[]) AND root.parent_workflow_id IS NULL
      AND root.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')),
below AS MATERIALIZED (
    SELECT run.id FROM horsies_workflows AS run
    WHERE run.root_workflow_id = ANY(ARRAY(SELECT ended.id FROM ended)) AND run.parent_workflow_id IS NOT NULL),
tasks AS (
    DELETE FROM horsies_tasks
    WHERE workflow_id = ANY(ARRAY(SELECT ended.id FROM ended UNION ALL SELECT below.id FROM below))
    RETURNING id),
runs AS (DELETE FROM horsies_workflows WHERE id = ANY(ARRAY(SELECT ended.id FROM ended)) RETURNING id)
SELECT runs.id::text, true AS is_root FROM runs
UNION ALL SELECT found.id::text, false
FROM (SELECT tasks.id FROM tasks UNION ALL SELECT below.id FROM below) AS found

-- name: redact_tasks
-- Redact ended tasks: the record that they ran is kept, and everything that may identify a person is removed; see
-- horsies_redact_tasks_v1.
SELECT redacted.id::text FROM horsies_redact_tasks_v1(%(ids)s::uuid[]) AS redacted (id)

-- name: redact_runs
-- Redact ended runs, as whole trees; see horsies_redact_runs_v1. The caller has locked the roots.
SELECT redacted.id::text, redacted.is_root FROM horsies_redact_runs_v1(%(ids)s::uuid[]) AS redacted

-- name: forget_tasks
-- Erase the traces of erased tasks and runs in other tables: refused calls, refused changes, the texts of open
-- findings, and the reasons of manual changes.
WITH named AS MATERIALIZED (
    SELECT kind || erased.id::text AS subject
    FROM unnest(%(ids)s::uuid[]) AS erased (id), unnest(ARRAY['task ', 'run ']) AS kind),
findings AS (
    UPDATE horsies_findings SET sentence = 'erased', remedy = NULL
    WHERE subject = ANY(ARRAY(SELECT named.subject FROM named))),
refusals AS (DELETE FROM horsies_refusals WHERE task_id = ANY(%(ids)s::uuid[])),
blocked AS (
    DELETE FROM horsies_blocked WHERE id = ANY(%(ids)s::uuid[]) OR workflow_id = ANY(%(ids)s::uuid[]))
UPDATE horsies_actions AS change SET detail = 'erased'
WHERE change.detail IS NOT NULL AND change.order_id IS NULL AND change.subject::text = ANY(ARRAY(
    SELECT named.subject FROM named))

-- name: forget_keys
-- Delete the limits and pauses of keys without an open task, and erase these keys from the record of changes and from
-- open findings; a finding about a key begins with the text in "openings". Three index probes look for open tasks,
-- because open tasks with keys are in three indexes. A meter is kept while its starts are not yet paid for, because the
-- next task with the key must wait for that. Returns the keys that still have open tasks.
WITH given AS MATERIALIZED (
    SELECT asked.queue, asked.key, asked.opening, horsies_lane_v1(asked.queue, asked.key) AS lane
    FROM unnest(%(queues)s::text[], %(keys)s::text[], %(openings)s::text[]) AS asked (queue, key, opening)),
free AS MATERIALIZED (
    SELECT given.queue, given.key, given.opening, given.lane FROM given
    WHERE NOT EXISTS (
        SELECT FROM horsies_tasks AS task WHERE task.lane IS NOT NULL AND task.status IN ('CLAIMED', 'RUNNING')
          AND task.queue_name = given.queue AND task.lane = given.lane)
      AND NOT EXISTS (
        SELECT FROM horsies_tasks AS task WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
          AND task.enqueued_at <= task.updated_at AND task.queue_name = given.queue AND task.lane = given.lane)
      AND NOT EXISTS (
        SELECT FROM horsies_tasks AS task WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
          AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at
          AND task.queue_name = given.queue AND task.lane = given.lane)),
lanes AS (
    DELETE FROM horsies_lanes AS stored USING free
    WHERE stored.queue_name = free.queue AND stored.lane = free.lane AND stored.task_rate_seconds IS NULL),
meters AS (
    DELETE FROM horsies_meters AS stored USING free
    WHERE stored.queue_name = free.queue AND stored.lane = free.lane AND stored.next_at <= clock_timestamp()),
findings AS (
    UPDATE horsies_findings AS stored SET sentence = 'erased', remedy = NULL FROM free
    WHERE stored.subject = 'queue ' || free.queue AND starts_with(stored.sentence, free.opening)),
changes AS (
    UPDATE horsies_actions AS change SET
        subject = left('a key of queue ' || free.queue, 255),
        detail = CASE WHEN change.detail IS NOT NULL THEN 'erased' END
    FROM free
    WHERE change.order_id IS NULL
      AND change.subject::text = left('key ' || free.key || ' of queue ' || free.queue, 255))
SELECT given.queue, given.key FROM given
WHERE NOT EXISTS (SELECT FROM free WHERE free.queue = given.queue AND free.key = given.key)

-- name: find_key_queues
-- Return the queues that have limits or a pause for this key, recorded changes to the key, or a meter that can be
-- deleted. Return none if all calls of a task share the key. A recorded subject has the form 'key K of queue Q'. Queue
-- names contain no spaces, so if the text after this key contains one, the subject belongs to a longer key. The
-- statement reads every recorded change and every meter.
SELECT found.queue, %(key)s::text AS key FROM (
    SELECT stored.queue_name::text AS queue FROM horsies_lanes AS stored
    WHERE stored.lane_key = %(key)s::text AND stored.task_rate_seconds IS NULL
    UNION
    SELECT meter.queue_name::text FROM horsies_meters AS meter
    WHERE meter.next_at <= clock_timestamp() AND meter.lane = horsies_lane_v1(meter.queue_name, %(key)s::text)
    UNION
    SELECT named.queue FROM (
        SELECT substr(change.subject, length(start.words) + 1) AS queue
        FROM horsies_actions AS change, (
            SELECT left('key ' || %(key)s::text || ' of queue ', 255) AS words) AS start
        WHERE change.order_id IS NULL AND starts_with(change.subject, start.words)) AS named
    WHERE strpos(named.queue, ' ') = 0) AS found
WHERE NOT EXISTS (SELECT FROM horsies_task_defaults AS defaults WHERE defaults.fixed_key = %(key)s::text)

-- name: read_run_keys
-- The keys of runs, and of the runs below them, that are about to be erased.
SELECT DISTINCT run.workflow_key AS key FROM horsies_workflows AS run
WHERE run.workflow_key IS NOT NULL AND (run.id = ANY(%(ids)s::uuid[])
    OR (run.root_workflow_id = ANY(%(ids)s::uuid[]) AND run.parent_workflow_id IS NOT NULL))

-- name: forget_run_keys
-- Erase keys from the filters of earlier bulk orders of runs, which list runs by their keys. Only that list in an
-- order's plan is rewritten: the same text elsewhere in the plan is a name or a JSON key, and is kept. Reads every
-- recorded order of runs.
UPDATE horsies_actions AS change SET order_plan = jsonb_set(change.order_plan::jsonb, '{runs,workflow_keys}', (
    SELECT jsonb_agg(CASE WHEN named.key = ANY(%(keys)s::text[]) THEN 'erased' ELSE named.key END ORDER BY named.position)
    FROM jsonb_array_elements_text(change.order_plan::jsonb #> '{runs,workflow_keys}') WITH ORDINALITY
        AS named (key, position)))::text
WHERE change.order_id IS NOT NULL AND right(change.verb, 5) = '_runs'
  AND change.order_plan::jsonb #> '{runs,workflow_keys}' ?| %(keys)s::text[]

-- name: find_tasks_by_key
-- The tasks in one window of ids, newest first, that have this key as their key, idempotency key or unique key, and the
-- deliveries of webhooks with a finding about this key, which begins with the text in "opening".
SELECT newest.id::text FROM (
    SELECT id, task_name, kwargs, lane_key, idempotency_key, unique_key FROM horsies_tasks
    WHERE id < %(before)s::uuid AND id >= %(since)s::uuid
    ORDER BY id DESC LIMIT %(window)s::integer) AS newest
WHERE %(key)s::text IN (newest.lane_key, newest.idempotency_key, newest.unique_key)
  OR CASE WHEN starts_with(newest.task_name, 'horsies.webhook.')
     THEN starts_with(newest.kwargs::json #>> '{event,data,sentence}', %(opening)s::text) END
ORDER BY newest.id DESC

-- name: find_runs_by_key
-- The roots of the runs started between two times that have this key, or have a node with this key. NULL as a time
-- means no bound. Reads every run.
SELECT DISTINCT run.root_workflow_id::text AS id FROM horsies_workflows AS run
WHERE (run.workflow_key = %(key)s::text OR EXISTS (
    SELECT FROM horsies_workflow_tasks AS node WHERE node.workflow_id = run.id AND node.lane_key = %(key)s::text))
  AND (%(since)s::timestamptz IS NULL OR run.created_at >= %(since)s::timestamptz)
  AND (%(until)s::timestamptz IS NULL OR run.created_at < %(until)s::timestamptz)

-- name: find_calls
-- The arguments of nodes, starting behind a given node, that contain both texts. Nodes are searched because skipped
-- nodes have no task. The order is the primary key, so that each page continues after the previous page.
SELECT page.workflow_id::text AS run_id, page.task_index, page.task_name::text AS task_name,
    page.root_id::text AS root_id, page.task_kwargs AS kwargs
FROM (
    SELECT node.workflow_id, node.task_index, node.task_name, node.task_kwargs, (
        SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = node.workflow_id) AS root_id
    FROM horsies_workflow_tasks AS node
    WHERE (node.workflow_id, node.task_index) > (%(run_id)s::uuid, %(task_index)s::integer)
    ORDER BY node.workflow_id, node.task_index LIMIT %(window)s::integer) AS page
WHERE strpos(page.task_kwargs, %(key)s) > 0 AND strpos(page.task_kwargs, %(needle)s) > 0
ORDER BY page.workflow_id, page.task_index

-- name: end_of_calls
-- The last node of one page of find_calls; no row means that there are no more nodes.
SELECT page.workflow_id::text AS run_id, page.task_index FROM (
    SELECT node.workflow_id, node.task_index FROM horsies_workflow_tasks AS node
    WHERE (node.workflow_id, node.task_index) > (%(run_id)s::uuid, %(task_index)s::integer)
    ORDER BY node.workflow_id, node.task_index LIMIT %(window)s::integer) AS page
ORDER BY page.workflow_id DESC, page.task_index DESC LIMIT 1

-- name: read_roots
-- The roots of the trees to which these tasks and runs belong.
SELECT asked.id::text AS id, run.root_workflow_id::text AS root_id
FROM unnest(%(ids)s::uuid[]) AS asked (id)
LEFT JOIN horsies_tasks AS task ON task.id = asked.id
JOIN horsies_workflows AS run ON run.id = coalesce(task.workflow_id, asked.id)

-- name: find_definitions
-- The schedules that were added at run time, with their arguments; there are few of them.
SELECT schedule_name::text AS name, definition FROM horsies_schedule_state
WHERE definition IS NOT NULL ORDER BY schedule_name

-- name: export_tasks
-- Every column of tasks, and the rows about them in other tables, as JSON.
SELECT (to_jsonb(task) || jsonb_build_object(
    'attempts', (SELECT jsonb_agg(to_jsonb(tried) ORDER BY tried.attempt)
        FROM horsies_task_attempts AS tried WHERE tried.task_id = task.id),
    'progress', (SELECT to_jsonb(report) FROM horsies_task_progress AS report WHERE report.task_id = task.id),
    'logs', (SELECT jsonb_agg(to_jsonb(log) ORDER BY log.generation)
        FROM horsies_task_logs AS log WHERE log.task_id = task.id),
    'steps', (SELECT jsonb_agg(to_jsonb(step) ORDER BY step.position)
        FROM horsies_steps AS step WHERE step.task_id = task.id),
    'signals', (SELECT jsonb_agg(to_jsonb(sent) ORDER BY sent.id)
        FROM horsies_task_signals AS sent WHERE sent.task_id = task.id)))::text AS document
FROM horsies_tasks AS task WHERE task.id = ANY(%(ids)s::uuid[]) ORDER BY task.id

-- name: export_runs
-- Every column of runs and of all runs below them, with their nodes and signals, as JSON.
SELECT (to_jsonb(run) || jsonb_build_object(
    'nodes', (SELECT jsonb_agg(to_jsonb(node) ORDER BY node.task_index)
        FROM horsies_workflow_tasks AS node WHERE node.workflow_id = run.id),
    'signals', (SELECT jsonb_agg(to_jsonb(sent) ORDER BY sent.id)
        FROM horsies_workflow_signals AS sent WHERE sent.workflow_id = run.id)))::text AS document
FROM horsies_workflows AS run
WHERE run.id = ANY(%(ids)s::uuid[])
   OR (run.root_workflow_id = ANY(%(ids)s::uuid[]) AND run.parent_workflow_id IS NOT NULL)
ORDER BY run.root_workflow_id, run.depth, run.id

-- name: list_run_tasks
-- The tasks of runs, and of all runs below them.
SELECT task.id::text FROM horsies_tasks AS task WHERE task.workflow_id = ANY(ARRAY(
    SELECT run.id FROM horsies_workflows AS run
    WHERE run.id = ANY(%(ids)s::uuid[])
       OR (run.root_workflow_id = ANY(%(ids)s::uuid[]) AND run.parent_workflow_id IS NOT NULL)))
ORDER BY task.id

-- name: export_changes
-- The manual changes to tasks, runs and keys, by the index on subjects, as JSON.
SELECT to_jsonb(change)::text AS document FROM horsies_actions AS change
WHERE change.subject::text = ANY(%(subjects)s::text[]) ORDER BY change.id

-- name: export_keys
-- The limits and pauses of one key in all queues, as JSON; there are few of them.
SELECT to_jsonb(stored)::text AS document FROM horsies_lanes AS stored
WHERE stored.lane_key = %(key)s::text ORDER BY stored.queue_name
