-- Statements on workflows. What moves a run lives in the functions of the migrations, under the lock of its root;
-- here they are called, and rows are read.

-- name: start_runs
-- Nothing -> RUNNING for any number of runs; see horsies_start_v1.
SELECT id, created, name, fingerprint FROM horsies_start_v1(%(runs)s::text::json)

-- name: lock_runs
-- The roots of the runs whose tasks this transaction is about to end, before the tasks and in the order of their ids:
-- nobody who holds a task's row ever waits for a run.
SELECT root.id::text FROM horsies_workflows AS root
WHERE root.id = ANY(ARRAY(
    SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = ANY(%(workflow_ids)s::uuid[])))
ORDER BY root.id FOR NO KEY UPDATE

-- name: pause_run
-- RUNNING -> PAUSED, with what runs below; says which status it met, NULL for no such run.
SELECT horsies_pause_v1(%(id)s::uuid) AS answer

-- name: resume_run
-- PAUSED -> RUNNING, with what is paused below.
SELECT horsies_resume_v1(%(id)s::uuid) AS answer

-- name: cancel_run
-- Any open status -> CANCELLED, with everything below.
SELECT horsies_cancel_v1(%(id)s::uuid, %(reason)s, %(interrupt)s) AS answer

-- name: retry_run
-- FAILED, PAUSED or RUNNING -> RUNNING with failed nodes tried again; see horsies_retry_v1.
SELECT horsies_retry_v1(%(id)s::uuid, %(node_ids)s::text[]) AS answer

-- name: signal_run
-- A value for a signal node that waits, or will wait; see horsies_signal_v1.
SELECT horsies_signal_v1(%(id)s::uuid, %(name)s, %(value)s) AS answer

-- name: read_runs
-- What waiters need, for any number of them at once, by primary key.
SELECT run.id::text, run.name, run.definition_key, run.status, run.error, horsies_run_result_v1(run) AS result, output.node_id AS output_node_id
FROM horsies_workflows AS run
LEFT JOIN horsies_workflow_tasks AS output
    ON output.workflow_id = run.id AND output.task_index = run.output_task_index
WHERE run.id = ANY(%(ids)s::uuid[])

-- name: read_nodes
-- The nodes of one run in their order, by the primary key's prefix. Whether a node runs is what its task says; after
-- the first attempt it runs until it ends. Results only when asked for.
SELECT node.task_index, node.node_id, node.kind, node.task_name, node.dependencies,
    CASE WHEN node.status = 'ENQUEUED' AND (task.status = 'RUNNING' OR task.retry_count > 0) THEN 'RUNNING'
         ELSE node.status END AS status,
    node.task_id::text, task.retry_count, node.items_total, node.items_open, node.items_bad,
    node.sub_workflow_id::text, node.sub_workflow_name, node.sub_workflow_summary, child.status AS sub_workflow_status,
    node.enqueued_at, coalesce(node.started_at, task.started_at) AS started_at, node.completed_at,
    CASE WHEN %(include_results)s THEN horsies_node_result_v1(node) END AS result
FROM horsies_workflow_tasks AS node
LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
LEFT JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
WHERE node.workflow_id = %(id)s::uuid
ORDER BY node.task_index

-- name: read_node
-- One node of a run by its id; the run exists when a row comes back, the node when its status is there.
SELECT run.status AS run_status, run.definition_key, node.status, node.task_name, node.kind,
    horsies_node_result_v1(node) AS result
FROM horsies_workflows AS run
LEFT JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id AND node.node_id = %(node_id)s
WHERE run.id = %(id)s::uuid

-- name: read_inputs
-- The results other nodes take, each once however many take it. A node that has not ended has none yet.
SELECT node.workflow_id::text, node.task_index, node.status, node.kind, node.task_name, node.sub_definition_key,
    node.sub_workflow_summary, horsies_node_result_v1(node) AS result
FROM unnest(%(workflow_ids)s::uuid[], %(indexes)s::integer[]) AS wanted (workflow_id, task_index)
JOIN horsies_workflow_tasks AS node USING (workflow_id, task_index)
WHERE node.status IN ('COMPLETED', 'FAILED', 'SKIPPED')

-- name: read_places
-- Where runs stand in their trees: what an expansion hands on to the run it plans.
SELECT id::text, root_workflow_id::text, depth FROM horsies_workflows WHERE id = ANY(%(ids)s::uuid[])

-- name: find_broken_runs
-- Open runs whose rows do not add up, with what is wrong; none of it happens by itself.
SELECT run.id::text, problem FROM horsies_workflows AS run CROSS JOIN LATERAL horsies_problems_v1(run.id) AS problem
WHERE run.status IN ('RUNNING', 'PAUSED')
ORDER BY run.id LIMIT %(limit)s

-- name: mend_run
-- Put one open run right again; see horsies_mend_v1.
SELECT horsies_mend_v1(%(id)s::uuid) IS NULL AS mended

-- name: find_paused_runs
-- Runs that have been paused for longer than allowed, oldest first.
SELECT id::text FROM horsies_workflows
WHERE status = 'PAUSED' AND paused_at < now() - %(max_paused_seconds)s * interval '1 second'
ORDER BY paused_at LIMIT %(limit)s

-- name: expire_run
-- PAUSED -> EXPIRED unless it was resumed meanwhile; see horsies_expire_v1.
SELECT horsies_expire_v1(%(id)s::uuid, %(max_paused_seconds)s, %(reason)s) AS expired

-- name: delete_old_workflows
-- Whole trees past their retention, once the root and every task in the tree have ended; nodes, signals and children
-- go with the root, tasks with this statement.
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
