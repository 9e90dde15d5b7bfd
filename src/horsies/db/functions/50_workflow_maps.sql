-- Maps: one task per element of a list, and the results of all of them as the result of the node.

-- The list a map goes over; NULL when the node it comes from has no list to give.
CREATE OR REPLACE FUNCTION horsies_map_elements(node horsies_workflow_tasks) RETURNS json LANGUAGE sql STABLE AS $$
    SELECT CASE json_typeof(given.value) WHEN 'array' THEN given.value END
    FROM horsies_workflow_tasks AS source
    CROSS JOIN LATERAL (SELECT horsies_node_result_v1(source)::json -> 'ok' AS value) AS given
    WHERE source.workflow_id = node.workflow_id AND source.task_index = node.map_over
$$;

-- The tasks of a map's items; of an item that was run again only the last run counts.
CREATE OR REPLACE FUNCTION horsies_items(node horsies_workflow_tasks) RETURNS SETOF horsies_tasks LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (workflow_item_index) * FROM horsies_tasks
    WHERE workflow_id = node.workflow_id AND workflow_node_index = node.task_index AND workflow_item_index IS NOT NULL
    ORDER BY workflow_item_index, id DESC
$$;

-- Maps among these nodes that are READY begin. Returns those that ended at once: nothing to do, or no list.
CREATE OR REPLACE FUNCTION horsies_expand_maps(ready horsies_nodes) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    map horsies_workflow_tasks;
    ended horsies_nodes;
BEGIN
    FOR map IN
        SELECT node.* FROM horsies_nodes_by_key(ready) AS node
        WHERE node.kind = 'map' AND node.status = 'READY' ORDER BY node.workflow_id, node.task_index
    LOOP
        IF NOT horsies_expand_map(map) THEN
            ended.runs := ended.runs || map.workflow_id;
            ended.indexes := ended.indexes || map.task_index;
        END IF;
    END LOOP;
    RETURN ended;
END
$$;

-- READY -> RUNNING with one task per element, or, where it has run before, per failed item. Returns false when the node
-- ended right here.
CREATE OR REPLACE FUNCTION horsies_expand_map(node horsies_workflow_tasks) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    elements json := horsies_map_elements(node);
    moment timestamptz := clock_timestamp();
    total integer;
BEGIN
    IF node.items_total > 0 THEN
        UPDATE horsies_workflow_tasks SET status = 'RUNNING', enqueued_at = moment, started_at = moment
        WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
        PERFORM horsies_retry_items(node);
        RETURN true;
    END IF;
    IF elements IS NULL THEN
        UPDATE horsies_workflow_tasks SET
            status = 'FAILED', completed_at = moment,
            result = '{"err":' || horsies_task_error('WORKFLOW_ENQUEUE_FAILED', 'Map node ' || node.node_id
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
    PERFORM horsies_add_items(node, elements, NULL);
    RETURN total > 0;
END
$$;

-- One task per element, or for these elements only, in their order: the first "max_parallel" of them due now and the
-- others parked.
CREATE OR REPLACE FUNCTION horsies_add_items(node horsies_workflow_tasks, elements json, places integer[]) RETURNS void
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
    SELECT horsies_new_id(), node.task_name, node.queue_name, node.priority, '[]',
        CASE node.task_kwargs WHEN '{}' THEN '{' ELSE left(node.task_kwargs, -1) || ',' END
            || to_json(node.map_parameter::text) || ':' || element.value || '}',
        moment,
        CASE WHEN row_number() OVER (ORDER BY element.place) <= coalesce(node.max_parallel, total)
            THEN moment - (total - element.place) * interval '1 microsecond' ELSE horsies_never_v1() END,
        least(node.good_until, moment + node.expires_in_ms * interval '1 millisecond'), node.max_retries,
        node.task_options, node.timeout_ms, '', is_paused, node.workflow_id, node.task_index, element.place - 1,
        node.inputs
    FROM json_array_elements(elements) WITH ORDINALITY AS element (value, place)
    WHERE places IS NULL OR element.place - 1 = ANY(places);
END
$$;

-- Items of maps that ended: count them and let parked ones follow. Returns the maps that ended with them.
CREATE OR REPLACE FUNCTION horsies_end_items(task_ids uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    map record;
    through horsies_nodes;
BEGIN
    FOR map IN
        WITH ended AS (
            SELECT task.workflow_id, task.workflow_node_index AS task_index, count(*) AS total,
                count(*) FILTER (WHERE task.status <> 'COMPLETED') AS bad,
                -- One that ended while it was parked leaves no place to another.
                count(*) FILTER (WHERE task.enqueued_at <> horsies_never_v1()) AS places
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
        IF map.items_open = 0 AND horsies_end_map(map.workflow_id, map.task_index) THEN
            through.runs := through.runs || map.workflow_id;
            through.indexes := through.indexes || map.task_index;
        ELSIF map.max_parallel IS NOT NULL THEN
            PERFORM horsies_unpark_items(map.workflow_id, map.task_index, map.places::integer);
        END IF;
    END LOOP;
    RETURN through;
END
$$;

-- The next parked items of a map become due, in order. Of a cancelled run there are none left.
CREATE OR REPLACE FUNCTION horsies_unpark_items(run_id uuid, node_index integer, count integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE horsies_tasks SET enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = ANY(ARRAY(
        SELECT id FROM horsies_tasks
        WHERE workflow_id = run_id AND workflow_node_index = node_index AND workflow_item_index IS NOT NULL
          AND status = 'PENDING' AND enqueued_at = horsies_never_v1()
        ORDER BY workflow_item_index LIMIT count))
$$;

-- The list of the results of a map's items, in order.
CREATE OR REPLACE FUNCTION horsies_item_results(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT '[' || string_agg(horsies_task_result(item), ',' ORDER BY item.workflow_item_index) || ']'
    FROM horsies_items(node) AS item
$$;

-- Which items failed, the first hundred of them.
CREATE OR REPLACE FUNCTION horsies_failed_items(node horsies_workflow_tasks) RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object('failed_items', json_agg(failed.workflow_item_index)) FROM (
        SELECT workflow_item_index FROM horsies_items(node)
        WHERE status <> 'COMPLETED' ORDER BY workflow_item_index LIMIT 100) AS failed
$$;

-- RUNNING -> COMPLETED or FAILED for a map of which no item is open. Returns whether it was one.
CREATE OR REPLACE FUNCTION horsies_end_map(run_id uuid, node_index integer) RETURNS boolean LANGUAGE sql AS $$
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE WHEN node.items_bad = 0 OR node.allow_failed_items THEN 'COMPLETED' ELSE 'FAILED' END,
        completed_at = clock_timestamp(),
        result = CASE WHEN node.items_bad = 0 OR node.allow_failed_items
            THEN '{"ok":' || horsies_item_results(node) || '}'
            ELSE '{"err":' || horsies_task_error('MAP_ITEMS_FAILED', node.items_bad || ' of ' || node.items_total
                || ' items of map node ' || node.node_id || ' failed.', horsies_failed_items(node)) || '}' END
    WHERE node.workflow_id = run_id AND node.task_index = node_index AND node.kind = 'map' AND node.status = 'RUNNING'
      AND node.items_open = 0
    RETURNING true
$$;

-- The smallest id that sorts after this one.
CREATE OR REPLACE FUNCTION horsies_next_id(id uuid) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT (left(replace(id::text, '-', ''), 16)
        || lpad(to_hex((('x' || right(replace(id::text, '-', ''), 16))::bit(64)::bigint + 1)), 16, '0'))::uuid
$$;

-- The items that failed, each once more, in the order of the list. An id later than the last run's even if the clock
-- was set back meanwhile: the latest id is the one that counts.
CREATE OR REPLACE FUNCTION horsies_retry_items(node horsies_workflow_tasks) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    again integer;
BEGIN
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, held, workflow_id, workflow_node_index, workflow_item_index,
        workflow_inputs, retried_from_task_id)
    SELECT greatest(horsies_new_id(), horsies_next_id(item.id)), item.task_name, item.queue_name, item.priority,
        item.args, item.kwargs, moment,
        CASE WHEN row_number() OVER (ORDER BY item.workflow_item_index) <= coalesce(node.max_parallel, node.items_total)
            THEN moment - (node.items_total - item.workflow_item_index) * interval '1 microsecond'
            ELSE horsies_never_v1() END,
        least(node.good_until, moment + node.expires_in_ms * interval '1 millisecond'), item.max_retries,
        item.task_options, item.timeout_ms, '', run.status = 'PAUSED', item.workflow_id, item.workflow_node_index,
        item.workflow_item_index, item.workflow_inputs, item.id
    FROM horsies_items(node) AS item JOIN horsies_workflows AS run ON run.id = item.workflow_id
    WHERE item.status <> 'COMPLETED';
    GET DIAGNOSTICS again = ROW_COUNT;
    UPDATE horsies_workflow_tasks SET items_open = again, items_bad = 0
    WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
END
$$;
