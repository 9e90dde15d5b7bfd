-- Errors and results of tasks, nodes and runs, as the JSON text that readers get.

-- The JSON of a TaskError with a code of the library.
CREATE OR REPLACE FUNCTION horsies_task_error(code text, message text, data json DEFAULT NULL)
RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT json_build_object('error_code', json_build_object('__builtin_task_code__', code),
        'message', message, 'data', data, 'exception', NULL)::text
$$;

-- The result of a task that has ended, or what stands for one that was never written.
CREATE OR REPLACE FUNCTION horsies_task_result(task horsies_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT coalesce(task.result, '{"err":' || horsies_task_error(
        CASE task.status
            WHEN 'CANCELLED' THEN 'TASK_CANCELLED'
            WHEN 'EXPIRED' THEN 'TASK_EXPIRED'
            WHEN 'COMPLETED' THEN 'RESULT_NOT_AVAILABLE'
            ELSE coalesce(task.error_code, 'WORKER_CRASHED')
        END,
        coalesce(task.failed_reason, 'The task ended as ' || task.status || '.')) || '}')
$$;

-- The result of a node that has ended: its own, its task's, or what stands for one that is not there.
CREATE OR REPLACE FUNCTION horsies_node_result_v1(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN node.result IS NOT NULL THEN node.result
        WHEN node.status = 'SKIPPED' THEN '{"err":' || horsies_task_error('UPSTREAM_SKIPPED',
            'Node ' || node.node_id || ' was skipped.', json_build_object('dependency_index', node.task_index)) || '}'
        WHEN node.status IN ('COMPLETED', 'FAILED') THEN coalesce(
            (SELECT horsies_task_result(task) FROM horsies_tasks AS task WHERE task.id = node.result_task_id),
            '{"err":' || horsies_task_error('RESULT_NOT_AVAILABLE',
                'The task of node ' || node.node_id || ' is no longer stored.') || '}')
    END
$$;

CREATE OR REPLACE FUNCTION horsies_node_error(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT (horsies_node_result_v1(node)::json -> 'err')::text
$$;

-- The error of the first failed node by index, among those of any case if there are cases.
CREATE OR REPLACE FUNCTION horsies_first_error(run_id uuid, cases jsonb DEFAULT NULL) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT horsies_node_error(node) FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = run_id AND node.status = 'FAILED' AND (cases IS NULL OR EXISTS (
        SELECT FROM jsonb_array_elements(cases) AS option (wanted)
        WHERE option.wanted -> 'required_indices' @> to_jsonb(node.task_index)))
    ORDER BY node.task_index LIMIT 1
$$;

-- The result of a completed run: its output node's, or those of all nodes nobody depends on, by node id.
CREATE OR REPLACE FUNCTION horsies_run_result_v1(run horsies_workflows) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN run.status <> 'COMPLETED' THEN NULL
        WHEN run.output_task_index IS NOT NULL THEN (
            SELECT horsies_node_result_v1(node) FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = run.id AND node.task_index = run.output_task_index)
        ELSE (
            SELECT '{"ok":{' || string_agg(to_json(node.node_id::text) || ':' || horsies_node_result_v1(node), ','
                ORDER BY node.task_index) || '}}'
            FROM horsies_workflow_tasks AS node WHERE node.workflow_id = run.id AND node.dependents = '{}')
    END
$$;
