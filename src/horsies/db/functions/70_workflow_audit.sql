-- The audit of workflows. Progress shares the transaction of the end it follows from, so there is no gap between the
-- two to repair; what does not add up was done by somebody with a prompt. It is found, named and put right.

-- Nodes that are not where their tasks are.
CREATE OR REPLACE FUNCTION horsies_node_problems(run horsies_workflows) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT 'the run has ' || run.total_nodes || ' nodes, ' || count(*) || ' are stored'
    FROM horsies_workflow_tasks AS node WHERE node.workflow_id = run.id HAVING count(*) <> run.total_nodes
    UNION ALL
    SELECT 'node ' || node.node_id || CASE
        WHEN node.status = 'READY' AND task.id IS NULL THEN ' is ready but has no task'
        WHEN node.status IN ('PENDING', 'READY') THEN ' waits although it has a task'
        WHEN task.id IS NULL THEN ' waits for a task that is no longer stored'
        ELSE ' is open although its task ended as ' || task.status END
    FROM horsies_workflow_tasks AS node LEFT JOIN horsies_tasks AS task ON task.id = node.task_id
    WHERE node.workflow_id = run.id AND ((node.status = 'READY' AND run.status = 'RUNNING')
        OR (node.status IN ('PENDING', 'READY') AND task.id IS NOT NULL)
        OR (node.status = 'ENQUEUED' AND (task.id IS NULL
            OR task.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))))
    UNION ALL
    SELECT 'node ' || node.node_id || ' is ' || node.status || ' but its end was counted'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = run.id AND node.propagated AND node.status NOT IN ('COMPLETED', 'FAILED', 'SKIPPED')
    UNION ALL
    SELECT 'the end of node ' || node.node_id || ' was never counted'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = run.id AND run.status = 'RUNNING' AND NOT node.propagated
      AND node.status IN ('COMPLETED', 'FAILED', 'SKIPPED')
$$;

-- How the items of a map stand.
CREATE OR REPLACE FUNCTION horsies_count_items(
    node horsies_workflow_tasks, OUT total bigint, OUT still_open bigint, OUT bad bigint, OUT parked bigint)
LANGUAGE sql STABLE AS $$
    SELECT count(*), count(*) FILTER (WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')),
        count(*) FILTER (WHERE status IN ('FAILED', 'CANCELLED', 'EXPIRED')),
        count(*) FILTER (WHERE status = 'PENDING' AND enqueued_at = horsies_never_v1())
    FROM horsies_items(node)
$$;

-- Sub-workflows and maps that are not where their parts are. A map that waits to run failed items again has none open.
CREATE OR REPLACE FUNCTION horsies_part_problems(run horsies_workflows) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT 'node ' || node.node_id || ' runs a sub-workflow that '
        || CASE WHEN child.id IS NULL THEN 'is no longer stored' ELSE 'ended as ' || child.status END
    FROM horsies_workflow_tasks AS node LEFT JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
    WHERE node.workflow_id = run.id AND node.kind = 'workflow' AND node.status = 'RUNNING'
      AND (child.id IS NULL OR child.status NOT IN ('PENDING', 'RUNNING', 'PAUSED'))
    UNION ALL
    SELECT 'node ' || node.node_id || ' is ' || node.status || ' although sub-workflow ' || child.id || ' is '
        || child.status
    FROM horsies_workflow_tasks AS node JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
    WHERE node.workflow_id = run.id AND node.kind = 'workflow' AND node.status <> 'RUNNING'
      AND child.status IN ('PENDING', 'RUNNING', 'PAUSED')
    UNION ALL
    SELECT 'map node ' || node.node_id || ' has ' || node.items_total || ' items (' || node.items_open || ' open, '
        || node.items_bad || ' failed), ' || items.total || ' are stored (' || items.still_open || ' open, '
        || items.bad || ' failed)'
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL horsies_count_items(node) AS items
    WHERE node.workflow_id = run.id AND node.kind = 'map' AND node.status = 'RUNNING'
      AND (node.items_total, node.items_open, node.items_bad)
          IS DISTINCT FROM (items.total::integer, items.still_open::integer, items.bad::integer)
    UNION ALL
    SELECT 'map node ' || node.node_id || ' is ' || node.status || ' although it has open items'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = run.id AND node.kind = 'map' AND node.status IN ('PENDING', 'READY')
      AND (SELECT items.still_open > 0 FROM horsies_count_items(node) AS items)
    UNION ALL
    SELECT 'map node ' || node.node_id || ' keeps items waiting for no reason'
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL horsies_count_items(node) AS items
    WHERE node.workflow_id = run.id AND node.kind = 'map' AND node.status = 'RUNNING'
      AND items.parked > 0 AND items.still_open - items.parked < coalesce(node.max_parallel, items.still_open)
$$;

-- Counters that do not say what the nodes say, and nodes that wait although their dependencies have decided.
CREATE OR REPLACE FUNCTION horsies_count_problems(run horsies_workflows) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT 'the run counts ' || run.open_nodes || ' open and ' || run.failed_nodes || ' failed nodes, there are '
        || nodes.still_open || ' and ' || nodes.failed
    FROM (SELECT count(*) FILTER (WHERE NOT propagated) AS still_open,
              count(*) FILTER (WHERE status = 'FAILED' AND propagated) AS failed
          FROM horsies_workflow_tasks WHERE workflow_id = run.id) AS nodes
    WHERE (run.open_nodes, run.failed_nodes) IS DISTINCT FROM (nodes.still_open, nodes.failed)
    UNION ALL
    SELECT 'the run goes on although none of its nodes is open' WHERE run.status = 'RUNNING' AND run.open_nodes = 0
    UNION ALL
    SELECT 'node ' || node.node_id || ' counts ' || node.deps_open || ' open, ' || node.deps_ok || ' good, '
        || node.deps_bad || ' failed dependencies and waits for ' || node.context_open || ' results, there are '
        || counts.still_open || ', ' || counts.ok || ', ' || counts.bad || ' and ' || counts.unseen
    FROM horsies_true_counts(ARRAY[run.id]) AS counts
    JOIN horsies_workflow_tasks AS node ON node.workflow_id = counts.workflow_id AND node.task_index = counts.task_index
    WHERE (node.deps_open, node.deps_ok, node.deps_bad, node.context_open)
        IS DISTINCT FROM (counts.still_open, counts.ok, counts.bad, counts.unseen)
    UNION ALL
    SELECT 'node ' || node.node_id || ' waits although its dependencies are decided'
    FROM horsies_true_counts(ARRAY[run.id]) AS counts
    JOIN horsies_workflow_tasks AS node ON node.workflow_id = counts.workflow_id AND node.task_index = counts.task_index
    WHERE run.status = 'RUNNING' AND horsies_join(node.join_type, node.min_success,
        node.allow_failed_deps, counts.still_open, counts.ok, counts.bad, counts.unseen) <> 'PENDING'
$$;

-- Tasks of a run that have not begun and that no node waits for.
CREATE OR REPLACE FUNCTION horsies_stray_tasks(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    SELECT task.id FROM horsies_tasks AS task
    WHERE task.workflow_id = run_id AND task.status IN ('PENDING', 'CLAIMED') AND NOT EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = task.workflow_node_index
          AND (node.task_id = task.id OR task.workflow_item_index IS NOT NULL)
          AND node.status NOT IN ('COMPLETED', 'FAILED', 'SKIPPED'))
$$;

-- Tasks on hold that should not be and the other way round, and tasks that no node waits for.
CREATE OR REPLACE FUNCTION horsies_task_problems(run horsies_workflows) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT 'task ' || task.id || CASE WHEN task.held THEN ' is on hold' ELSE ' is not on hold' END
        || ' although the run is ' || run.status
    FROM horsies_tasks AS task
    WHERE task.workflow_id = run.id AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
      AND task.held <> (run.status = 'PAUSED')
    UNION ALL
    SELECT 'task ' || stray.id || ' belongs to a node that does not wait for it'
    FROM horsies_stray_tasks(run.id) AS stray (id)
$$;

-- What does not add up in an open run, one sentence each.
CREATE OR REPLACE FUNCTION horsies_problems_v1(run_id uuid) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    SELECT problem FROM horsies_workflows AS run CROSS JOIN LATERAL (
        SELECT horsies_node_problems(run) UNION ALL SELECT horsies_part_problems(run)
        UNION ALL SELECT horsies_count_problems(run) UNION ALL SELECT horsies_task_problems(run)) AS found (problem)
    WHERE run.id = run_id AND run.status IN ('RUNNING', 'PAUSED')
$$;

-- Put an open run right again, as far as its rows tell what is right. Harmless on one that is.
CREATE OR REPLACE FUNCTION horsies_mend_v1(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT * INTO run FROM horsies_workflows WHERE id = run_id AND status IN ('RUNNING', 'PAUSED');
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF run.total_nodes <> (SELECT count(*) FROM horsies_workflow_tasks WHERE workflow_id = run_id) THEN
        PERFORM horsies_give_up(run_id);
        RETURN;
    END IF;
    PERFORM horsies_mend_nodes(run_id);
    PERFORM horsies_mend_maps(run_id);
    PERFORM horsies_mend_tasks(run_id);
    PERFORM horsies_recount(ARRAY[run_id]);
    PERFORM horsies_record_ends(run_id);
    PERFORM horsies_catch_up(ARRAY[run_id]);
END
$$;

-- A run that lost nodes cannot tell what they came to: it fails, and what runs below it is cancelled.
CREATE OR REPLACE FUNCTION horsies_give_up(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    tree uuid[] := ARRAY(SELECT horsies_tree(run_id));
    reason text := horsies_task_error('WORKFLOW_FAILED', 'Nodes of the workflow are no longer stored.');
BEGIN
    PERFORM horsies_end_runs(ARRAY[run_id], 'FAILED', reason, false);
    PERFORM horsies_end_runs(array_remove(tree, run_id), 'CANCELLED', reason, false);
    PERFORM horsies_finish_parent_nodes(tree);
END
$$;

-- Open nodes go where their tasks and runs are; without any they are READY for new ones, which a RUNNING run gets when
-- it catches up.
CREATE OR REPLACE FUNCTION horsies_mend_nodes(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE horsies_workflow_tasks AS node SET status = 'RUNNING'
    FROM horsies_workflows AS child
    WHERE node.workflow_id = run_id AND node.kind = 'workflow' AND child.id = node.sub_workflow_id
      AND node.status <> 'RUNNING' AND child.status IN ('PENDING', 'RUNNING', 'PAUSED');
    UPDATE horsies_workflow_tasks AS node SET status = 'RUNNING'
    WHERE node.workflow_id = run_id AND node.kind = 'map' AND node.status IN ('PENDING', 'READY')
      AND (SELECT items.still_open > 0 FROM horsies_count_items(node) AS items);
    UPDATE horsies_workflow_tasks AS node SET status = 'ENQUEUED'
    FROM horsies_tasks AS task
    WHERE node.workflow_id = run_id AND node.status IN ('PENDING', 'READY') AND task.id = node.task_id;
    UPDATE horsies_workflow_tasks AS node SET status = 'READY', sub_workflow_id = NULL
    WHERE node.workflow_id = run_id AND node.kind = 'workflow' AND node.status = 'RUNNING'
      AND NOT EXISTS (SELECT FROM horsies_workflows AS child WHERE child.id = node.sub_workflow_id);
    UPDATE horsies_workflow_tasks AS node SET status = 'READY'
    WHERE node.workflow_id = run_id AND node.status = 'ENQUEUED'
      AND NOT EXISTS (SELECT FROM horsies_tasks AS task WHERE task.id = node.task_id);
    UPDATE horsies_workflow_tasks SET propagated = false, completed_at = NULL
    WHERE workflow_id = run_id AND propagated AND status NOT IN ('COMPLETED', 'FAILED', 'SKIPPED');
END
$$;

-- Maps get the items they lost, count anew, and have as many items under way as they may.
CREATE OR REPLACE FUNCTION horsies_mend_maps(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    node horsies_workflow_tasks;
    elements json;
    items record;
BEGIN
    FOR node IN
        SELECT * FROM horsies_workflow_tasks WHERE workflow_id = run_id AND kind = 'map' AND status = 'RUNNING'
    LOOP
        elements := horsies_map_elements(node);
        IF elements IS NOT NULL THEN
            PERFORM horsies_add_items(node, elements, ARRAY(
                SELECT place FROM generate_series(0, json_array_length(elements) - 1) AS place
                EXCEPT SELECT workflow_item_index FROM horsies_items(node)));
        END IF;
        SELECT * INTO items FROM horsies_count_items(node);
        UPDATE horsies_workflow_tasks AS map SET
            items_total = items.total, items_open = items.still_open, items_bad = items.bad
        WHERE map.workflow_id = run_id AND map.task_index = node.task_index
          AND (map.items_total, map.items_open, map.items_bad)
              IS DISTINCT FROM (items.total::integer, items.still_open::integer, items.bad::integer);
        PERFORM horsies_unpark_items(run_id, node.task_index, greatest(0,
            coalesce(node.max_parallel, items.still_open) - (items.still_open - items.parked))::integer);
    END LOOP;
END
$$;

-- Tasks are on hold exactly while the run is; those that no node waits for are cancelled.
CREATE OR REPLACE FUNCTION horsies_mend_tasks(run_id uuid) RETURNS void LANGUAGE sql AS $$
    UPDATE horsies_tasks AS task SET held = run.status = 'PAUSED', updated_at = clock_timestamp()
    FROM horsies_workflows AS run
    WHERE run.id = run_id AND task.workflow_id = run_id AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
      AND task.held <> (run.status = 'PAUSED');
    UPDATE horsies_tasks SET
        status = 'CANCELLED', cancel_requested_at = clock_timestamp(), failed_at = clock_timestamp(),
        error_code = 'TASK_CANCELLED', claimed = false, claim_expires_at = NULL, updated_at = clock_timestamp()
    WHERE id = ANY(ARRAY(SELECT horsies_stray_tasks(run_id))) AND status IN ('PENDING', 'CLAIMED')
$$;

-- Ends of tasks, maps and runs below that the nodes have not taken notice of.
CREATE OR REPLACE FUNCTION horsies_record_ends(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ended horsies_nodes;
    tasks uuid[];
    started timestamptz[];
    through horsies_nodes;
BEGIN
    SELECT array_agg(node.workflow_id), array_agg(node.task_index), array_agg(task.id), array_agg(task.started_at)
    INTO ended.runs, ended.indexes, tasks, started
    FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
    WHERE node.workflow_id = run_id AND node.status = 'ENQUEUED'
      AND task.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED');
    PERFORM horsies_advance(ended.runs, ended.indexes, tasks, started, false);
    SELECT array_agg(workflow_id), array_agg(task_index) INTO through.runs, through.indexes
    FROM horsies_workflow_tasks
    WHERE workflow_id = run_id AND kind = 'map' AND horsies_end_map(workflow_id, task_index);
    PERFORM horsies_propagate(through, true);
    PERFORM horsies_finish_parent_nodes(ARRAY(
        SELECT id FROM horsies_workflows
        WHERE parent_workflow_id = run_id AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')));
END
$$;
