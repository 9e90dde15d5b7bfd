-- A paused run that is tried again no longer runs the items of a map twice that failed before it had any.

-- FAILED or PAUSED -> RUNNING with failed nodes tried again, all of them or the named ones: what was skipped because
-- of them waits again, what succeeded stays. A failed sub-workflow is itself tried again from its failures. Returns
-- 'retried', or the status that does not allow it, 'NO_FAILED_NODE', 'PARENT_ENDED', 'KEY_TAKEN'; NULL when there is
-- no such run.
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
    PERFORM horsies_reset_nodes_v1(run_id, failed);
    -- Before the run goes on: a map that failed before it had items begins anew then, and has nothing to run again.
    in_part := ARRAY(
        SELECT node.task_index FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = ANY(failed) AND node.status = 'RUNNING');
    PERFORM horsies_recount_v1(ARRAY[run_id]);
    IF run.status = 'PAUSED' THEN
        PERFORM horsies_resume_v1(run_id);
    END IF;
    PERFORM horsies_retry_parts_v1(run_id, in_part);
    PERFORM horsies_catch_up_v1(ARRAY[run_id]);
    RETURN 'retried';
END
$$;
