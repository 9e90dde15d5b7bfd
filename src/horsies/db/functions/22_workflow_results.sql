-- Errors and results of tasks, nodes and runs, as the JSON text that readers get.

-- The JSON of a TaskError with a built-in code.
CREATE OR REPLACE FUNCTION horsies_task_error(p_code text, p_message text, p_data json DEFAULT NULL)
RETURNS text LANGUAGE sql IMMUTABLE
RETURN json_build_object('error_code', json_build_object('__builtin_task_code__', p_code),
    'message', p_message, 'data', p_data, 'exception', NULL)::text;

-- The result of a task that has ended, or an error in place of one that was never written.
CREATE OR REPLACE FUNCTION horsies_task_result(p_task horsies_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT coalesce(p_task.result, '{"err":' || horsies_task_error(
        CASE p_task.status
            WHEN 'CANCELLED' THEN 'TASK_CANCELLED'
            WHEN 'EXPIRED' THEN 'TASK_EXPIRED'
            WHEN 'COMPLETED' THEN 'RESULT_NOT_AVAILABLE'
            ELSE coalesce(p_task.error_code, 'WORKER_CRASHED')
        END,
        coalesce(p_task.failed_reason, 'The task ended as ' || p_task.status || '.')) || '}')
$$;

-- The result of a node that has ended: its own, its task's, or an error in place of a missing one.
CREATE OR REPLACE FUNCTION horsies_node_result_v1(p_node horsies_workflow_tasks) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN p_node.result IS NOT NULL THEN p_node.result
        WHEN p_node.status = 'SKIPPED' THEN '{"err":' || horsies_task_error('UPSTREAM_SKIPPED',
            'Node ' || p_node.node_id || ' was skipped.',
            json_build_object('dependency_index', p_node.task_index)) || '}'
        WHEN p_node.status IN ('COMPLETED', 'FAILED') THEN coalesce(
            (SELECT horsies_task_result(task) FROM horsies_tasks AS task
             WHERE task.id = p_node.result_task_id),
            '{"err":' || horsies_task_error('RESULT_NOT_AVAILABLE',
                'The task of node ' || p_node.node_id || ' is no longer stored.') || '}')
    END
$$;

CREATE OR REPLACE FUNCTION horsies_node_error(p_node horsies_workflow_tasks) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT (horsies_node_result_v1(p_node)::json -> 'err')::text
$$;

-- The error of the first failed node by index, among those of any case if there are cases.
CREATE OR REPLACE FUNCTION horsies_first_error(p_run_id uuid, p_cases jsonb DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT horsies_node_error(node) FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run_id AND node.status = 'FAILED' AND (p_cases IS NULL OR EXISTS (
        SELECT FROM jsonb_array_elements(p_cases) AS option (wanted)
        WHERE option.wanted -> 'required_indices' @> to_jsonb(node.task_index)))
    ORDER BY node.task_index LIMIT 1
$$;

-- The result of a completed run: that of its output node, or those of nodes without dependents, by id.
CREATE OR REPLACE FUNCTION horsies_run_result_v1(p_run horsies_workflows) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN p_run.status <> 'COMPLETED' THEN NULL
        WHEN p_run.output_task_index IS NOT NULL THEN (
            SELECT horsies_node_result_v1(node) FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = p_run.id AND node.task_index = p_run.output_task_index)
        ELSE (
            SELECT '{"ok":{' || string_agg(to_json(node.node_id::text) || ':' || horsies_node_result_v1(node),
                ',' ORDER BY node.task_index) || '}}'
            FROM horsies_workflow_tasks AS node WHERE node.workflow_id = p_run.id AND node.dependents = '{}')
    END
$$;
