-- The workflow audit. A run advances in the same transaction that ends a task, so no crash leaves a run in need of
-- repair: rows contradict each other only if they were edited manually. The audit reports runs with such rows, which
-- can be cancelled or retried. It also lists changes that the database refuses.

-- Return nodes whose rows contradict their tasks.
CREATE OR REPLACE FUNCTION horsies_node_problems(p_run horsies_workflows) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT 'the run has ' || p_run.total_nodes || ' nodes, ' || count(*) || ' are stored'
    FROM horsies_workflow_tasks AS node WHERE node.workflow_id = p_run.id HAVING count(*) <> p_run.total_nodes
    UNION ALL
    SELECT 'node ' || node.node_id || CASE
        WHEN node.status = 'READY' AND task.id IS NULL THEN ' is ready but has no task'
        WHEN node.status IN ('PENDING', 'READY') THEN ' waits although it has a task'
        WHEN task.id IS NULL THEN ' waits for a task that is no longer stored'
        ELSE ' is open although its task ended as ' || task.status END
    FROM horsies_workflow_tasks AS node LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
    WHERE node.workflow_id = p_run.id AND ((node.status = 'READY' AND p_run.status = 'RUNNING')
        OR (node.status IN ('PENDING', 'READY') AND task.id IS NOT NULL)
        OR (node.status = 'ENQUEUED' AND (task.id IS NULL
            OR task.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))))
    UNION ALL
    SELECT 'node ' || node.node_id || ' is ' || node.status || ' but its end was counted'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run.id AND node.propagated
      AND node.status NOT IN ('COMPLETED', 'FAILED', 'SKIPPED')
    UNION ALL
    SELECT 'the end of node ' || node.node_id || ' was never counted'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run.id AND p_run.status = 'RUNNING' AND NOT node.propagated
      AND node.status IN ('COMPLETED', 'FAILED', 'SKIPPED')
$$;

-- The counts of a map's stored items.
CREATE OR REPLACE FUNCTION horsies_count_items(
    p_node horsies_workflow_tasks, OUT total bigint, OUT still_open bigint, OUT bad bigint, OUT parked bigint)
LANGUAGE sql STABLE AS $$
    SELECT count(*), count(*) FILTER (WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')),
        count(*) FILTER (WHERE status IN ('FAILED', 'CANCELLED', 'EXPIRED')),
        -- This is a run of a durable function that is parked until an event.
        count(*) FILTER (WHERE status = 'PENDING' AND enqueued_at = horsies_never_v1()
            AND NOT EXISTS (SELECT FROM horsies_parked AS wait WHERE wait.task_id = items.id))
    FROM horsies_items(p_node.workflow_id, p_node.task_index) AS items
$$;

-- Return sub-workflow and map nodes that contradict their runs and items. A map that waits for its retry has no open
-- items.
CREATE OR REPLACE FUNCTION horsies_part_problems(p_run horsies_workflows) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT 'node ' || node.node_id || ' runs a sub-workflow that '
        || CASE WHEN child.id IS NULL THEN 'is no longer stored' ELSE 'ended as ' || child.status END
    FROM horsies_workflow_tasks AS node
    LEFT JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
    WHERE node.workflow_id = p_run.id AND node.kind = 'workflow' AND node.status = 'RUNNING'
      AND (child.id IS NULL OR child.status NOT IN ('PENDING', 'RUNNING', 'PAUSED'))
    UNION ALL
    SELECT 'node ' || node.node_id || ' is ' || node.status || ' although sub-workflow ' || child.id || ' is '
        || child.status
    FROM horsies_workflow_tasks AS node JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
    WHERE node.workflow_id = p_run.id AND node.kind = 'workflow' AND node.status <> 'RUNNING'
      AND child.status IN ('PENDING', 'RUNNING', 'PAUSED')
    UNION ALL
    SELECT 'map node ' || node.node_id || ' has ' || node.items_total || ' items (' || node.items_open
        || ' open, ' || node.items_bad || ' failed), ' || items.total || ' are stored (' || items.still_open
        || ' open, ' || items.bad || ' failed)' || CASE WHEN node.items_waiting > 0
            THEN ' and ' || node.items_waiting || ' wait for a task' ELSE '' END
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL horsies_count_items(node) AS items
    CROSS JOIN LATERAL (SELECT coalesce(node.items_waiting, 0) AS total) AS waiting
    WHERE node.workflow_id = p_run.id AND node.kind = 'map' AND node.status = 'RUNNING'
      -- An item that waits for its task has no task yet or, in a retried map, still has the task that failed.
      AND ((node.items_total - waiting.total, node.items_open - waiting.total, node.items_bad)
          IS DISTINCT FROM (items.total, items.still_open, items.bad))
      AND ((node.items_total, node.items_open - waiting.total, node.items_bad + waiting.total)
          IS DISTINCT FROM (items.total, items.still_open, items.bad))
    UNION ALL
    SELECT 'map node ' || node.node_id || ' has not ended although it has no open items'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run.id AND node.kind = 'map' AND node.status = 'RUNNING'
      AND node.items_open - coalesce(node.items_waiting, 0) = 0
    UNION ALL
    SELECT 'map node ' || node.node_id || ' is ' || node.status || ' although it has open items'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run.id AND node.kind = 'map' AND node.status IN ('PENDING', 'READY')
      AND (SELECT items.still_open > 0 FROM horsies_count_items(node) AS items)
    UNION ALL
    SELECT 'map node ' || node.node_id || ' keeps items waiting for no reason'
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL horsies_count_items(node) AS items
    WHERE node.workflow_id = p_run.id AND node.kind = 'map' AND node.status = 'RUNNING' AND items.parked > 0
      AND items.still_open - items.parked < coalesce(node.max_parallel, items.still_open)
$$;

-- Return nodes whose counters contradict other nodes, and nodes that still wait although their counters allow them to
-- start or be skipped.
CREATE OR REPLACE FUNCTION horsies_count_problems(p_run horsies_workflows) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    WITH counts AS MATERIALIZED (SELECT * FROM horsies_true_counts(ARRAY[p_run.id]))
    SELECT 'the run counts ' || p_run.open_nodes || ' open and ' || p_run.failed_nodes
        || ' failed nodes, there are ' || nodes.still_open || ' and ' || nodes.failed
    FROM (SELECT count(*) FILTER (WHERE NOT propagated) AS still_open,
              count(*) FILTER (WHERE status = 'FAILED' AND propagated) AS failed
          FROM horsies_workflow_tasks WHERE workflow_id = p_run.id) AS nodes
    WHERE (p_run.open_nodes, p_run.failed_nodes) IS DISTINCT FROM (nodes.still_open, nodes.failed)
    UNION ALL
    SELECT 'the run goes on although none of its nodes is open'
    WHERE p_run.status = 'RUNNING' AND p_run.open_nodes = 0
    UNION ALL
    SELECT problem.sentence
    FROM counts
    JOIN horsies_workflow_tasks AS node
        ON node.workflow_id = counts.workflow_id AND node.task_index = counts.task_index
    CROSS JOIN LATERAL (
        SELECT 'node ' || node.node_id || ' counts ' || node.deps_open || ' open, ' || node.deps_ok || ' good, '
            || node.deps_bad || ' failed dependencies and waits for ' || node.context_open
            || ' results, there are ' || counts.still_open || ', ' || counts.ok || ', ' || counts.bad || ' and '
            || counts.unseen AS sentence
        WHERE (node.deps_open, node.deps_ok, node.deps_bad, node.context_open)
            IS DISTINCT FROM (counts.still_open, counts.ok, counts.bad, counts.unseen)
        UNION ALL
        SELECT 'node ' || node.node_id || ' waits although its dependencies are decided'
        WHERE p_run.status = 'RUNNING' AND horsies_join(node.join_type, node.min_success,
            node.allow_failed_deps, counts.still_open, counts.ok, counts.bad, counts.unseen) <> 'PENDING'
    ) AS problem
$$;

-- Return tasks that are held in a running run or not held in a paused run, and unstarted tasks that no node waits for.
CREATE OR REPLACE FUNCTION horsies_task_problems(p_run horsies_workflows) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT 'task ' || task.id || CASE WHEN task.held THEN ' is on hold' ELSE ' is not on hold' END
        || ' although the run is ' || p_run.status
    FROM horsies_tasks AS task
    WHERE task.workflow_id = p_run.id AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
      AND (task.held AND task.lane IS NULL) <> (p_run.status = 'PAUSED')
      AND NOT (task.lane IS NOT NULL AND task.status = 'RUNNING')
    UNION ALL
    SELECT 'task ' || task.id || ' belongs to a node that does not wait for it'
    FROM horsies_tasks AS task
    WHERE task.workflow_id = p_run.id AND task.status IN ('PENDING', 'CLAIMED') AND NOT EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = p_run.id AND node.task_index = task.workflow_node_index
          AND (node.task_id = task.id OR task.workflow_item_index IS NOT NULL)
          AND node.status NOT IN ('COMPLETED', 'FAILED', 'SKIPPED'))
$$;

-- Return changes to a run and its tasks that the database refuses.
CREATE OR REPLACE FUNCTION horsies_blocked_problems(p_run horsies_workflows) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT CASE kind WHEN 'run' THEN 'the run' ELSE 'task ' || id END
        || ' is blocked: the database refuses to ' || action || ' it: ' || error
    FROM horsies_blocked_v1() WHERE workflow_id = p_run.id
$$;

-- Return one sentence for each contradiction in an open run and for each refused change to its tasks.
CREATE OR REPLACE FUNCTION horsies_problems_v1(p_run_id uuid) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT problem FROM horsies_workflows AS run CROSS JOIN LATERAL (
        SELECT horsies_node_problems(run) UNION ALL SELECT horsies_part_problems(run)
        UNION ALL SELECT horsies_count_problems(run) UNION ALL SELECT horsies_task_problems(run)
        UNION ALL SELECT horsies_blocked_problems(run)
    ) AS found (problem)
    WHERE run.id = p_run_id AND run.status IN ('RUNNING', 'PAUSED')
$$;
