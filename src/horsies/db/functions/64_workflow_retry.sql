-- Retries of runs: failed nodes run again and keep their position in the graph, so a node waits for the retried nodes
-- before it.

-- FAILED or PAUSED -> RUNNING, and retry all failed nodes or only the named nodes. Nodes that were skipped because of
-- these failures wait again; completed nodes stay completed. A failed sub-workflow is retried in its own run, from its
-- failed nodes; a sub-workflow that was paused by its own failure stays paused. Returns 'retried'; the status that
-- prevents a retry; 'NO_FAILED_NODE', 'PARENT_ENDED', 'KEY_TAKEN' or 'REDACTED'; or NULL if the run does not exist.
CREATE OR REPLACE FUNCTION horsies_retry_v1(p_run_id uuid, p_node_ids text[]) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    run horsies_workflows;
    failed integer[];
    in_part integer[];
BEGIN
    PERFORM horsies_lock_tree(p_run_id);
    SELECT * INTO run FROM horsies_workflows WHERE id = p_run_id;
    IF NOT FOUND OR run.status NOT IN ('FAILED', 'PAUSED', 'RUNNING') THEN
        RETURN run.status;
    END IF;
    IF run.redacted_at IS NOT NULL THEN
        RETURN 'REDACTED';
    END IF;
    IF run.status = 'FAILED' AND run.parent_workflow_id IS NOT NULL AND EXISTS (
        SELECT FROM horsies_workflow_tasks
        WHERE workflow_id = run.parent_workflow_id AND task_index = run.parent_task_index
          AND (status <> 'RUNNING' OR sub_workflow_id <> p_run_id))
    THEN
        RETURN 'PARENT_ENDED';
    END IF;
    failed := ARRAY(
        SELECT task_index FROM horsies_workflow_tasks
        WHERE workflow_id = p_run_id AND status = 'FAILED'
          AND (p_node_ids IS NULL OR node_id = ANY(p_node_ids)));
    IF cardinality(failed) = 0 THEN
        RETURN 'NO_FAILED_NODE';
    END IF;
    IF NOT horsies_reopen(p_run_id) THEN
        RETURN 'KEY_TAKEN';
    END IF;
    PERFORM horsies_reset_nodes(p_run_id, failed);
    -- The failed sub-workflows are read before the run continues, because a sub-workflow that starts again no longer
    -- has a failed run to retry.
    in_part := ARRAY(
        SELECT task_index FROM horsies_workflow_tasks
        WHERE workflow_id = p_run_id AND task_index = ANY(failed) AND status = 'RUNNING');
    PERFORM horsies_recount(ARRAY[p_run_id]);
    IF run.status = 'PAUSED' THEN
        PERFORM horsies_resume_runs(ARRAY(SELECT horsies_tree_without_failures(p_run_id)));
    END IF;
    PERFORM horsies_retry_children(p_run_id, in_part);
    PERFORM horsies_catch_up(ARRAY[p_run_id]);
    RETURN 'retried';
END
$$;

-- PAUSED or FAILED -> RUNNING, and retry every failed node in the run and in the paused runs below it. Returns
-- 'resumed'; the status of a run that cannot be resumed; or NULL if the run does not exist.
CREATE OR REPLACE FUNCTION horsies_resume_retrying_v1(p_run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    was_status text := horsies_lock_tree(p_run_id);
    below uuid;
BEGIN
    IF was_status IS NULL OR was_status NOT IN ('PAUSED', 'FAILED') THEN
        RETURN was_status;
    END IF;
    FOR below IN
        SELECT id FROM horsies_workflows
        WHERE id = ANY(ARRAY(SELECT horsies_tree(p_run_id))) AND id <> p_run_id
          AND coalesce(status, '') = 'PAUSED'
        ORDER BY depth DESC
    LOOP
        PERFORM horsies_retry_v1(below, NULL);
    END LOOP;
    IF horsies_retry_v1(p_run_id, NULL) = 'retried' THEN
        RETURN 'resumed';
    END IF;
    RETURN CASE WHEN horsies_resume_v1(p_run_id) = 'PAUSED' THEN 'resumed' ELSE was_status END;
END
$$;

-- FAILED -> RUNNING, and remove the error. Returns false if another run now has the run's key.
CREATE OR REPLACE FUNCTION horsies_reopen(p_run_id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE horsies_workflows SET
        status = CASE status WHEN 'FAILED' THEN 'RUNNING' ELSE status END, error = NULL, completed_at = NULL,
        matched_case = NULL, updated_at = clock_timestamp()
    WHERE id = p_run_id;
    RETURN true;
EXCEPTION WHEN unique_violation THEN
    RETURN false;
END
$$;

-- Make a run's failed nodes wait again, and the nodes that were skipped because of them; the counters of each node
-- decide when it starts. A skipped node that also depends on another failed node is skipped again when its counters are
-- read.
--
-- * If a failure made a dependent node ready and that node has not started yet, it waits for the reset nodes again.
-- * A sub-workflow node whose run has failed continues in that run. If the node has to wait for other reset nodes,
--   their results change its input, so it starts a new run instead.
CREATE OR REPLACE FUNCTION horsies_reset_nodes(p_run_id uuid, p_failed integer[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    reset integer[];
BEGIN
    WITH RECURSIVE below AS (
        SELECT task_index, dependents FROM horsies_workflow_tasks
        WHERE workflow_id = p_run_id AND task_index = ANY(p_failed)
        UNION
        SELECT node.task_index, node.dependents FROM below
        CROSS JOIN LATERAL unnest(below.dependents) AS dependent (task_index)
        JOIN horsies_workflow_tasks AS node
            ON node.workflow_id = p_run_id AND node.task_index = dependent.task_index
        WHERE node.status = 'SKIPPED')
    SELECT array_agg(task_index) INTO reset FROM below;
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE
            WHEN node.dependencies = '{}' AND NOT horsies_has_retryable_child(node) THEN 'READY'
            WHEN node.task_index = ANY(p_failed) AND NOT node.dependencies && reset
                AND horsies_has_retryable_child(node) THEN 'RUNNING'
            ELSE 'PENDING' END,
        propagated = false, result = NULL, result_task_id = NULL, task_id = NULL, sub_workflow_summary = NULL,
        started_at = NULL, completed_at = NULL, enqueued_at = NULL
    WHERE node.workflow_id = p_run_id AND node.task_index = ANY(reset);
    PERFORM horsies_withdraw_tasks(p_run_id, reset);
END
$$;

-- Return whether a sub-workflow node has a failed run that can be retried.
CREATE OR REPLACE FUNCTION horsies_has_retryable_child(p_node horsies_workflow_tasks) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM horsies_workflows AS child
        WHERE child.id = p_node.sub_workflow_id AND child.status = 'FAILED')
$$;

-- Cancel the tasks of dependents of the reset nodes, so that these dependents wait again. Dependents that accept
-- failures may already have tasks in the queue. A worker that is starting such a task holds the lock on its row; once
-- the lock is free, the task is RUNNING and is not changed.
CREATE OR REPLACE FUNCTION horsies_withdraw_tasks(p_run_id uuid, p_reset integer[]) RETURNS void
LANGUAGE sql AS $$
    WITH waiting AS (
        SELECT task.id, node.task_index
        FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
        WHERE node.workflow_id = p_run_id AND node.status = 'ENQUEUED' AND node.kind IN ('task', 'workflow')
          AND node.join_type = 'all' AND node.dependencies && p_reset
          AND task.status IN ('PENDING', 'CLAIMED')
        FOR UPDATE OF task),
    withdrawn AS (
        UPDATE horsies_workflow_tasks AS node SET status = 'PENDING', task_id = NULL, enqueued_at = NULL
        WHERE node.workflow_id = p_run_id AND node.task_index IN (SELECT waiting.task_index FROM waiting))
    UPDATE horsies_tasks AS task SET
        status = 'CANCELLED', cancel_requested_at = clock_timestamp(), failed_at = clock_timestamp(),
        error_code = 'TASK_CANCELLED', claimed = false, claim_expires_at = NULL,
        updated_at = clock_timestamp()
    FROM waiting WHERE task.id = waiting.id
$$;

-- Retry the failed runs of these sub-workflow nodes, and pause these runs if their parent has been paused again.
CREATE OR REPLACE FUNCTION horsies_retry_children(p_run_id uuid, p_indexes integer[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    node horsies_workflow_tasks;
BEGIN
    FOR node IN
        SELECT * FROM horsies_workflow_tasks
        WHERE workflow_id = p_run_id AND task_index = ANY(p_indexes) AND status = 'RUNNING'
        ORDER BY task_index
    LOOP
        UPDATE horsies_workflow_tasks SET enqueued_at = clock_timestamp(), started_at = clock_timestamp()
        WHERE workflow_id = p_run_id AND task_index = node.task_index;
        PERFORM horsies_retry_v1(node.sub_workflow_id, NULL);
        PERFORM horsies_pause_runs(ARRAY(SELECT horsies_tree(node.sub_workflow_id)))
        FROM horsies_workflows WHERE id = p_run_id AND coalesce(status, '') = 'PAUSED';
    END LOOP;
END
$$;
