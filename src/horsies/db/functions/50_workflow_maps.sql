-- Maps: one task per element of a list. A map's result is the list of its items' results. The list is read from the
-- items' tasks and never stored as one value.
--
-- The elements of a long list become tasks in several steps, so that no transaction holds a run's lock, or blocks a
-- worker's turn, for long: for a list of 100,000 elements, one step takes about 0.1 s, while inserting all tasks at
-- once took 2.4 s. The first step is part of the transaction that starts the map. Each further step is part of a
-- transaction in which items end and fewer open items remain than two steps insert. So a crash between steps loses
-- nothing, and a run that is paused or ends needs no further steps.

-- Return the maximum number of items, and roughly of bytes of arguments, that one step inserts. Even with large items,
-- a step inserts at least two items, or one more than the number that has just ended; otherwise a map could run only
-- one item at a time.
CREATE OR REPLACE FUNCTION horsies_step(OUT items integer, OUT bytes integer) LANGUAGE sql IMMUTABLE AS $$
    SELECT 1000, 16777216
$$;

-- Return the number of elements in the list that a map runs over; NULL if the node before the map gave no list.
CREATE OR REPLACE FUNCTION horsies_count_elements(p_node horsies_workflow_tasks) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN horsies_is_list(source) THEN (
            SELECT map.items_total FROM horsies_source_map(source.workflow_id, source.task_index) AS key
            JOIN horsies_workflow_tasks AS map
                ON map.workflow_id = key.run_id AND map.task_index = key.node_index)
        WHEN json_typeof(given.value) = 'array' THEN json_array_length(given.value)
    END
    FROM horsies_workflow_tasks AS source CROSS JOIN LATERAL (
        SELECT CASE WHEN NOT horsies_is_list(source) THEN horsies_node_result_v1(source)::json -> 'ok' END
            AS value OFFSET 0) AS given
    WHERE source.workflow_id = p_node.workflow_id AND source.task_index = p_node.map_over
$$;

-- Start the maps among these nodes that are READY. Returns the maps that ended immediately, because they have no
-- elements or no list.
CREATE OR REPLACE FUNCTION horsies_expand_maps(p_ready horsies_workflow_tasks[]) RETURNS horsies_nodes
LANGUAGE plpgsql AS $$
DECLARE
    map horsies_workflow_tasks;
    ended horsies_nodes;
BEGIN
    FOR map IN
        SELECT node.* FROM unnest(p_ready) AS node
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

-- READY -> RUNNING for a map, with its first tasks: for all elements, or for the failed items of a retried map. Returns
-- false if the map ended immediately.
CREATE OR REPLACE FUNCTION horsies_expand_map(p_node horsies_workflow_tasks) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    begun_at timestamptz := clock_timestamp();
    is_retried boolean := coalesce(p_node.items_total > 0, false);
    total integer := CASE WHEN is_retried THEN p_node.items_total ELSE horsies_count_elements(p_node) END;
    problem text := CASE
        WHEN total IS NULL THEN horsies_task_error('WORKFLOW_ENQUEUE_FAILED', 'Map node ' || p_node.node_id
            || ' has nothing to map over: the node before it gave no list.')
        WHEN total > p_node.max_items AND NOT is_retried THEN horsies_task_error('PAYLOAD_TOO_LARGE',
            'Map node ' || p_node.node_id || ' would have ' || total || ' items, more than '
            || p_node.max_items || ' (payload.max_map_items); map over batches, or start the run with a '
            || 'higher limit.') END;
    to_run integer := CASE WHEN is_retried THEN (
        SELECT count(*) FROM horsies_items(p_node.workflow_id, p_node.task_index) AS item
        WHERE item.status <> 'COMPLETED') ELSE total END;
BEGIN
    IF problem IS NOT NULL THEN
        UPDATE horsies_workflow_tasks SET
            status = 'FAILED', completed_at = begun_at, result = '{"err":' || problem || '}'
        WHERE workflow_id = p_node.workflow_id AND task_index = p_node.task_index;
        RETURN false;
    END IF;
    UPDATE horsies_workflow_tasks SET
        status = CASE WHEN total = 0 THEN 'COMPLETED' ELSE 'RUNNING' END,
        result = CASE WHEN total = 0 THEN '{"ok":[]}' END,
        completed_at = CASE WHEN total = 0 THEN begun_at END,
        enqueued_at = begun_at, started_at = begun_at, items_total = total, items_open = to_run,
        items_bad = 0, items_waiting = to_run, items_next = 0
    WHERE workflow_id = p_node.workflow_id AND task_index = p_node.task_index;
    IF total > 0 THEN
        PERFORM horsies_add_items(p_node.workflow_id, p_node.task_index, 2);
    END IF;
    RETURN total > 0;
END
$$;

-- Return a map's next items without a task, as many as one step may insert: elements of its list, or failed items to
-- retry ("replaced" is the failed task). The size limit does not apply to the first "p_least" items.
CREATE OR REPLACE FUNCTION horsies_next_items(p_node horsies_workflow_tasks, p_least integer)
RETURNS TABLE (item_index integer, kwargs text, replaced uuid) LANGUAGE plpgsql STABLE AS $$
DECLARE
    source horsies_workflow_tasks;
    list record;
    is_retried boolean := EXISTS (
        SELECT FROM horsies_tasks AS task
        WHERE task.workflow_id = p_node.workflow_id AND task.workflow_node_index = p_node.task_index
          AND task.workflow_item_index = p_node.items_next);
    head text := CASE p_node.task_kwargs WHEN '{}' THEN '{' ELSE left(p_node.task_kwargs, -1) || ',' END
        || to_json(p_node.map_parameter::text) || ':';
    step record := horsies_step();
    -- Every step reads the whole list, so the elements of a very long list are inserted in at most a hundred steps.
    items_max integer := least(
        greatest(step.items, p_node.items_total / 100),
        greatest(p_least, step.bytes / octet_length(head)));
BEGIN
    SELECT * INTO source FROM horsies_workflow_tasks AS node
    WHERE node.workflow_id = p_node.workflow_id AND node.task_index = p_node.map_over;
    IF NOT is_retried AND NOT horsies_is_list(source) THEN
        RETURN QUERY
        SELECT element.place::integer - 1, head || element.value || '}', NULL::uuid
        FROM json_array_elements(horsies_node_result_v1(source)::json -> 'ok')
            WITH ORDINALITY AS element (value, place)
        WHERE element.place > p_node.items_next AND element.place <= p_node.items_next + items_max;
        RETURN;
    END IF;
    IF is_retried THEN
        SELECT p_node.workflow_id AS run_id, p_node.task_index AS node_index INTO list;
    ELSE
        SELECT * INTO list FROM horsies_source_map(source.workflow_id, source.task_index);
    END IF;
    RETURN QUERY
    SELECT chosen.place,
        CASE WHEN is_retried THEN task.kwargs ELSE head || horsies_task_result_v1(task) || '}' END,
        CASE WHEN is_retried THEN task.id END
    FROM (
        SELECT item.place, item.id, row_number() OVER (ORDER BY item.place) AS number,
            sum(item.bytes) OVER (ORDER BY item.place) - item.bytes AS bytes_before
        FROM (
            SELECT last.* FROM (
                SELECT DISTINCT ON (item.workflow_item_index) item.workflow_item_index AS place, item.id,
                    item.status, octet_length(CASE WHEN is_retried THEN item.kwargs ELSE item.result END)
                        AS bytes
                FROM horsies_tasks AS item
                WHERE item.workflow_id = list.run_id AND item.workflow_node_index = list.node_index
                  AND item.workflow_item_index >= p_node.items_next
                ORDER BY item.workflow_item_index, item.id DESC) AS last
            WHERE NOT (is_retried AND last.status = 'COMPLETED')
            ORDER BY last.place LIMIT items_max) AS item) AS chosen
    CROSS JOIN LATERAL (
        SELECT found.* FROM horsies_tasks AS found WHERE found.id = chosen.id OFFSET 0) AS task
    WHERE coalesce(chosen.bytes_before, 0) < step.bytes OR chosen.number <= p_least ORDER BY chosen.place;
END
$$;

-- Perform one step: a map's next items become tasks, in order. As many tasks as "max_parallel" allows are due now, and
-- the rest are parked; in a paused run all tasks are held. For a retried item the task with the latest id counts, so
-- its new id must be later than the id of the failed task, even if the clock was set back in between.
CREATE OR REPLACE FUNCTION horsies_add_items(p_run_id uuid, p_index integer, p_least integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    map horsies_workflow_tasks;
    begun_at timestamptz := clock_timestamp();
    places bigint;
    is_held boolean := (SELECT status = 'PAUSED' FROM horsies_workflows WHERE id = p_run_id);
    is_burst boolean;
    added integer;
    last_added integer;
BEGIN
    SELECT * INTO map FROM horsies_workflow_tasks WHERE workflow_id = p_run_id AND task_index = p_index;
    is_burst := map.inputs IS NULL AND map.max_parallel IS NULL AND horsies_is_burst_v1(map.task_options);
    places := map.items_waiting;
    IF map.max_parallel IS NOT NULL THEN
        places := map.max_parallel - (map.items_open - map.items_waiting) + (
            SELECT count(*) FROM horsies_tasks AS task
            WHERE task.workflow_id = p_run_id AND task.workflow_node_index = p_index
              AND task.workflow_item_index IS NOT NULL AND task.status = 'PENDING'
              AND task.enqueued_at = horsies_never_v1());
    END IF;
    WITH inserted AS (
        INSERT INTO horsies_tasks (
            id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
            task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_item_index,
            workflow_inputs, retried_from_task_id, held, burst, lane_key, lane, updated_at)
        SELECT greatest(horsies_new_id(), horsies_next_id(item.replaced)), map.task_name, map.queue_name,
            map.priority, '[]', item.kwargs, begun_at,
            CASE WHEN row_number() OVER (ORDER BY item.item_index) <= places
                THEN begun_at - (count(*) OVER () - row_number() OVER (ORDER BY item.item_index))
                    * interval '1 microsecond' ELSE horsies_never_v1() END,
            least(map.good_until, map.started_at + map.expires_in_ms * interval '1 millisecond'),
            map.max_retries, map.task_options, map.timeout_ms, '', p_run_id, p_index, item.item_index,
            map.inputs, item.replaced, is_held OR map.lane_key IS NOT NULL, is_burst, map.lane_key,
            CASE WHEN map.lane_key IS NOT NULL AND NOT is_held THEN horsies_lane_v1(map.queue_name, map.lane_key) END,
            begun_at
        FROM horsies_next_items(map, p_least) AS item
        RETURNING workflow_item_index)
    SELECT count(*), max(workflow_item_index) INTO added, last_added FROM inserted;
    UPDATE horsies_workflow_tasks SET
        items_waiting = items_waiting - added, items_next = coalesce(last_added + 1, items_next)
    WHERE workflow_id = p_run_id AND task_index = p_index;
END
$$;

-- Count the map items that ended, make parked items due, and perform the next step of a map that needs one. Returns the
-- maps that ended with these items. In a run that has ended, no further items are made due or inserted.
CREATE OR REPLACE FUNCTION horsies_end_items(p_tasks uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    map record;
    ended horsies_nodes;
BEGIN
    FOR map IN
        WITH ended_items AS (
            SELECT task.workflow_id, task.workflow_node_index AS task_index, count(*) AS total,
                count(*) FILTER (WHERE task.status <> 'COMPLETED') AS bad,
                -- An item that ended while it was parked does not free a place for another item.
                count(*) FILTER (WHERE task.enqueued_at <> horsies_never_v1()) AS places
            FROM horsies_tasks AS task WHERE task.id = ANY(p_tasks) AND task.workflow_item_index IS NOT NULL
            GROUP BY task.workflow_id, task.workflow_node_index LIMIT cardinality(p_tasks)),
        counted AS (
            SELECT items.*, found.place, found.run_status FROM ended_items AS items CROSS JOIN LATERAL (
                SELECT node.ctid AS place, run.status AS run_status
                FROM horsies_workflow_tasks AS node JOIN horsies_workflows AS run ON run.id = node.workflow_id
                WHERE node.workflow_id = items.workflow_id AND node.task_index = items.task_index
                  AND run.id = items.workflow_id AND node.items_open > 0 OFFSET 0) AS found)
        UPDATE horsies_workflow_tasks AS node SET
            items_open = node.items_open - counted.total, items_bad = node.items_bad + counted.bad
        FROM counted WHERE node.ctid = counted.place
        RETURNING node.workflow_id, node.task_index, node.items_open, node.items_waiting, node.max_parallel,
            counted.total, counted.places, counted.run_status
    LOOP
        IF map.items_open = 0 THEN
            IF horsies_end_map(map.workflow_id, map.task_index) THEN
                ended.runs := ended.runs || map.workflow_id;
                ended.indexes := ended.indexes || map.task_index;
            END IF;
            CONTINUE;
        END IF;
        CONTINUE WHEN map.run_status NOT IN ('RUNNING', 'PAUSED');
        IF map.max_parallel IS NOT NULL THEN
            PERFORM horsies_unpark_items(map.workflow_id, map.task_index, map.places::integer);
        END IF;
        IF map.items_waiting > 0 AND map.items_open - map.items_waiting < 2 * (horsies_step()).items THEN
            PERFORM horsies_add_items(map.workflow_id, map.task_index, map.total::integer + 1);
        END IF;
    END LOOP;
    RETURN ended;
END
$$;

-- Make a map's next parked items due, in order. Items that have already started are left out: they are durable
-- functions, and other events wake them. A cancelled run has no parked items.
CREATE OR REPLACE FUNCTION horsies_unpark_items(p_run_id uuid, p_index integer, p_count integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE horsies_tasks SET enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = ANY(ARRAY(
        SELECT id FROM horsies_tasks
        WHERE workflow_id = p_run_id AND workflow_node_index = p_index AND workflow_item_index IS NOT NULL
          AND status = 'PENDING' AND enqueued_at = horsies_never_v1() AND generation = 0
        ORDER BY workflow_item_index LIMIT p_count))
$$;

-- Return the indexes of the failed items, at most the first hundred.
CREATE OR REPLACE FUNCTION horsies_failed_items(p_run_id uuid, p_index integer) RETURNS json
LANGUAGE sql STABLE AS $$
    SELECT json_build_object('failed_items', json_agg(failed.item_index)) FROM (
        SELECT item_index FROM horsies_items(p_run_id, p_index)
        WHERE status <> 'COMPLETED' ORDER BY item_index LIMIT 100) AS failed
$$;

-- RUNNING -> COMPLETED or FAILED for a map without open items. Returns true if the map ended.
CREATE OR REPLACE FUNCTION horsies_end_map(p_run_id uuid, p_index integer) RETURNS boolean LANGUAGE sql AS $$
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE WHEN node.items_bad = 0 OR node.allow_failed_items THEN 'COMPLETED' ELSE 'FAILED' END,
        completed_at = clock_timestamp(),
        result = CASE WHEN node.items_bad > 0 AND NOT node.allow_failed_items
            THEN '{"err":' || horsies_task_error('MAP_ITEMS_FAILED', node.items_bad || ' of '
                || node.items_total || ' items of map node ' || node.node_id || ' failed.',
                horsies_failed_items(p_run_id, p_index)) || '}' END
    WHERE node.workflow_id = p_run_id AND node.task_index = p_index AND node.kind = 'map'
      AND node.status = 'RUNNING' AND node.items_open = 0
    RETURNING true
$$;

-- RUNNING -> FAILED for the maps of runs that were cancelled or have expired. Items without a task never get one;
-- running items end without any effect on the map.
CREATE OR REPLACE FUNCTION horsies_stop_maps(p_runs uuid[]) RETURNS void LANGUAGE sql AS $$
    UPDATE horsies_workflow_tasks AS node SET
        status = 'FAILED', completed_at = clock_timestamp(),
        items_open = node.items_open - coalesce(node.items_waiting, 0),
        items_bad = node.items_bad + coalesce(node.items_waiting, 0), items_waiting = 0,
        result = '{"err":' || horsies_task_error(
            CASE run.status WHEN 'EXPIRED' THEN 'WORKFLOW_EXPIRED' ELSE 'WORKFLOW_CANCELLED' END,
            'Map node ' || node.node_id || ' had not ended when its run ended as ' || run.status || '.') || '}'
    FROM horsies_workflows AS run
    WHERE run.id = ANY(p_runs) AND node.workflow_id = run.id AND node.workflow_id = ANY(p_runs)
      AND run.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      AND node.kind = 'map' AND node.status = 'RUNNING'
$$;

-- Return the smallest id that sorts after this id.
CREATE OR REPLACE FUNCTION horsies_next_id(p_id uuid) RETURNS uuid LANGUAGE sql IMMUTABLE
RETURN (left(replace(p_id::text, '-', ''), 16) || lpad(to_hex(
    (('x' || right(replace(p_id::text, '-', ''), 16))::bit(64)::bigint + 1)), 16, '0'))::uuid;
