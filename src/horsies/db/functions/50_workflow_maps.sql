-- Maps: one task per element of a list; the results of all items are the result of the node.

-- The list a map goes over; NULL when the node it comes from has no list to give.
CREATE OR REPLACE FUNCTION horsies_map_elements(p_node horsies_workflow_tasks) RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT CASE json_typeof(given.value) WHEN 'array' THEN given.value END
    FROM horsies_workflow_tasks AS source
    CROSS JOIN LATERAL (SELECT horsies_node_result_v1(source)::json -> 'ok' AS value) AS given
    WHERE source.workflow_id = p_node.workflow_id AND source.task_index = p_node.map_over
$$;

-- The tasks of a map's items. Of an item that was tried again only the last task counts.
CREATE OR REPLACE FUNCTION horsies_items(p_node horsies_workflow_tasks) RETURNS SETOF horsies_tasks
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (workflow_item_index) * FROM horsies_tasks
    WHERE workflow_id = p_node.workflow_id AND workflow_node_index = p_node.task_index
      AND workflow_item_index IS NOT NULL
    ORDER BY workflow_item_index, id DESC
$$;

-- Begin the maps among these nodes that are READY. Returns those that ended at once: no elements, or no list.
CREATE OR REPLACE FUNCTION horsies_expand_maps(p_ready horsies_nodes) RETURNS horsies_nodes
LANGUAGE plpgsql AS $$
DECLARE
    map horsies_workflow_tasks;
    ended horsies_nodes;
BEGIN
    FOR map IN
        SELECT node.* FROM horsies_nodes_by_key(p_ready) AS node
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

-- READY -> RUNNING, one task per element, or per failed item of a retried map. Returns false if it ended
-- here.
CREATE OR REPLACE FUNCTION horsies_expand_map(p_node horsies_workflow_tasks) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    elements json := horsies_map_elements(p_node);
    begun_at timestamptz := clock_timestamp();
    total integer := json_array_length(elements);
BEGIN
    IF p_node.items_total > 0 THEN
        UPDATE horsies_workflow_tasks SET status = 'RUNNING', enqueued_at = begun_at, started_at = begun_at
        WHERE workflow_id = p_node.workflow_id AND task_index = p_node.task_index;
        PERFORM horsies_retry_items(p_node);
        RETURN true;
    END IF;
    IF elements IS NULL THEN
        UPDATE horsies_workflow_tasks SET
            status = 'FAILED', completed_at = begun_at,
            result = '{"err":' || horsies_task_error('WORKFLOW_ENQUEUE_FAILED', 'Map node ' || p_node.node_id
                || ' has nothing to map over: the node before it gave no list.') || '}'
        WHERE workflow_id = p_node.workflow_id AND task_index = p_node.task_index;
        RETURN false;
    END IF;
    UPDATE horsies_workflow_tasks SET
        status = CASE WHEN total = 0 THEN 'COMPLETED' ELSE 'RUNNING' END,
        result = CASE WHEN total = 0 THEN '{"ok":[]}' END,
        completed_at = CASE WHEN total = 0 THEN begun_at END,
        enqueued_at = begun_at, started_at = begun_at, items_total = total, items_open = total, items_bad = 0
    WHERE workflow_id = p_node.workflow_id AND task_index = p_node.task_index;
    PERFORM horsies_add_items(p_node, elements);
    RETURN total > 0;
END
$$;

-- One task per element, in their order: the first "max_parallel" of them due now and the others parked.
CREATE OR REPLACE FUNCTION horsies_add_items(p_node horsies_workflow_tasks, p_elements json) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    begun_at timestamptz := clock_timestamp();
    total integer := json_array_length(p_elements);
BEGIN
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_item_index,
        workflow_inputs)
    SELECT horsies_new_id(), p_node.task_name, p_node.queue_name, p_node.priority, '[]',
        CASE p_node.task_kwargs WHEN '{}' THEN '{' ELSE left(p_node.task_kwargs, -1) || ',' END
            || to_json(p_node.map_parameter::text) || ':' || element.value || '}',
        begun_at,
        CASE WHEN element.place <= coalesce(p_node.max_parallel, total)
            THEN begun_at - (total - element.place) * interval '1 microsecond' ELSE horsies_never_v1() END,
        least(p_node.good_until, begun_at + p_node.expires_in_ms * interval '1 millisecond'),
        p_node.max_retries, p_node.task_options, p_node.timeout_ms, '', p_node.workflow_id, p_node.task_index,
        element.place - 1, p_node.inputs
    FROM json_array_elements(p_elements) WITH ORDINALITY AS element (value, place);
END
$$;

-- Count the items of maps that ended, and release parked ones. Returns the maps that ended with them.
CREATE OR REPLACE FUNCTION horsies_end_items(p_tasks uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    map record;
    ended horsies_nodes;
BEGIN
    FOR map IN
        WITH ended_items AS (
            SELECT task.workflow_id, task.workflow_node_index AS task_index, count(*) AS total,
                count(*) FILTER (WHERE task.status <> 'COMPLETED') AS bad,
                -- An item that ended while it was parked frees no place for another.
                count(*) FILTER (WHERE task.enqueued_at <> horsies_never_v1()) AS places
            FROM horsies_tasks AS task WHERE task.id = ANY(p_tasks) AND task.workflow_item_index IS NOT NULL
            GROUP BY task.workflow_id, task.workflow_node_index LIMIT cardinality(p_tasks)),
        counted AS (
            SELECT items.*, found.place FROM ended_items AS items CROSS JOIN LATERAL (
                SELECT node.ctid AS place FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = items.workflow_id AND node.task_index = items.task_index
                  AND node.status = 'RUNNING' OFFSET 0) AS found)
        UPDATE horsies_workflow_tasks AS node SET
            items_open = node.items_open - counted.total, items_bad = node.items_bad + counted.bad
        FROM counted WHERE node.ctid = counted.place
        RETURNING node.workflow_id, node.task_index, node.items_open, node.max_parallel, counted.places
    LOOP
        IF map.items_open = 0 AND horsies_end_map(map.workflow_id, map.task_index) THEN
            ended.runs := ended.runs || map.workflow_id;
            ended.indexes := ended.indexes || map.task_index;
        ELSIF map.max_parallel IS NOT NULL THEN
            PERFORM horsies_unpark_items(map.workflow_id, map.task_index, map.places::integer);
        END IF;
    END LOOP;
    RETURN ended;
END
$$;

-- The next parked items of a map become due, in order. A cancelled run has none left.
CREATE OR REPLACE FUNCTION horsies_unpark_items(p_run_id uuid, p_index integer, p_count integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE horsies_tasks SET enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = ANY(ARRAY(
        SELECT id FROM horsies_tasks
        WHERE workflow_id = p_run_id AND workflow_node_index = p_index AND workflow_item_index IS NOT NULL
          AND status = 'PENDING' AND enqueued_at = horsies_never_v1()
        ORDER BY workflow_item_index LIMIT p_count))
$$;

-- The list of the results of a map's items, in order.
CREATE OR REPLACE FUNCTION horsies_item_results(p_node horsies_workflow_tasks) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT '[' || string_agg(horsies_task_result(item), ',' ORDER BY item.workflow_item_index) || ']'
    FROM horsies_items(p_node) AS item
$$;

-- The indexes of the failed items, the first hundred of them.
CREATE OR REPLACE FUNCTION horsies_failed_items(p_node horsies_workflow_tasks) RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT json_build_object('failed_items', json_agg(failed.workflow_item_index)) FROM (
        SELECT workflow_item_index FROM horsies_items(p_node)
        WHERE status <> 'COMPLETED' ORDER BY workflow_item_index LIMIT 100) AS failed
$$;

-- RUNNING -> COMPLETED or FAILED for a map without open items. Returns whether it was one.
CREATE OR REPLACE FUNCTION horsies_end_map(p_run_id uuid, p_index integer) RETURNS boolean LANGUAGE sql AS $$
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE WHEN node.items_bad = 0 OR node.allow_failed_items THEN 'COMPLETED' ELSE 'FAILED' END,
        completed_at = clock_timestamp(),
        result = CASE WHEN node.items_bad = 0 OR node.allow_failed_items
            THEN '{"ok":' || horsies_item_results(node) || '}'
            ELSE '{"err":' || horsies_task_error('MAP_ITEMS_FAILED', node.items_bad || ' of '
                || node.items_total || ' items of map node ' || node.node_id || ' failed.',
                horsies_failed_items(node)) || '}' END
    WHERE node.workflow_id = p_run_id AND node.task_index = p_index AND node.kind = 'map'
      AND node.status = 'RUNNING' AND node.items_open = 0
    RETURNING true
$$;

-- The smallest id that sorts after this one.
CREATE OR REPLACE FUNCTION horsies_next_id(p_id uuid) RETURNS uuid LANGUAGE sql IMMUTABLE
RETURN (left(replace(p_id::text, '-', ''), 16) || lpad(to_hex(
    (('x' || right(replace(p_id::text, '-', ''), 16))::bit(64)::bigint + 1)), 16, '0'))::uuid;

-- Every failed item once more, in the order of the list. The new id is later than that of the last task even
-- if the clock was set back meanwhile: the task with the latest id is the one that counts.
CREATE OR REPLACE FUNCTION horsies_retry_items(p_node horsies_workflow_tasks) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    begun_at timestamptz := clock_timestamp();
    retried integer;
BEGIN
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_item_index,
        workflow_inputs, retried_from_task_id)
    SELECT greatest(horsies_new_id(), horsies_next_id(item.id)), item.task_name, item.queue_name,
        item.priority, item.args, item.kwargs, begun_at,
        CASE WHEN row_number() OVER (ORDER BY item.workflow_item_index)
                <= coalesce(p_node.max_parallel, p_node.items_total)
            THEN begun_at - (p_node.items_total - item.workflow_item_index) * interval '1 microsecond'
            ELSE horsies_never_v1() END,
        least(p_node.good_until, begun_at + p_node.expires_in_ms * interval '1 millisecond'),
        item.max_retries, item.task_options, item.timeout_ms, '', item.workflow_id,
        item.workflow_node_index, item.workflow_item_index, item.workflow_inputs, item.id
    FROM horsies_items(p_node) AS item WHERE item.status <> 'COMPLETED';
    GET DIAGNOSTICS retried = ROW_COUNT;
    UPDATE horsies_workflow_tasks SET items_open = retried, items_bad = 0
    WHERE workflow_id = p_node.workflow_id AND task_index = p_node.task_index;
END
$$;
