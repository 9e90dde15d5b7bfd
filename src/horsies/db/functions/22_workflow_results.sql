-- Errors and results of tasks, nodes and runs, as the JSON text that readers receive.

-- Return a TaskError with a built-in code, as JSON.
CREATE OR REPLACE FUNCTION horsies_task_error(p_code text, p_message text, p_data json DEFAULT NULL)
RETURNS text LANGUAGE sql IMMUTABLE
RETURN json_build_object('error_code', json_build_object('__builtin_task_code__', p_code),
    'message', p_message, 'data', p_data, 'exception', NULL)::text;

-- Return the result of a task that has ended, or an error if no result was written.
CREATE OR REPLACE FUNCTION horsies_task_result_v1(p_task horsies_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT coalesce(p_task.result, '{"err":' || horsies_task_error(
        CASE p_task.status
            WHEN 'CANCELLED' THEN 'TASK_CANCELLED'
            WHEN 'EXPIRED' THEN 'TASK_EXPIRED'
            WHEN 'COMPLETED' THEN 'RESULT_NOT_AVAILABLE'
            ELSE coalesce(p_task.error_code, 'WORKER_CRASHED')
        END,
        coalesce(p_task.failed_reason, 'The task ended as ' || p_task.status || '.')) || '}')
$$;

-- Return the tasks of a map's items in order, without the text columns. A retried item is represented by its last task.
CREATE OR REPLACE FUNCTION horsies_items(p_run_id uuid, p_index integer)
RETURNS TABLE (item_index integer, id uuid, status text, enqueued_at timestamptz, result_bytes integer)
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (task.workflow_item_index) task.workflow_item_index, task.id, task.status,
        task.enqueued_at, octet_length(coalesce(task.result, task.failed_reason, ''))
    FROM horsies_tasks AS task
    WHERE task.workflow_id = p_run_id AND task.workflow_node_index = p_index
      AND task.workflow_item_index IS NOT NULL
    ORDER BY task.workflow_item_index, task.id DESC
$$;

-- Return whether a node's result is a list of item results: the items of its own map, or of the map that is the output
-- of its sub-workflow. No row contains the list, because it could exceed the 1 GB that PostgreSQL can store.
CREATE OR REPLACE FUNCTION horsies_is_list(p_node horsies_workflow_tasks) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_node.status = 'COMPLETED' AND p_node.kind IN ('map', 'workflow') AND p_node.result IS NULL
        AND p_node.result_task_id IS NULL
$$;

-- Return the map node whose item results form the result of this node.
CREATE OR REPLACE FUNCTION horsies_source_map(INOUT run_id uuid, INOUT node_index integer)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    child_id uuid;
BEGIN
    LOOP
        SELECT node.sub_workflow_id INTO child_id FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = node_index AND node.kind = 'workflow';
        EXIT WHEN child_id IS NULL;
        SELECT child.id, child.output_task_index INTO run_id, node_index
        FROM horsies_workflows AS child WHERE child.id = child_id;
    END LOOP;
END
$$;

-- Return the map items whose results form the result of this node.
CREATE OR REPLACE FUNCTION horsies_list_v1(p_run_id uuid, p_index integer)
RETURNS TABLE (item_index integer, id uuid, bytes bigint) LANGUAGE sql STABLE AS $$
    SELECT item.item_index, item.id, item.result_bytes + 1
    FROM horsies_source_map(p_run_id, p_index) AS map
    CROSS JOIN LATERAL horsies_items(map.run_id, map.node_index) AS item ORDER BY item.item_index
$$;

-- Return the size of a node's result, or NULL if the node has none. The sizes are computed without reading the texts.
CREATE OR REPLACE FUNCTION horsies_result_bytes_v1(p_node horsies_workflow_tasks) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN p_node.status NOT IN ('COMPLETED', 'FAILED', 'SKIPPED') THEN NULL
        WHEN horsies_is_list(p_node) THEN (
            SELECT sum(part.bytes)::bigint FROM horsies_list_v1(p_node.workflow_id, p_node.task_index) AS part)
        ELSE coalesce(octet_length(p_node.result), (
            SELECT octet_length(task.result) FROM horsies_tasks AS task
            WHERE task.id = p_node.result_task_id), 0)
    END
$$;

-- Return the maximum length of a text that is returned as one value: 256 MiB.
CREATE OR REPLACE FUNCTION horsies_text_bytes_max() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT 268435456::bigint
$$;

-- Return the error that replaces a result too large for one value.
CREATE OR REPLACE FUNCTION horsies_too_large(p_owner text, p_bytes bigint) RETURNS text
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT '{"err":' || horsies_task_error('PAYLOAD_TOO_LARGE', 'The result of ' || p_owner || ' is '
        || p_bytes || ' bytes, more than the ' || horsies_text_bytes_max() || ' that are read as one value.')
        || '}'
$$;

-- Return the results of a node's items as one text, which is built for each query.
CREATE OR REPLACE FUNCTION horsies_list_text(p_node horsies_workflow_tasks) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN sum(part.bytes) > horsies_text_bytes_max()
            THEN horsies_too_large('node ' || p_node.node_id, sum(part.bytes)::bigint)
        ELSE (
            SELECT '{"ok":[' || string_agg(
                (SELECT horsies_task_result_v1(task) FROM horsies_tasks AS task WHERE task.id = item.id),
                ',' ORDER BY item.item_index) || ']}'
            FROM horsies_list_v1(p_node.workflow_id, p_node.task_index) AS item)
    END
    FROM horsies_list_v1(p_node.workflow_id, p_node.task_index) AS part
$$;

-- Return the result of a node that has ended: its stored result, its task's result, the list of its items' results, or
-- an error if the result is missing.
CREATE OR REPLACE FUNCTION horsies_node_result_v1(p_node horsies_workflow_tasks) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN p_node.result IS NOT NULL THEN p_node.result
        WHEN p_node.status = 'SKIPPED' THEN '{"err":' || horsies_task_error('UPSTREAM_SKIPPED',
            'Node ' || p_node.node_id || ' was skipped.',
            json_build_object('dependency_index', p_node.task_index)) || '}'
        WHEN p_node.status IN ('COMPLETED', 'FAILED') THEN coalesce(
            CASE WHEN horsies_is_list(p_node) THEN horsies_list_text(p_node) ELSE (
                SELECT horsies_task_result_v1(task) FROM horsies_tasks AS task
                WHERE task.id = p_node.result_task_id) END,
            '{"err":' || horsies_task_error('RESULT_NOT_AVAILABLE',
                'The task of node ' || p_node.node_id || ' is no longer stored.') || '}')
    END
$$;

CREATE OR REPLACE FUNCTION horsies_node_error(p_node horsies_workflow_tasks) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT (horsies_node_result_v1(p_node)::json -> 'err')::text
$$;

-- Return the error of the failed node with the lowest index; if the success policy has cases, only nodes in these cases
-- count.
CREATE OR REPLACE FUNCTION horsies_first_error(p_run_id uuid, p_cases jsonb DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT horsies_node_error(node) FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run_id AND node.status = 'FAILED' AND (p_cases IS NULL OR EXISTS (
        SELECT FROM jsonb_array_elements(p_cases) AS option (wanted)
        WHERE option.wanted -> 'required_indices' @> to_jsonb(node.task_index)))
    ORDER BY node.task_index LIMIT 1
$$;

-- Return the nodes whose results make up a run's result: its output node, or the nodes without dependents.
CREATE OR REPLACE FUNCTION horsies_result_nodes_v1(p_run horsies_workflows)
RETURNS SETOF horsies_workflow_tasks LANGUAGE sql STABLE AS $$
    SELECT node.* FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_run.id AND p_run.status = 'COMPLETED'
      AND CASE WHEN p_run.output_task_index IS NULL THEN node.dependents = '{}'
               ELSE node.task_index = p_run.output_task_index END
$$;

-- Return the size of a completed run's result, or NULL for any other run. Return the result as well if it is at most
-- "p_max_bytes" long: the result of the output node, or a list of the results of all nodes without dependents, each
-- with its node's id.
CREATE OR REPLACE FUNCTION horsies_run_result_v1(
    p_run horsies_workflows, p_max_bytes bigint, OUT bytes bigint, OUT result text)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    bytes := (SELECT sum(horsies_result_bytes_v1(node)) FROM horsies_result_nodes_v1(p_run) AS node);
    IF bytes <= p_max_bytes AND p_run.output_task_index IS NOT NULL THEN
        result := (SELECT horsies_node_result_v1(node) FROM horsies_result_nodes_v1(p_run) AS node);
    ELSIF bytes <= p_max_bytes THEN
        SELECT '{"ok":{' || string_agg(to_json(node.node_id::text) || ':' || horsies_node_result_v1(node), ','
            ORDER BY node.task_index) || '}}'
        INTO result FROM horsies_result_nodes_v1(p_run) AS node;
    END IF;
END
$$;
