-- Sub-workflows: a node that starts another run and ends together with that run.

-- Start the runs of nodes whose expansion task succeeded: the result of that task is the plan. If the parent run has
-- since been paused, the child run starts paused; if the parent run has ended, the child run does not start. Returns
-- the nodes for which no run was started.
CREATE OR REPLACE FUNCTION horsies_start_children(p_tasks uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    expansion record;
    child_id uuid;
    is_open boolean;
    not_started horsies_nodes;
BEGIN
    FOR expansion IN
        SELECT node.workflow_id, node.task_index, task.id AS task_id, task.result, task.started_at,
            node.run_status
        FROM (SELECT * FROM horsies_tasks WHERE id = ANY(p_tasks) AND status = 'COMPLETED'
              LIMIT cardinality(p_tasks)) AS task
        CROSS JOIN LATERAL (
            SELECT node.workflow_id, node.task_index, run.status AS run_status
            FROM horsies_workflow_tasks AS node JOIN horsies_workflows AS run ON run.id = node.workflow_id
            WHERE node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index
              AND run.id = task.workflow_id AND node.kind = 'workflow' AND node.status = 'ENQUEUED'
              AND node.task_id = task.id OFFSET 0) AS node
        ORDER BY node.workflow_id, node.task_index
    LOOP
        child_id := NULL;
        is_open := expansion.run_status IN ('RUNNING', 'PAUSED');
        IF is_open THEN
            child_id := horsies_start_child(expansion.result, expansion.run_status = 'PAUSED');
        END IF;
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE WHEN child_id IS NOT NULL THEN 'RUNNING'
                WHEN is_open THEN 'FAILED' ELSE 'SKIPPED' END,
            started_at = expansion.started_at,
            sub_workflow_id = child_id,
            completed_at = CASE WHEN child_id IS NULL AND is_open THEN clock_timestamp() END,
            result = CASE WHEN child_id IS NULL AND is_open THEN '{"err":'
                || horsies_task_error('WORKFLOW_ENQUEUE_FAILED', 'The plan of sub-workflow '
                    || coalesce(node.sub_workflow_name, node.node_id) || ' is not a run that can be started.')
                || '}' END
        WHERE node.workflow_id = expansion.workflow_id AND node.task_index = expansion.task_index;
        IF child_id IS NULL THEN
            not_started.runs := not_started.runs || expansion.workflow_id;
            not_started.indexes := not_started.indexes || expansion.task_index;
        END IF;
        -- The plan is now stored as rows, so the id of the run replaces the plan as the task's result.
        UPDATE horsies_tasks SET result = '{"ok":' || coalesce(to_json(child_id)::text, 'null') || '}'
        WHERE id = expansion.task_id;
    END LOOP;
    RETURN not_started;
END
$$;

-- Start the run that an expansion planned, and pause it if its parent is paused. Returns NULL if the result is not a
-- plan, or is the plan of a run that already exists. No error is raised, because it would roll back the progress of
-- other nodes.
CREATE OR REPLACE FUNCTION horsies_start_child(p_expanded text, p_is_paused boolean) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    child_id uuid;
BEGIN
    SELECT run.id INTO STRICT child_id
    FROM horsies_start_v1(jsonb_build_array(p_expanded::jsonb -> 'ok')) AS run WHERE run.created;
    IF p_is_paused THEN
        PERFORM horsies_pause_runs(ARRAY[child_id]);
    END IF;
    RETURN child_id;
EXCEPTION WHEN data_exception OR integrity_constraint_violation OR no_data_found THEN
    RETURN NULL;
END
$$;

-- End the parent run's node when its sub-workflow has ended. Returns whether the node ended.
CREATE OR REPLACE FUNCTION horsies_finish_parent_node(p_child horsies_workflows) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    output horsies_workflow_tasks;
    summary json;
BEGIN
    SELECT json_build_object('status', p_child.status, 'total_tasks', count(*),
        'completed_tasks', count(*) FILTER (WHERE status = 'COMPLETED'),
        'failed_tasks', count(*) FILTER (WHERE status = 'FAILED'),
        'skipped_tasks', count(*) FILTER (WHERE status = 'SKIPPED'),
        'error_summary', p_child.error::json ->> 'message')
    INTO summary FROM horsies_workflow_tasks WHERE workflow_id = p_child.id;
    SELECT * INTO output FROM horsies_workflow_tasks
    WHERE workflow_id = p_child.id AND task_index = p_child.output_task_index;
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE p_child.status WHEN 'COMPLETED' THEN 'COMPLETED' ELSE 'FAILED' END,
        completed_at = clock_timestamp(),
        sub_workflow_summary = summary::text,
        result_task_id = CASE p_child.status WHEN 'COMPLETED' THEN output.result_task_id END,
        result = CASE
            WHEN p_child.status <> 'COMPLETED' THEN '{"err":' || json_build_object(
                'error_code', json_build_object('__builtin_task_code__', 'SUBWORKFLOW_FAILED'),
                'message', 'Sub-workflow ' || p_child.name || ' ended as ' || p_child.status
                    || coalesce(': ' || (p_child.error::json ->> 'message'), '.'),
                'data', NULL, 'exception', NULL, 'sub_workflow_id', p_child.id,
                'sub_workflow_summary', summary)::text || '}'
            WHEN output.workflow_id IS NULL THEN '{"ok":null}'
            WHEN output.status = 'SKIPPED' THEN horsies_node_result_v1(output)
            ELSE output.result
        END
    WHERE node.workflow_id = p_child.parent_workflow_id AND node.task_index = p_child.parent_task_index
      AND node.sub_workflow_id = p_child.id AND node.status = 'RUNNING';
    RETURN FOUND;
END
$$;

-- End the nodes of these ended runs in their parent runs, and let parent runs that are RUNNING continue.
CREATE OR REPLACE FUNCTION horsies_finish_parent_nodes(p_runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    run horsies_workflows;
    ended horsies_nodes;
BEGIN
    FOR run IN
        SELECT * FROM horsies_workflows
        WHERE id = ANY(p_runs) AND parent_workflow_id IS NOT NULL ORDER BY depth DESC
    LOOP
        IF horsies_finish_parent_node(run) THEN
            ended.runs := ended.runs || run.parent_workflow_id;
            ended.indexes := ended.indexes || run.parent_task_index;
        END IF;
    END LOOP;
    PERFORM horsies_propagate(ended, true);
END
$$;
