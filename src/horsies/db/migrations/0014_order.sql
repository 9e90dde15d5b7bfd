-- What is tried again keeps its place in the graph: it waits for what is tried again before it. And steering keeps to
-- runs that somebody still waits for.

-- The runs right below one, looked up by their key whatever the planner believes (see horsies_each_v1).
CREATE FUNCTION horsies_children_v1(run_id uuid) RETURNS SETOF horsies_workflows LANGUAGE sql STABLE AS $$
    SELECT child.* FROM horsies_workflows AS child WHERE child.parent_workflow_id = run_id OFFSET 0
$$;

-- A run and everything below it.
CREATE FUNCTION horsies_family_v1(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE family AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM family CROSS JOIN LATERAL horsies_children_v1(family.id) AS child)
    SELECT id FROM family
$$;

-- A run and what is open below it. Not what an expired run has left behind: nobody takes its result any more, so it
-- neither rests nor goes on with those above.
CREATE OR REPLACE FUNCTION horsies_tree_v1(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM tree CROSS JOIN LATERAL horsies_children_v1(tree.id) AS child
        WHERE child.status IN ('PENDING', 'RUNNING', 'PAUSED'))
    SELECT id FROM tree
$$;

-- A run and what is open below it, but for runs that a failure of their own has paused, and what is below those: they
-- wait for somebody to decide about that failure.
CREATE FUNCTION horsies_unfailed_tree_v1(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM tree CROSS JOIN LATERAL horsies_children_v1(tree.id) AS child
        WHERE child.status IN ('PENDING', 'RUNNING', 'PAUSED') AND NOT EXISTS (
            SELECT FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = child.id AND node.status = 'FAILED' AND node.pauses AND NOT node.propagated))
    SELECT id FROM tree
$$;

-- Any open status -> CANCELLED, for a run and everything below it. Returns the status it met.
CREATE OR REPLACE FUNCTION horsies_cancel_v1(run_id uuid, reason text, interrupt boolean) RETURNS text
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
    family uuid[];
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        family := ARRAY(SELECT horsies_family_v1(run_id));
        PERFORM horsies_end_runs_v1(family, 'CANCELLED', reason, interrupt);
        PERFORM horsies_tell_parents_v1(family);
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> RUNNING for those of these runs: tasks are let go, what ended meanwhile counts now, and a run in which
-- nothing is left to do ends here.
CREATE FUNCTION horsies_let_go_v1(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    resumed uuid[];
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET status = 'RUNNING', paused_at = NULL, updated_at = clock_timestamp()
        WHERE id = ANY(runs) AND coalesce(status, '') = 'PAUSED'
        RETURNING id)
    SELECT array_agg(id) INTO resumed FROM changed;
    UPDATE horsies_tasks SET held = false, updated_at = clock_timestamp()
    WHERE workflow_id = ANY(resumed) AND held AND status IN ('PENDING', 'RUNNING');
    PERFORM horsies_catch_up_v1(resumed);
END
$$;

-- PAUSED -> RUNNING for a run and what is paused below it. Returns the status it met.
CREATE OR REPLACE FUNCTION horsies_resume_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status = 'PAUSED' THEN
        PERFORM horsies_let_go_v1(ARRAY(SELECT horsies_tree_v1(run_id)));
    END IF;
    RETURN was_status;
END
$$;

-- FAILED or PAUSED -> RUNNING with failed nodes tried again, all of them or the named ones: what was skipped because
-- of them waits again, what succeeded stays. A failed sub-workflow is itself tried again from its failures; one that
-- is paused by its own stays paused. Returns 'retried', or the status that does not allow it, 'NO_FAILED_NODE',
-- 'PARENT_ENDED', 'KEY_TAKEN'; NULL when there is no such run.
CREATE OR REPLACE FUNCTION horsies_retry_v1(run_id uuid, node_ids text[]) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    failed integer[];
    in_part integer[];
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT * INTO run FROM horsies_workflows WHERE id = run_id;
    IF NOT FOUND OR run.status NOT IN ('FAILED', 'PAUSED', 'RUNNING') THEN
        RETURN run.status;
    END IF;
    IF run.status = 'FAILED' AND run.parent_workflow_id IS NOT NULL AND EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run.parent_workflow_id AND node.task_index = run.parent_task_index
          AND (node.status <> 'RUNNING' OR node.sub_workflow_id <> run_id))
    THEN
        RETURN 'PARENT_ENDED';
    END IF;
    failed := ARRAY(
        SELECT node.task_index FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.status = 'FAILED'
          AND (node_ids IS NULL OR node.node_id = ANY(node_ids)));
    IF cardinality(failed) = 0 THEN
        RETURN 'NO_FAILED_NODE';
    END IF;
    IF NOT horsies_reopen_v1(run_id) THEN
        RETURN 'KEY_TAKEN';
    END IF;
    PERFORM horsies_set_back_v1(run_id, failed);
    -- Before the run goes on: a sub-workflow that begins anew then has nothing to try again.
    in_part := ARRAY(
        SELECT node.task_index FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = ANY(failed) AND node.status = 'RUNNING');
    PERFORM horsies_recount_v1(ARRAY[run_id]);
    IF run.status = 'PAUSED' THEN
        PERFORM horsies_let_go_v1(ARRAY(SELECT horsies_unfailed_tree_v1(run_id)));
    END IF;
    PERFORM horsies_retry_children_v1(run_id, in_part);
    PERFORM horsies_catch_up_v1(ARRAY[run_id]);
    RETURN 'retried';
END
$$;

-- Failed nodes of a run wait again, and so does what was skipped below them; their counters decide when each begins.
-- A skipped node that another failure stops is skipped once more when its counters are looked at.
--
-- * What comes after a node that is set back, but was let in by its failure and has not begun, waits for it again.
-- * A sub-workflow whose run has failed goes on in that run, unless it must wait: then what it takes from others will
--   be new, and so will its run.
CREATE FUNCTION horsies_set_back_v1(run_id uuid, failed integer[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    set_back integer[];
BEGIN
    WITH RECURSIVE below AS (
        SELECT node.task_index, node.dependents FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = ANY(failed)
        UNION
        SELECT node.task_index, node.dependents FROM below
        CROSS JOIN LATERAL unnest(below.dependents) AS dependent (task_index)
        JOIN horsies_workflow_tasks AS node ON node.workflow_id = run_id AND node.task_index = dependent.task_index
        WHERE node.status = 'SKIPPED')
    SELECT array_agg(task_index) INTO set_back FROM below;
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE
            WHEN node.dependencies = '{}' AND NOT horsies_goes_on_below_v1(node) THEN 'READY'
            WHEN node.task_index = ANY(failed) AND NOT node.dependencies && set_back AND horsies_goes_on_below_v1(node)
                THEN 'RUNNING'
            ELSE 'PENDING' END,
        propagated = false, result = NULL, result_task_id = NULL, task_id = NULL, sub_workflow_summary = NULL,
        started_at = NULL, completed_at = NULL, enqueued_at = NULL
    WHERE node.workflow_id = run_id AND node.task_index = ANY(set_back);
    PERFORM horsies_take_back_v1(run_id, set_back);
END
$$;

-- Whether a sub-workflow node has a failed run that can be tried again.
CREATE FUNCTION horsies_goes_on_below_v1(node horsies_workflow_tasks) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM horsies_workflows AS child WHERE child.id = node.sub_workflow_id AND child.status = 'FAILED')
$$;

-- Nodes after these whose tasks wait in the queue, because they may begin after failures, wait for these again. One
-- that is being started right now is locked by its worker: we wait, and meet it RUNNING.
CREATE FUNCTION horsies_take_back_v1(run_id uuid, set_back integer[]) RETURNS void LANGUAGE sql AS $$
    WITH waiting AS (
        SELECT task.id, node.task_index FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
        WHERE node.workflow_id = run_id AND node.status = 'ENQUEUED' AND node.kind IN ('task', 'workflow')
          AND node.join_type = 'all' AND node.dependencies && set_back AND task.status IN ('PENDING', 'CLAIMED')
        FOR UPDATE OF task),
    taken_back AS (
        UPDATE horsies_workflow_tasks AS node SET status = 'PENDING', task_id = NULL, enqueued_at = NULL
        WHERE node.workflow_id = run_id AND node.task_index IN (SELECT waiting.task_index FROM waiting))
    UPDATE horsies_tasks AS task SET
        status = 'CANCELLED', cancel_requested_at = clock_timestamp(), failed_at = clock_timestamp(),
        error_code = 'TASK_CANCELLED', claimed = false, claim_expires_at = NULL, updated_at = clock_timestamp()
    FROM waiting WHERE task.id = waiting.id
$$;

-- The failed runs of these sub-workflow nodes are tried again, on hold if their parent was paused once more meanwhile.
CREATE FUNCTION horsies_retry_children_v1(run_id uuid, indexes integer[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    node horsies_workflow_tasks;
BEGIN
    FOR node IN
        SELECT * FROM horsies_workflow_tasks
        WHERE workflow_id = run_id AND task_index = ANY(indexes) AND status = 'RUNNING' ORDER BY task_index
    LOOP
        UPDATE horsies_workflow_tasks SET enqueued_at = clock_timestamp(), started_at = clock_timestamp()
        WHERE workflow_id = run_id AND task_index = node.task_index;
        PERFORM horsies_retry_v1(node.sub_workflow_id, NULL);
        PERFORM horsies_hold_runs_v1(ARRAY(SELECT horsies_tree_v1(node.sub_workflow_id)))
        FROM horsies_workflows WHERE id = run_id AND coalesce(status, '') = 'PAUSED';
    END LOOP;
END
$$;

-- READY -> RUNNING with one task per element, or, where it has run before, per failed item. Returns false when the node
-- ended right here.
CREATE OR REPLACE FUNCTION horsies_expand_map_v1(node horsies_workflow_tasks) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    elements json := horsies_map_elements_v1(node);
    moment timestamptz := clock_timestamp();
    total integer;
BEGIN
    IF node.items_total > 0 THEN
        UPDATE horsies_workflow_tasks SET status = 'RUNNING', enqueued_at = moment, started_at = moment
        WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
        PERFORM horsies_retry_items_v1(node);
        RETURN true;
    END IF;
    IF elements IS NULL THEN
        UPDATE horsies_workflow_tasks SET
            status = 'FAILED', completed_at = moment,
            result = '{"err":' || horsies_task_error_v1('WORKFLOW_ENQUEUE_FAILED', 'Map node ' || node.node_id
                || ' has nothing to map over: the node before it gave no list.') || '}'
        WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
        RETURN false;
    END IF;
    total := json_array_length(elements);
    UPDATE horsies_workflow_tasks SET
        status = CASE WHEN total = 0 THEN 'COMPLETED' ELSE 'RUNNING' END,
        result = CASE WHEN total = 0 THEN '{"ok":[]}' END,
        completed_at = CASE WHEN total = 0 THEN moment END,
        enqueued_at = moment, started_at = moment, items_total = total, items_open = total, items_bad = 0
    WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
    PERFORM horsies_add_items_v1(node, elements, NULL);
    RETURN total > 0;
END
$$;

-- Sub-workflows and maps that are not where their parts are. A map that waits to run failed items again has none open.
CREATE OR REPLACE FUNCTION horsies_part_problems_v1(run horsies_workflows) RETURNS SETOF text LANGUAGE sql STABLE AS $$
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
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL horsies_count_items_v1(node) AS items
    WHERE node.workflow_id = run.id AND node.kind = 'map' AND node.status = 'RUNNING'
      AND (node.items_total, node.items_open, node.items_bad)
          IS DISTINCT FROM (items.total::integer, items.still_open::integer, items.bad::integer)
    UNION ALL
    SELECT 'map node ' || node.node_id || ' is ' || node.status || ' although it has open items'
    FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = run.id AND node.kind = 'map' AND node.status IN ('PENDING', 'READY')
      AND (SELECT items.still_open > 0 FROM horsies_count_items_v1(node) AS items)
    UNION ALL
    SELECT 'map node ' || node.node_id || ' keeps items waiting for no reason'
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL horsies_count_items_v1(node) AS items
    WHERE node.workflow_id = run.id AND node.kind = 'map' AND node.status = 'RUNNING'
      AND items.parked > 0 AND items.still_open - items.parked < coalesce(node.max_parallel, items.still_open)
$$;

-- Open nodes go where their tasks and runs are; without any they are READY for new ones, which a RUNNING run gets when
-- it catches up.
CREATE OR REPLACE FUNCTION horsies_mend_nodes_v1(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE horsies_workflow_tasks AS node SET status = 'RUNNING'
    FROM horsies_workflows AS child
    WHERE node.workflow_id = run_id AND node.kind = 'workflow' AND child.id = node.sub_workflow_id
      AND node.status <> 'RUNNING' AND child.status IN ('PENDING', 'RUNNING', 'PAUSED');
    UPDATE horsies_workflow_tasks AS node SET status = 'RUNNING'
    WHERE node.workflow_id = run_id AND node.kind = 'map' AND node.status IN ('PENDING', 'READY')
      AND (SELECT items.still_open > 0 FROM horsies_count_items_v1(node) AS items);
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

DROP FUNCTION horsies_reset_nodes_v1;
DROP FUNCTION horsies_retry_parts_v1;
