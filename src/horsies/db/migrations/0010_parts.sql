-- Nodes that are more than one task: maps with their items, sub-workflows with their runs; and signals, which are one
-- task and a value that comes from outside.

-- Tasks that ended and are only a part of a node's work. Returns the nodes that ended with them.
CREATE FUNCTION horsies_end_parts_v1(task_ids uuid[]) RETURNS horsies_nodes_v1 LANGUAGE plpgsql AS $$
DECLARE
    not_started horsies_nodes_v1 := horsies_start_children_v1(task_ids);
    maps horsies_nodes_v1 := horsies_end_items_v1(task_ids);
BEGIN
    RETURN (not_started.runs || maps.runs, not_started.indexes || maps.indexes);
END
$$;

-- Maps among these nodes that are READY begin. Returns those that ended at once: nothing to do, or no list.
CREATE FUNCTION horsies_expand_maps_v1(ready horsies_nodes_v1) RETURNS horsies_nodes_v1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    map horsies_workflow_tasks;
    ended horsies_nodes_v1;
BEGIN
    FOR map IN
        SELECT node.* FROM horsies_each_v1(ready) AS node
        WHERE node.kind = 'map' AND node.status = 'READY' ORDER BY node.workflow_id, node.task_index
    LOOP
        IF NOT horsies_expand_map_v1(map) THEN
            ended.runs := ended.runs || map.workflow_id;
            ended.indexes := ended.indexes || map.task_index;
        END IF;
    END LOOP;
    RETURN ended;
END
$$;

-- READY -> RUNNING with one task per element. Returns false when the node ended right here.
CREATE FUNCTION horsies_expand_map_v1(node horsies_workflow_tasks) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    elements json := horsies_map_elements_v1(node);
    moment timestamptz := clock_timestamp();
    total integer;
BEGIN
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

-- The list a map goes over; NULL when the node it comes from has no list to give.
CREATE FUNCTION horsies_map_elements_v1(node horsies_workflow_tasks) RETURNS json LANGUAGE sql STABLE AS $$
    SELECT CASE json_typeof(given.value) WHEN 'array' THEN given.value END
    FROM horsies_workflow_tasks AS source
    CROSS JOIN LATERAL (SELECT horsies_node_result_v1(source)::json -> 'ok' AS value) AS given
    WHERE source.workflow_id = node.workflow_id AND source.task_index = node.map_over
$$;

-- One task per element, or for these elements only, in their order: the first "max_parallel" of them due now and the
-- others parked.
CREATE FUNCTION horsies_add_items_v1(node horsies_workflow_tasks, elements json, places integer[]) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    total integer := json_array_length(elements);
    is_paused boolean;
BEGIN
    SELECT status = 'PAUSED' INTO is_paused FROM horsies_workflows WHERE id = node.workflow_id;
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, held, workflow_id, workflow_node_index, workflow_item_index,
        workflow_inputs)
    SELECT horsies_new_id_v1(), node.task_name, node.queue_name, node.priority, '[]',
        CASE node.task_kwargs WHEN '{}' THEN '{' ELSE left(node.task_kwargs, -1) || ',' END
            || to_json(node.map_parameter::text) || ':' || element.value || '}',
        moment,
        CASE WHEN row_number() OVER (ORDER BY element.place) <= coalesce(node.max_parallel, total)
            THEN moment - (total - element.place) * interval '1 microsecond' ELSE horsies_parked_v1() END,
        least(node.good_until, moment + node.expires_in_ms * interval '1 millisecond'), node.max_retries,
        node.task_options, node.timeout_ms, '', is_paused, node.workflow_id, node.task_index, element.place - 1,
        node.inputs
    FROM json_array_elements(elements) WITH ORDINALITY AS element (value, place)
    WHERE places IS NULL OR element.place - 1 = ANY(places);
END
$$;

-- The tasks of a map's items; of an item that was run again only the last run counts.
CREATE FUNCTION horsies_items_v1(node horsies_workflow_tasks) RETURNS SETOF horsies_tasks LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (workflow_item_index) * FROM horsies_tasks
    WHERE workflow_id = node.workflow_id AND workflow_node_index = node.task_index AND workflow_item_index IS NOT NULL
    ORDER BY workflow_item_index, id DESC
$$;

-- Items of maps that ended: count them and let parked ones follow. Returns the maps that ended with them.
CREATE FUNCTION horsies_end_items_v1(task_ids uuid[]) RETURNS horsies_nodes_v1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    map record;
    through horsies_nodes_v1;
BEGIN
    FOR map IN
        WITH ended AS (
            SELECT task.workflow_id, task.workflow_node_index AS task_index, count(*) AS total,
                count(*) FILTER (WHERE task.status <> 'COMPLETED') AS bad,
                -- One that ended while it was parked leaves no place to another.
                count(*) FILTER (WHERE task.enqueued_at <> horsies_parked_v1()) AS places
            FROM horsies_tasks AS task WHERE task.id = ANY(task_ids) AND task.workflow_item_index IS NOT NULL
            GROUP BY task.workflow_id, task.workflow_node_index LIMIT cardinality(task_ids)),
        counted AS (
            SELECT ended.*, map.place FROM ended CROSS JOIN LATERAL (
                SELECT node.ctid AS place FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = ended.workflow_id AND node.task_index = ended.task_index
                  AND node.status = 'RUNNING' OFFSET 0) AS map)
        UPDATE horsies_workflow_tasks AS node SET
            items_open = node.items_open - counted.total, items_bad = node.items_bad + counted.bad
        FROM counted WHERE node.ctid = counted.place
        RETURNING node.workflow_id, node.task_index, node.items_open, node.max_parallel, counted.places
    LOOP
        IF map.items_open = 0 AND horsies_end_map_v1(map.workflow_id, map.task_index) THEN
            through.runs := through.runs || map.workflow_id;
            through.indexes := through.indexes || map.task_index;
        ELSIF map.max_parallel IS NOT NULL THEN
            PERFORM horsies_unpark_items_v1(map.workflow_id, map.task_index, map.places::integer);
        END IF;
    END LOOP;
    RETURN through;
END
$$;

-- The next parked items of a map become due, in order. Of a cancelled run there are none left.
CREATE FUNCTION horsies_unpark_items_v1(run_id uuid, node_index integer, count integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE horsies_tasks SET enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = ANY(ARRAY(
        SELECT id FROM horsies_tasks
        WHERE workflow_id = run_id AND workflow_node_index = node_index AND workflow_item_index IS NOT NULL
          AND status = 'PENDING' AND enqueued_at = horsies_parked_v1()
        ORDER BY workflow_item_index LIMIT count))
$$;

-- The list of the results of a map's items, in order.
CREATE FUNCTION horsies_item_results_v1(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT '[' || string_agg(horsies_task_result_v1(item), ',' ORDER BY item.workflow_item_index) || ']'
    FROM horsies_items_v1(node) AS item
$$;

-- Which items failed, the first hundred of them.
CREATE FUNCTION horsies_failed_items_v1(node horsies_workflow_tasks) RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object('failed_items', json_agg(failed.workflow_item_index)) FROM (
        SELECT workflow_item_index FROM horsies_items_v1(node)
        WHERE status <> 'COMPLETED' ORDER BY workflow_item_index LIMIT 100) AS failed
$$;

-- RUNNING -> COMPLETED or FAILED for a map of which no item is open. Returns whether it was one.
CREATE FUNCTION horsies_end_map_v1(run_id uuid, node_index integer) RETURNS boolean LANGUAGE sql AS $$
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE WHEN node.items_bad = 0 OR node.allow_failed_items THEN 'COMPLETED' ELSE 'FAILED' END,
        completed_at = clock_timestamp(),
        result = CASE WHEN node.items_bad = 0 OR node.allow_failed_items
            THEN '{"ok":' || horsies_item_results_v1(node) || '}'
            ELSE '{"err":' || horsies_task_error_v1('MAP_ITEMS_FAILED', node.items_bad || ' of ' || node.items_total
                || ' items of map node ' || node.node_id || ' failed.', horsies_failed_items_v1(node)) || '}' END
    WHERE node.workflow_id = run_id AND node.task_index = node_index AND node.kind = 'map' AND node.status = 'RUNNING'
      AND node.items_open = 0
    RETURNING true
$$;

-- The smallest id that sorts after this one.
CREATE FUNCTION horsies_next_id_v1(id uuid) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT (left(replace(id::text, '-', ''), 16)
        || lpad(to_hex((('x' || right(replace(id::text, '-', ''), 16))::bit(64)::bigint + 1)), 16, '0'))::uuid
$$;

-- The items that failed, each once more, in the order of the list. An id later than the last run's even if the clock
-- was set back meanwhile: the latest id is the one that counts.
CREATE FUNCTION horsies_retry_items_v1(node horsies_workflow_tasks) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    again integer;
BEGIN
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, held, workflow_id, workflow_node_index, workflow_item_index,
        workflow_inputs, retried_from_task_id)
    SELECT greatest(horsies_new_id_v1(), horsies_next_id_v1(item.id)), item.task_name, item.queue_name, item.priority,
        item.args, item.kwargs, moment,
        CASE WHEN row_number() OVER (ORDER BY item.workflow_item_index) <= coalesce(node.max_parallel, node.items_total)
            THEN moment - (node.items_total - item.workflow_item_index) * interval '1 microsecond'
            ELSE horsies_parked_v1() END,
        least(node.good_until, moment + node.expires_in_ms * interval '1 millisecond'), item.max_retries,
        item.task_options, item.timeout_ms, '', run.status = 'PAUSED', item.workflow_id, item.workflow_node_index,
        item.workflow_item_index, item.workflow_inputs, item.id
    FROM horsies_items_v1(node) AS item JOIN horsies_workflows AS run ON run.id = item.workflow_id
    WHERE item.status <> 'COMPLETED';
    GET DIAGNOSTICS again = ROW_COUNT;
    UPDATE horsies_workflow_tasks SET items_open = again, items_bad = 0
    WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
END
$$;

-- Nodes whose expansion task ended well: its result is the run to start below them. Under a run that was paused
-- meanwhile it starts on hold, under one that has ended not at all. Returns the nodes whose run could not be started.
CREATE FUNCTION horsies_start_children_v1(task_ids uuid[]) RETURNS horsies_nodes_v1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    expansion record;
    child_id uuid;
    not_started horsies_nodes_v1;
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
            child_id := horsies_start_child_v1(expansion.result, expansion.run_status = 'PAUSED');
        END IF;
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE WHEN child_id IS NOT NULL THEN 'RUNNING'
                WHEN expansion.run_status IN ('RUNNING', 'PAUSED') THEN 'FAILED' ELSE 'SKIPPED' END,
            started_at = expansion.started_at,
            sub_workflow_id = child_id,
            completed_at = CASE WHEN child_id IS NULL THEN clock_timestamp() END,
            result = CASE WHEN child_id IS NULL AND expansion.run_status IN ('RUNNING', 'PAUSED') THEN '{"err":'
                || horsies_task_error_v1('WORKFLOW_ENQUEUE_FAILED', 'The plan of sub-workflow '
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
CREATE FUNCTION horsies_start_child_v1(expanded text, is_paused boolean) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    child_id uuid;
BEGIN
    SELECT started.id INTO STRICT child_id
    FROM horsies_start_v1(json_build_array(expanded::json -> 'ok')) AS started WHERE started.created;
    IF is_paused THEN
        PERFORM horsies_hold_runs_v1(ARRAY[child_id]);
    END IF;
    RETURN child_id;
EXCEPTION WHEN data_exception OR integrity_constraint_violation OR no_data_found THEN
    RETURN NULL;
END
$$;

-- The node of the parent run ends with its sub-workflow. Returns whether it did.
CREATE FUNCTION horsies_end_sub_node_v1(child horsies_workflows) RETURNS boolean LANGUAGE plpgsql AS $$
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

-- Signals that came early, to the nodes among these that wait for them; the oldest first, each to one node only.
CREATE FUNCTION horsies_deliver_signals_v1(waiting horsies_nodes_v1) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    listener record;
    signal_value text;
BEGIN
    FOR listener IN
        SELECT node.workflow_id, node.signal_name, node.task_id
        FROM horsies_each_v1(waiting) AS node
        WHERE node.kind = 'signal' AND node.status = 'ENQUEUED' ORDER BY node.workflow_id, node.task_index
    LOOP
        DELETE FROM horsies_workflow_signals WHERE id = (
            SELECT early.id FROM horsies_workflow_signals AS early
            WHERE early.workflow_id = listener.workflow_id AND early.name = listener.signal_name ORDER BY early.id LIMIT 1)
        RETURNING value INTO signal_value;
        CONTINUE WHEN NOT FOUND;
        UPDATE horsies_tasks SET
            kwargs = '{"value":' || signal_value || '}', enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = listener.task_id;
    END LOOP;
END
$$;
