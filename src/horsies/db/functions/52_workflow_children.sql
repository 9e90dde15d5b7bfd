-- Sub-workflows: a node starts a run of its own and ends with it.

-- Nodes whose expansion task ended well: its result is the run to start below them. Under a run that was paused
-- meanwhile it starts on hold, under one that has ended not at all. Returns the nodes whose run could not be started.
CREATE OR REPLACE FUNCTION horsies_start_children(task_ids uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    expansion record;
    child_id uuid;
    not_started horsies_nodes;
BEGIN
    FOR expansion IN
        SELECT node.workflow_id, node.task_index, task.id AS task_id, task.result, task.started_at, node.run_status
        FROM (SELECT * FROM horsies_tasks WHERE id = ANY(task_ids) AND status = 'COMPLETED' LIMIT cardinality(task_ids))
            AS task
        CROSS JOIN LATERAL (
            SELECT node.workflow_id, node.task_index, run.status AS run_status
            FROM horsies_workflow_tasks AS node JOIN horsies_workflows AS run ON run.id = node.workflow_id
            WHERE node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index
              AND run.id = task.workflow_id AND node.kind = 'workflow' AND node.status = 'ENQUEUED'
              AND node.task_id = task.id OFFSET 0) AS node
        ORDER BY node.workflow_id, node.task_index
    LOOP
        child_id := NULL;
        IF expansion.run_status IN ('RUNNING', 'PAUSED') THEN
            child_id := horsies_start_child(expansion.result, expansion.run_status = 'PAUSED');
        END IF;
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE WHEN child_id IS NOT NULL THEN 'RUNNING'
                WHEN expansion.run_status IN ('RUNNING', 'PAUSED') THEN 'FAILED' ELSE 'SKIPPED' END,
            started_at = expansion.started_at,
            sub_workflow_id = child_id,
            completed_at = CASE WHEN child_id IS NULL THEN clock_timestamp() END,
            result = CASE WHEN child_id IS NULL AND expansion.run_status IN ('RUNNING', 'PAUSED') THEN '{"err":'
                || horsies_task_error('WORKFLOW_ENQUEUE_FAILED', 'The plan of sub-workflow '
                    || coalesce(node.sub_workflow_name, node.node_id) || ' is no run that can be started.') || '}' END
        WHERE workflow_id = expansion.workflow_id AND task_index = expansion.task_index;
        IF child_id IS NULL THEN
            not_started.runs := not_started.runs || expansion.workflow_id;
            not_started.indexes := not_started.indexes || expansion.task_index;
        END IF;
        -- The plan lives on as rows; what the task leaves behind is where to find them.
        UPDATE horsies_tasks SET result = '{"ok":' || coalesce(to_json(child_id)::text, 'null') || '}'
        WHERE id = expansion.task_id;
    END LOOP;
    RETURN not_started;
END
$$;

-- The run of an expansion's result, on hold if its parent is; NULL when the result is no plan, or not of a new run:
-- what one node got wrong must not undo the ends of the others in the same transaction.
CREATE OR REPLACE FUNCTION horsies_start_child(expanded text, is_paused boolean) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    child_id uuid;
BEGIN
    SELECT started.id INTO STRICT child_id
    FROM horsies_start_v1(json_build_array(expanded::json -> 'ok')) AS started WHERE started.created;
    IF is_paused THEN
        PERFORM horsies_pause_runs(ARRAY[child_id]);
    END IF;
    RETURN child_id;
EXCEPTION WHEN data_exception OR integrity_constraint_violation OR no_data_found THEN
    RETURN NULL;
END
$$;

-- The node of the parent run ends with its sub-workflow. Returns whether it did.
CREATE OR REPLACE FUNCTION horsies_end_sub_node(child horsies_workflows) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    output horsies_workflow_tasks;
    summary json;
BEGIN
    SELECT json_build_object('status', child.status, 'total_tasks', count(*),
        'completed_tasks', count(*) FILTER (WHERE status = 'COMPLETED'),
        'failed_tasks', count(*) FILTER (WHERE status = 'FAILED'),
        'skipped_tasks', count(*) FILTER (WHERE status = 'SKIPPED'),
        'error_summary', child.error::json ->> 'message')
    INTO summary FROM horsies_workflow_tasks WHERE workflow_id = child.id;
    SELECT * INTO output FROM horsies_workflow_tasks
    WHERE workflow_id = child.id AND task_index = child.output_task_index;
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE child.status WHEN 'COMPLETED' THEN 'COMPLETED' ELSE 'FAILED' END,
        completed_at = clock_timestamp(),
        sub_workflow_summary = summary::text,
        result_task_id = CASE child.status WHEN 'COMPLETED' THEN output.result_task_id END,
        result = CASE
            WHEN child.status <> 'COMPLETED' THEN '{"err":' || json_build_object(
                'error_code', json_build_object('__builtin_task_code__', 'SUBWORKFLOW_FAILED'),
                'message', 'Sub-workflow ' || child.name || ' ended as ' || child.status
                    || coalesce(': ' || (child.error::json ->> 'message'), '.'),
                'data', NULL, 'exception', NULL, 'sub_workflow_id', child.id, 'sub_workflow_summary', summary)::text || '}'
            WHEN output.workflow_id IS NULL THEN '{"ok":null}'
            WHEN output.status = 'SKIPPED' THEN horsies_node_result_v1(output)
            ELSE output.result
        END
    WHERE node.workflow_id = child.parent_workflow_id AND node.task_index = child.parent_task_index
      AND node.sub_workflow_id = child.id AND node.status = 'RUNNING';
    RETURN FOUND;
END
$$;

-- The nodes that stand for these ended runs in their parents end with them; where the parent goes on, so does its graph.
CREATE OR REPLACE FUNCTION horsies_finish_parent_nodes(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    ended horsies_nodes;
BEGIN
    FOR run IN
        SELECT * FROM horsies_workflows WHERE id = ANY(runs) AND parent_workflow_id IS NOT NULL ORDER BY depth DESC
    LOOP
        IF horsies_end_sub_node(run) THEN
            ended.runs := ended.runs || run.parent_workflow_id;
            ended.indexes := ended.indexes || run.parent_task_index;
        END IF;
    END LOOP;
    PERFORM horsies_propagate(ended, true);
END
$$;
