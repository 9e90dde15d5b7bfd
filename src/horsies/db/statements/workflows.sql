-- Statements on workflows. The functions in db/functions advance a run, under its root's lock; these statements call
-- the functions and read rows.

-- name: start_runs
-- Nothing -> RUNNING for any number of runs; see horsies_start_v1.
-- Parameters: the plans of the runs to start: a JSON array.
SELECT id, created, name, fingerprint FROM horsies_start_v1(%(runs)s::text::jsonb)

-- name: lock_runs
-- Lock the roots of the runs whose tasks this transaction will end. They are locked before the tasks and in id order,
-- so that a transaction that has locked a task's row never waits for a run.
SELECT root.id::text FROM horsies_workflows AS root
WHERE root.id = ANY(ARRAY(
    SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = ANY(%(workflow_ids)s::uuid[])))
ORDER BY root.id FOR NO KEY UPDATE

-- name: pause_run
-- RUNNING -> PAUSED for a run and the running runs below it. Returns the run's previous status, or NULL if the run does
-- not exist. The notification makes workers release tasks that they have claimed ahead of time; for other tasks see
-- horsies_pause_runs.
SELECT paused.answer
FROM (SELECT horsies_pause_v1(%(id)s::uuid) AS answer) AS paused
CROSS JOIN LATERAL pg_notify('horsies_pause', %(id)s::text) AS noticed

-- name: resume_run
-- PAUSED -> RUNNING for a run and the paused runs below it.
SELECT horsies_resume_v1(%(id)s::uuid) AS answer

-- name: resume_retrying_run
-- PAUSED or FAILED -> RUNNING, with failed nodes retried; see horsies_resume_retrying_v1.
SELECT horsies_resume_retrying_v1(%(id)s::uuid) AS answer

-- name: cancel_run
-- Any open status -> CANCELLED, for a run and all its descendants. Parameters: reason is the JSON of a TaskError;
-- interrupt also stops running tasks.
SELECT horsies_cancel_v1(%(id)s::uuid, %(reason)s, %(interrupt)s) AS answer

-- name: retry_run
-- FAILED, PAUSED or RUNNING -> RUNNING, with failed nodes retried; see horsies_retry_v1. Parameters: node_ids is NULL
-- for all failed nodes.
SELECT horsies_retry_v1(%(id)s::uuid, %(node_ids)s::text[]) AS answer

-- name: signal_run
-- Deliver a value to a signal node, now or when such a node waits; see horsies_signal_v1. Parameters: value is JSON
-- text.
SELECT horsies_signal_v1(%(id)s::uuid, %(name)s, %(value)s) AS answer

-- name: list_signal_names
-- The signals that a run's nodes wait for or have received, by the primary key.
SELECT DISTINCT signal_name AS name FROM horsies_workflow_tasks
WHERE workflow_id = %(id)s::uuid AND kind = 'signal' ORDER BY signal_name

-- name: read_run_status
-- The status of a run, by primary key.
SELECT status FROM horsies_workflows WHERE id = %(id)s::uuid

-- name: read_runs
-- Runs for any number of simultaneous waiters, by primary key. Parameters: results larger than max_bytes are omitted.
SELECT run.id::text, run.name, run.definition_key, run.status, run.error, found.bytes AS result_bytes,
    found.result, output.node_id AS output_node_id
FROM horsies_workflows AS run CROSS JOIN LATERAL horsies_run_result_v1(run, %(max_bytes)s::bigint) AS found
LEFT JOIN horsies_workflow_tasks AS output
    ON output.workflow_id = run.id AND output.task_index = run.output_task_index
WHERE run.id = ANY(%(ids)s::uuid[])

-- name: read_result_nodes
-- The nodes whose results make up a completed run's result.
SELECT node.task_index, node.node_id
FROM horsies_workflows AS run CROSS JOIN LATERAL horsies_result_nodes_v1(run) AS node
WHERE run.id = %(id)s::uuid ORDER BY node.task_index

-- name: read_nodes
-- The nodes of one run in order, by the prefix of the primary key, without results. A node counts as running from its
-- first attempt until it ends.
SELECT run.definition_key, node.task_index, node.node_id, node.kind, node.task_name, node.dependencies,
    CASE WHEN node.status = 'ENQUEUED' AND (task.status = 'RUNNING' OR task.retry_count > 0) THEN 'RUNNING'
         ELSE node.status END AS status,
    node.task_id::text, task.retry_count, node.items_total, node.items_open, node.items_bad,
    node.sub_workflow_id::text, node.sub_workflow_name, node.sub_definition_key, node.sub_workflow_summary,
    child.status AS sub_workflow_status,
    node.enqueued_at, coalesce(node.started_at, task.started_at) AS started_at, node.completed_at
FROM horsies_workflows AS run
JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id
LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
LEFT JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
WHERE run.id = %(id)s::uuid
ORDER BY node.task_index

-- name: read_items
-- The items of a run's maps in order, by the index on the run; for a retried item, its last task. Results beyond the
-- first "max_bytes" are omitted. Parameters: max_bytes is how many bytes of results to read.
SELECT item.task_index, item.item_index, item.id::text, item.status, item.retry_count, item.enqueued_at,
    item.started_at, item.completed_at, item.failed_reason, item.error_code,
    octet_length(item.result) AS result_bytes,
    CASE WHEN sum(octet_length(item.result)) OVER (ORDER BY item.task_index, item.item_index)
        <= %(max_bytes)s::bigint THEN item.result END AS result
FROM (
    SELECT DISTINCT ON (task.workflow_node_index, task.workflow_item_index)
        task.workflow_node_index AS task_index, task.workflow_item_index AS item_index, task.id, task.status,
        task.retry_count, task.enqueued_at, task.started_at,
        coalesce(task.completed_at, task.failed_at) AS completed_at, task.failed_reason, task.error_code,
        task.result
    FROM horsies_tasks AS task
    WHERE task.workflow_id = %(id)s::uuid AND task.workflow_item_index IS NOT NULL
    ORDER BY task.workflow_node_index, task.workflow_item_index, task.id DESC) AS item
ORDER BY item.task_index, item.item_index

-- name: read_node
-- One node of a run by its id. If a row is returned, the run exists; if its status is not NULL, the node exists too.
-- Parameters: a result larger than max_bytes is omitted.
SELECT run.status AS run_status, run.definition_key, node.task_index, node.status, node.task_name, node.kind,
    size.bytes AS result_bytes,
    CASE WHEN size.bytes <= %(max_bytes)s::bigint THEN horsies_node_result_v1(node) END AS result
FROM horsies_workflows AS run
LEFT JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id AND node.node_id = %(node_id)s
LEFT JOIN LATERAL (SELECT horsies_result_bytes_v1(node) AS bytes OFFSET 0) AS size ON true
WHERE run.id = %(id)s::uuid

-- name: read_results
-- The results of nodes that have ended: one row per node, or one row per item if the result is a list of item results.
-- Sizes are summed first. Only the size is returned, in one row, for a node above "max_bytes" and for all nodes after
-- the sum has reached "max_bytes". The texts are read last, so that they are not part of a sort. Parameters: the nodes
-- whose results are read, as columns, and how many bytes of results to read.
WITH wanted AS MATERIALIZED (
    SELECT node.workflow_id, node.task_index, node.status, node.kind, node.task_name, node.sub_definition_key,
        node.sub_workflow_summary, octet_length(node.result) AS own_bytes,
        CASE WHEN node.result IS NULL THEN node.result_task_id END AS result_task_id,
        node.status = 'COMPLETED' AND node.kind IN ('map', 'workflow') AND node.result IS NULL
            AND node.result_task_id IS NULL AS is_list
    FROM unnest(%(workflow_ids)s::uuid[], %(indexes)s::integer[]) AS key (workflow_id, task_index)
    JOIN horsies_workflow_tasks AS node USING (workflow_id, task_index)
    WHERE node.status IN ('COMPLETED', 'FAILED', 'SKIPPED')),
parts AS (
    SELECT node.*, NULL::integer AS item_index, node.result_task_id AS task_id,
        coalesce(node.own_bytes, (
            SELECT octet_length(task.result) FROM horsies_tasks AS task
            WHERE task.id = node.result_task_id), 0) AS bytes
    FROM wanted AS node WHERE NOT node.is_list
    UNION ALL
    SELECT node.*, item.item_index, item.id, item.bytes
    FROM wanted AS node CROSS JOIN LATERAL horsies_list_v1(node.workflow_id, node.task_index) AS item
    WHERE node.is_list),
sized AS (
    SELECT parts.*, sum(bytes) OVER (PARTITION BY workflow_id, task_index)::bigint AS result_bytes
    FROM parts),
summed AS (
    SELECT sized.*, result_bytes <= %(max_bytes)s::bigint
        AND sum(bytes) FILTER (WHERE result_bytes <= %(max_bytes)s::bigint)
            OVER (ORDER BY workflow_id, task_index) <= %(max_bytes)s::bigint AS fits
    FROM sized ORDER BY workflow_id, task_index, item_index OFFSET 0)
SELECT part.workflow_id::text, part.task_index, part.item_index, part.status, part.kind, part.task_name,
    part.sub_definition_key, part.sub_workflow_summary, part.result_bytes,
    CASE WHEN part.fits THEN coalesce(
        -- Nearly every result comes from a task and is read directly: a function call would take twice the time.
        (SELECT coalesce(task.result, horsies_task_result_v1(task)) FROM horsies_tasks AS task
         WHERE task.id = part.task_id),
        (SELECT horsies_node_result_v1(node) FROM horsies_workflow_tasks AS node
         WHERE node.workflow_id = part.workflow_id AND node.task_index = part.task_index)) END AS result
FROM summed AS part WHERE part.fits OR coalesce(part.item_index, 0) = 0

-- name: read_places
-- The positions of runs in their trees; an expansion passes the position of its run to the run that it plans.
SELECT id::text, root_workflow_id::text, depth FROM horsies_workflows WHERE id = ANY(%(ids)s::uuid[])

-- name: read_tree
-- A run and its descendants, parents first; a very large tree is truncated.
WITH family AS MATERIALIZED (SELECT horsies_family_v1(%(id)s::uuid) AS id LIMIT %(limit)s::integer)
SELECT run.id::text, run.name, run.status, run.definition_key, run.workflow_key, run.on_error, run.error,
    run.matched_case, run.parent_workflow_id::text, run.parent_task_index, run.root_workflow_id::text,
    run.depth, run.total_nodes, run.open_nodes, run.failed_nodes, run.schedule_name, run.scheduled_for,
    run.sent_at, run.created_at, run.started_at, run.paused_at, run.completed_at,
    extract(epoch FROM coalesce(run.completed_at, now()) - run.started_at)::float8 AS duration_seconds
FROM horsies_workflows AS run WHERE run.id IN (SELECT family.id FROM family)
ORDER BY run.depth, run.created_at, run.id

-- name: read_tree_nodes
-- The nodes of these runs in order, with the columns for a drawing of the graph and without results. A sleep or signal
-- node counts as started when it starts to wait, because its task runs only after the wait.
SELECT node.workflow_id::text, node.task_index, node.node_id, node.kind, node.task_name, node.dependencies,
    node.join_type, node.min_success,
    CASE WHEN node.status = 'ENQUEUED' AND (task.status = 'RUNNING' OR task.retry_count > 0) THEN 'RUNNING'
         ELSE node.status END AS status,
    node.task_id::text, task.retry_count, node.items_total, node.items_open, node.items_bad, node.signal_name,
    node.sub_workflow_id::text, node.sub_workflow_name,
    CASE WHEN node.status = 'FAILED' THEN coalesce(
        node.result::json #>> '{err,error_code,__builtin_task_code__}', task.error_code) END AS error_code,
    CASE WHEN node.status = 'ENQUEUED' AND task.status = 'PENDING' AND task.enqueued_at > now()
          AND task.enqueued_at < horsies_never_v1() THEN task.enqueued_at END AS due_at,
    coalesce(node.started_at, task.started_at) AS started_at, node.completed_at,
    CASE WHEN node.status <> 'SKIPPED' THEN extract(epoch FROM coalesce(node.completed_at, now())
        - CASE WHEN node.kind IN ('sleep', 'signal') THEN node.enqueued_at
               ELSE coalesce(node.started_at, task.started_at) END)::float8 END AS duration_seconds,
    node.enqueued_at
FROM horsies_workflow_tasks AS node
LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
WHERE node.workflow_id = ANY(%(ids)s::uuid[])
ORDER BY node.workflow_id, node.task_index

-- name: count_nodes_by_status
-- The number of a run's nodes by status, for a run that is too large to draw.
SELECT node.status::text, count(*) AS nodes FROM horsies_workflow_tasks AS node
WHERE node.workflow_id = %(id)s::uuid GROUP BY node.status ORDER BY node.status

-- name: list_retried_attempts
-- The attempts of these tasks that were followed by a retry, by the index on task and attempt. Parameters: the tasks
-- whose attempts are listed.
SELECT attempt.task_id::text, attempt.finished_at FROM horsies_task_attempts AS attempt
WHERE attempt.task_id = ANY(%(ids)s::uuid[]) AND attempt.will_retry
ORDER BY attempt.task_id, attempt.attempt LIMIT %(limit)s::integer

-- name: list_map_items
-- One page of a map's items; items that did not complete come first. Reads only the items of this map; the pages follow
-- the key (is_well, item_index). Parameters: the position behind which a page of items begins, in the order of
-- list_map_items.
SELECT item.id::text, item.item_index, item.status, item.is_well, item.retry_count, item.error_code,
    item.started_at, item.duration_seconds
FROM (
    SELECT task.id, task.workflow_item_index AS item_index, task.status::text,
        task.status NOT IN ('FAILED', 'EXPIRED', 'CANCELLED') AS is_well, task.retry_count,
        task.error_code::text, task.started_at,
        extract(epoch FROM coalesce(task.completed_at, task.failed_at, now()) - task.started_at)::float8
            AS duration_seconds
    FROM horsies_tasks AS task
    WHERE task.workflow_id = %(id)s::uuid AND task.workflow_node_index = %(task_index)s::integer
      AND task.workflow_item_index IS NOT NULL) AS item
WHERE (item.is_well, item.item_index) > (%(after_well)s::boolean, %(after_index)s::integer)
ORDER BY item.is_well, item.item_index LIMIT %(limit)s::integer

-- name: find_run_problems
-- The problems of one open run; find_broken_runs returns those of all runs.
SELECT %(id)s::text AS id, problem FROM horsies_problems_v1(%(id)s::uuid) AS problem LIMIT %(limit)s::integer

-- name: list_newest_runs
-- The newest runs, by the index on the start time. The inner LIMIT bounds the cost of a filter that matches nothing;
-- the outer LIMIT ends the scan as soon as there are enough rows. Parameters: the same filters among the newest
-- "window" runs.
SELECT newest.id::text, newest.name, newest.status, newest.definition_key, newest.workflow_key,
    newest.parent_workflow_id::text, newest.total_nodes, newest.open_nodes, newest.failed_nodes,
    coalesce(newest.error::json #>> '{error_code,__builtin_task_code__}', newest.error::json ->> 'error_code')
        AS error_code, newest.created_at, newest.completed_at,
    extract(epoch FROM now() - newest.created_at)::float8 AS age_seconds
FROM (
    SELECT run.* FROM horsies_workflows AS run
    WHERE (run.created_at, run.id) < (%(before_at)s::timestamptz, %(before_id)s::uuid)
      AND run.created_at >= %(since)s::timestamptz
    ORDER BY run.created_at DESC, run.id DESC LIMIT %(window)s::integer) AS newest
WHERE (cardinality(%(statuses)s::text[]) = 0 OR newest.status = ANY(%(statuses)s::text[]))
  AND (cardinality(%(names)s::text[]) = 0 OR newest.name = ANY(%(names)s::text[]))
  AND (cardinality(%(workflow_keys)s::text[]) = 0 OR newest.workflow_key = ANY(%(workflow_keys)s::text[]))
  AND (%(include_children)s::boolean OR newest.parent_workflow_id IS NULL)
ORDER BY newest.created_at DESC, newest.id DESC LIMIT %(limit)s::integer

-- name: end_of_run_window
-- The end of the window of list_newest_runs: the last run inside the window and the first run beyond it; fewer rows at
-- the end of the table.
SELECT run.id::text, run.created_at FROM horsies_workflows AS run
WHERE (run.created_at, run.id) < (%(before_at)s::timestamptz, %(before_id)s::uuid)
  AND run.created_at >= %(since)s::timestamptz
ORDER BY run.created_at DESC, run.id DESC OFFSET %(window)s::integer - 1 LIMIT 2

-- name: list_open_runs
-- The newest open runs, regardless of age, from the index on open runs, up to the limit for each status.
SELECT run.id::text, run.name, run.status, run.definition_key, run.workflow_key, run.parent_workflow_id::text,
    run.total_nodes, run.open_nodes, run.failed_nodes,
    coalesce(run.error::json #>> '{error_code,__builtin_task_code__}', run.error::json ->> 'error_code')
        AS error_code, run.created_at, run.completed_at,
    extract(epoch FROM now() - run.created_at)::float8 AS age_seconds
FROM unnest(%(statuses)s::text[]) AS wanted (status) CROSS JOIN LATERAL (
    SELECT open.* FROM horsies_workflows AS open
    WHERE open.status = wanted.status AND open.status IN ('PENDING', 'RUNNING', 'PAUSED')
      AND (open.created_at, open.id) < (%(before_at)s::timestamptz, %(before_id)s::uuid)
      AND open.created_at >= %(since)s::timestamptz
      AND (cardinality(%(names)s::text[]) = 0 OR open.name = ANY(%(names)s::text[]))
      AND (cardinality(%(workflow_keys)s::text[]) = 0 OR open.workflow_key = ANY(%(workflow_keys)s::text[]))
      AND (%(include_children)s::boolean OR open.parent_workflow_id IS NULL)
    ORDER BY open.created_at DESC, open.id DESC LIMIT %(limit)s::integer) AS run
ORDER BY run.created_at DESC, run.id DESC LIMIT %(limit)s::integer

-- name: read_run_position
-- The start time of a run, which is the position after which a list continues.
SELECT id::text, created_at FROM horsies_workflows WHERE id = %(id)s::uuid

-- name: find_broken_runs
-- Open runs whose rows contradict each other, with the problems; only manual edits cause them. The open runs are
-- collected first, from the index on open runs; if they were sorted by primary key, the planner might search the whole
-- history for them. Maps that an earlier release left RUNNING in ended runs are found by their items in flight.
WITH open AS MATERIALIZED (SELECT id FROM horsies_workflows WHERE status IN ('RUNNING', 'PAUSED')),
items AS MATERIALIZED (
    SELECT DISTINCT task.workflow_id, task.workflow_node_index AS task_index FROM horsies_tasks AS task
    WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.workflow_item_index IS NOT NULL)
SELECT id::text, problem FROM (
    SELECT open.id, problem FROM open CROSS JOIN LATERAL horsies_problems_v1(open.id) AS problem
    UNION ALL
    SELECT items.workflow_id, 'map node ' || found.node_id || ' is RUNNING although the run is '
        || found.run_status || '; cancel the run once more'
    FROM items CROSS JOIN LATERAL (
        SELECT node.node_id, run.status AS run_status
        FROM horsies_workflow_tasks AS node JOIN horsies_workflows AS run ON run.id = node.workflow_id
        WHERE node.workflow_id = items.workflow_id AND node.task_index = items.task_index
          AND run.id = items.workflow_id AND node.status = 'RUNNING'
          AND run.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') OFFSET 0) AS found) AS broken
ORDER BY id LIMIT %(limit)s

-- name: find_paused_runs
-- Runs that have been paused for longer than allowed, oldest first, with the duration of their pause.
SELECT id::text, extract(epoch FROM now() - paused_at)::float8 AS paused_seconds FROM horsies_workflows
WHERE status = 'PAUSED' AND paused_at < now() - %(max_paused_seconds)s * interval '1 second'
  AND id <> ALL(%(excluded)s::uuid[])
ORDER BY paused_at LIMIT %(limit)s

-- name: expire_run
-- PAUSED -> EXPIRED unless the run has been resumed; see horsies_expire_v1. Parameters: reason is the JSON of a
-- TaskError.
SELECT horsies_expire_v1(%(id)s::uuid, %(max_paused_seconds)s, %(reason)s) AS expired

-- name: delete_old_workflows
-- Delete whole trees of runs past their retention, once the root and every task in the tree have ended. Nodes, signals
-- and child runs are deleted with the root; this statement deletes the tasks. Parameters: limit counts trees of runs.
WITH old AS MATERIALIZED (
    SELECT root.id FROM horsies_workflows AS root
    WHERE root.completed_at < now() - %(hours)s * interval '1 hour' AND root.parent_workflow_id IS NULL
      AND NOT EXISTS (
        SELECT FROM horsies_workflows AS run JOIN horsies_tasks AS task ON task.workflow_id = run.id
        WHERE (run.id = root.id OR (run.root_workflow_id = root.id AND run.parent_workflow_id IS NOT NULL))
          AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING'))
    ORDER BY root.completed_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
tasks AS (
    DELETE FROM horsies_tasks WHERE workflow_id IN (
        SELECT id FROM old
        UNION ALL
        SELECT run.id FROM horsies_workflows AS run JOIN old ON run.root_workflow_id = old.id
        WHERE run.parent_workflow_id IS NOT NULL))
DELETE FROM horsies_workflows WHERE id IN (SELECT id FROM old)
RETURNING id::text
