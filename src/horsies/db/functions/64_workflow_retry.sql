-- Retry: failed nodes of a run are tried again.

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
    PERFORM horsies_lock_tree(run_id);
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
    IF NOT horsies_reopen(run_id) THEN
        RETURN 'KEY_TAKEN';
    END IF;
    PERFORM horsies_reset_nodes(run_id, failed);
    -- Before the run goes on: a sub-workflow that begins anew then has nothing to try again.
    in_part := ARRAY(
        SELECT node.task_index FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = ANY(failed) AND node.status = 'RUNNING');
    PERFORM horsies_recount(ARRAY[run_id]);
    IF run.status = 'PAUSED' THEN
        PERFORM horsies_resume_runs(ARRAY(SELECT horsies_tree_without_failures(run_id)));
    END IF;
    PERFORM horsies_retry_children(run_id, in_part);
    PERFORM horsies_catch_up(ARRAY[run_id]);
    RETURN 'retried';
END
$$;

-- PAUSED or FAILED -> RUNNING with every failure tried again, in the run and in what is paused below it. Returns
-- 'resumed', or the status of a run that this does not move; NULL when there is no such run.
CREATE OR REPLACE FUNCTION horsies_resume_retrying_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
    below uuid;
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IS NULL OR was_status NOT IN ('PAUSED', 'FAILED') THEN
        RETURN was_status;
    END IF;
    FOR below IN
        SELECT run.id FROM horsies_workflows AS run
        WHERE run.id = ANY(ARRAY(SELECT horsies_tree(run_id))) AND run.id <> run_id
          AND coalesce(run.status, '') = 'PAUSED'
        ORDER BY run.depth DESC
    LOOP
        PERFORM horsies_retry_v1(below, NULL);
    END LOOP;
    IF horsies_retry_v1(run_id, NULL) = 'retried' THEN
        RETURN 'resumed';
    END IF;
    RETURN CASE WHEN horsies_resume_v1(run_id) = 'PAUSED' THEN 'resumed' ELSE was_status END;
END
$$;

-- FAILED -> RUNNING, and no error any more. Returns false when another run has taken its key meanwhile.
CREATE OR REPLACE FUNCTION horsies_reopen(run_id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE horsies_workflows SET
        status = CASE status WHEN 'FAILED' THEN 'RUNNING' ELSE status END, error = NULL, completed_at = NULL,
        matched_case = NULL, updated_at = clock_timestamp()
    WHERE id = run_id;
    RETURN true;
EXCEPTION WHEN unique_violation THEN
    RETURN false;
END
$$;

-- Failed nodes of a run wait again, and so does what was skipped below them; their counters decide when each begins.
-- A skipped node that another failure stops is skipped once more when its counters are looked at.
--
-- * What comes after a node that is set back, but was let in by its failure and has not begun, waits for it again.
-- * A sub-workflow whose run has failed goes on in that run, unless it must wait: then what it takes from others will
--   be new, and so will its run.
CREATE OR REPLACE FUNCTION horsies_reset_nodes(run_id uuid, failed integer[]) RETURNS void LANGUAGE plpgsql AS $$
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
            WHEN node.dependencies = '{}' AND NOT horsies_has_retryable_child(node) THEN 'READY'
            WHEN node.task_index = ANY(failed) AND NOT node.dependencies && set_back AND horsies_has_retryable_child(node)
                THEN 'RUNNING'
            ELSE 'PENDING' END,
        propagated = false, result = NULL, result_task_id = NULL, task_id = NULL, sub_workflow_summary = NULL,
        started_at = NULL, completed_at = NULL, enqueued_at = NULL
    WHERE node.workflow_id = run_id AND node.task_index = ANY(set_back);
    PERFORM horsies_withdraw_tasks(run_id, set_back);
END
$$;

-- Whether a sub-workflow node has a failed run that can be tried again.
CREATE OR REPLACE FUNCTION horsies_has_retryable_child(node horsies_workflow_tasks) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM horsies_workflows AS child WHERE child.id = node.sub_workflow_id AND child.status = 'FAILED')
$$;

-- Nodes after these whose tasks wait in the queue, because they may begin after failures, wait for these again. One
-- that is being started right now is locked by its worker: we wait, and meet it RUNNING.
CREATE OR REPLACE FUNCTION horsies_withdraw_tasks(run_id uuid, set_back integer[]) RETURNS void LANGUAGE sql AS $$
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
CREATE OR REPLACE FUNCTION horsies_retry_children(run_id uuid, indexes integer[]) RETURNS void LANGUAGE plpgsql AS $$
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
        PERFORM horsies_pause_runs(ARRAY(SELECT horsies_tree(node.sub_workflow_id)))
        FROM horsies_workflows WHERE id = run_id AND coalesce(status, '') = 'PAUSED';
    END LOOP;
END
$$;
