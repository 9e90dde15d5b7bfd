-- Progress of workflows, on the server: a task that ends moves its run on in the transaction that records its end,
-- whoever records it (a worker's turn, a cancel, an expiry, the reaper, a person at a prompt), because the trigger
-- on horsies_tasks calls horsies_advance_v1. There is no second step that could be lost.
--
-- * One lock per tree of runs: whoever changes a run, its nodes or a descendant locks the row of the root first.
--   Transactions that will end tasks of workflows lock the roots before the tasks, in the order of their ids
--   (lock_runs), so no two of them ever wait for each other.
-- * Everything is set-based: the number of statements depends on how deep skips cascade, not on how many nodes end
--   or become ready. A node's join is decided by counters in its own row.
-- * Only a RUNNING run moves. What ends in a paused one is recorded with "propagated" false, and counts on resume.

-- A new id that begins with its time, as the producers make them.
CREATE FUNCTION horsies_new_id_v1() RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
$$;

-- The JSON of a TaskError with a code of the library.
CREATE FUNCTION horsies_task_error_v1(code text, message text, data json DEFAULT NULL)
RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT json_build_object('error_code', json_build_object('__builtin_task_code__', code),
        'message', message, 'data', data, 'exception', NULL)::text
$$;

-- The result of a node that has ended: its own, its task's, or what stands for one that was never written.
CREATE FUNCTION horsies_node_result_v1(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN node.result IS NOT NULL THEN node.result
        WHEN node.status = 'SKIPPED' THEN '{"err":' || horsies_task_error_v1('UPSTREAM_SKIPPED',
            'Node ' || node.node_id || ' was skipped.', json_build_object('dependency_index', node.task_index)) || '}'
        WHEN node.status IN ('COMPLETED', 'FAILED') THEN coalesce(
            (SELECT coalesce(task.result, '{"err":' || horsies_task_error_v1(
                    CASE task.status WHEN 'CANCELLED' THEN 'TASK_CANCELLED' WHEN 'EXPIRED' THEN 'TASK_EXPIRED'
                        WHEN 'COMPLETED' THEN 'RESULT_NOT_AVAILABLE' ELSE coalesce(task.error_code, 'WORKER_CRASHED') END,
                    coalesce(task.failed_reason, 'The task of node ' || node.node_id || ' ended as ' || task.status || '.')) || '}')
             FROM horsies_tasks AS task WHERE task.id = node.result_task_id),
            '{"err":' || horsies_task_error_v1('RESULT_NOT_AVAILABLE',
                'The task of node ' || node.node_id || ' is no longer stored.') || '}')
    END
$$;

CREATE FUNCTION horsies_node_error_v1(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT (horsies_node_result_v1(node)::json -> 'err')::text
$$;

-- A run and everything below it.
CREATE FUNCTION horsies_tree_v1(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM horsies_workflows AS child JOIN tree ON child.parent_workflow_id = tree.id)
    SELECT id FROM tree
$$;

-- RUNNING -> PAUSED for these runs, and their tasks on hold: the claim does not see a held task, and one that runs
-- keeps the mark in case it is retried. What was claimed ahead goes back to the queue, still on hold.
CREATE FUNCTION horsies_hold_runs_v1(runs uuid[]) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    changed integer;
BEGIN
    UPDATE horsies_workflows SET status = 'PAUSED', paused_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = ANY(runs) AND status = 'RUNNING';
    GET DIAGNOSTICS changed = ROW_COUNT;
    UPDATE horsies_tasks AS task SET
        held = true,
        status = CASE task.status WHEN 'CLAIMED' THEN 'PENDING' ELSE task.status END,
        claimed = false,
        claim_expires_at = NULL,
        claimed_by_worker_id = CASE task.status WHEN 'CLAIMED' THEN NULL ELSE task.claimed_by_worker_id END,
        claimed_at = CASE task.status WHEN 'CLAIMED' THEN NULL ELSE task.claimed_at END,
        updated_at = clock_timestamp()
    WHERE task.workflow_id = ANY(runs) AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING');
    RETURN changed;
END
$$;

-- Far enough: when a task waits for something else than the clock.
CREATE FUNCTION horsies_parked_v1() RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
    SELECT timestamptz '9999-01-01 00:00:00+00'
$$;

-- The items of a map: one task per element of the upstream list, in its order, the first "max_parallel" of them due
-- now and the others parked. Returns false when the node ended right here: nothing to do, or no list.
CREATE FUNCTION horsies_expand_map_v1(node horsies_workflow_tasks) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    source horsies_workflow_tasks;
    elements json;
    total integer;
    moment timestamptz := clock_timestamp();
BEGIN
    SELECT * INTO source FROM horsies_workflow_tasks
    WHERE workflow_id = node.workflow_id AND task_index = node.map_over;
    elements := horsies_node_result_v1(source)::json -> 'ok';
    IF elements IS NULL OR json_typeof(elements) <> 'array' THEN
        UPDATE horsies_workflow_tasks SET
            status = 'FAILED', completed_at = moment,
            result = '{"err":' || horsies_task_error_v1('WORKFLOW_ENQUEUE_FAILED', 'Map node ' || node.node_id
                || ' has nothing to map over: the result of ' || source.node_id || ' is not a list.') || '}'
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
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_item_index, workflow_inputs)
    SELECT horsies_new_id_v1(), node.task_name, node.queue_name, node.priority, '[]',
        CASE node.task_kwargs WHEN '{}' THEN '{' ELSE left(node.task_kwargs, -1) || ',' END
            || to_json(node.map_parameter::text) || ':' || element.value || '}',
        moment,
        CASE WHEN element.place <= coalesce(node.max_parallel, total)
            THEN moment - (total - element.place) * interval '1 microsecond' ELSE horsies_parked_v1() END,
        least(node.good_until, moment + node.expires_in_ms * interval '1 millisecond'), node.max_retries,
        node.task_options, node.timeout_ms, '', node.workflow_id, node.task_index, element.place - 1, node.inputs
    FROM json_array_elements(elements) WITH ORDINALITY AS element (value, place);
    RETURN total > 0;
END
$$;

-- READY -> ENQUEUED: the task rows of these nodes. Siblings are due in the order of their indexes, a microsecond
-- apart and none in the future. Returns the nodes that ended at once.
CREATE FUNCTION horsies_enqueue_nodes_v1(
    INOUT runs uuid[], INOUT indexes integer[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    node horsies_workflow_tasks;
    ended_runs uuid[] := '{}';
    ended_indexes integer[] := '{}';
    has_maps boolean;
    has_signals boolean;
BEGIN
    WITH ready AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE WHEN node.kind = 'map' THEN node.status ELSE 'ENQUEUED' END,
            task_id = CASE WHEN node.kind = 'map' THEN NULL ELSE horsies_new_id_v1() END,
            enqueued_at = moment
        FROM unnest(runs, indexes) AS chosen (workflow_id, task_index)
        WHERE node.workflow_id = chosen.workflow_id AND node.task_index = chosen.task_index AND node.status = 'READY'
        RETURNING node.*),
    inserted AS (
        INSERT INTO horsies_tasks (
            id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
            task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_inputs)
        SELECT task_id, task_name, queue_name, priority, '[]', task_kwargs, moment,
            CASE kind
                WHEN 'sleep' THEN coalesce(not_before, moment + delay_ms * interval '1 millisecond')
                WHEN 'signal' THEN coalesce(moment + signal_timeout_ms * interval '1 millisecond', horsies_parked_v1())
                ELSE moment - (cardinality(indexes) - row_number() OVER (ORDER BY workflow_id, task_index))
                    * interval '1 microsecond'
            END,
            least(good_until, moment + expires_in_ms * interval '1 millisecond'), max_retries,
            task_options, timeout_ms, '', workflow_id, task_index, inputs
        FROM ready WHERE kind <> 'map')
    SELECT bool_or(kind = 'map'), bool_or(kind = 'signal') INTO has_maps, has_signals FROM ready;
    IF has_signals THEN
        PERFORM horsies_deliver_signals_v1(runs, indexes);
    END IF;
    IF has_maps THEN
        FOR node IN
            SELECT mapped.* FROM horsies_workflow_tasks AS mapped
            JOIN unnest(runs, indexes) AS chosen (workflow_id, task_index) USING (workflow_id, task_index)
            WHERE mapped.kind = 'map' AND mapped.status = 'READY'
        LOOP
            IF NOT horsies_expand_map_v1(node) THEN
                ended_runs := ended_runs || node.workflow_id;
                ended_indexes := ended_indexes || node.task_index;
            END IF;
        END LOOP;
    END IF;
    runs := ended_runs;
    indexes := ended_indexes;
END
$$;

-- Signals that came early, to the nodes among these that wait for them; the oldest first, each to one node only.
CREATE FUNCTION horsies_deliver_signals_v1(runs uuid[], indexes integer[]) RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    node horsies_workflow_tasks;
    signal_value text;
    delivered integer := 0;
BEGIN
    FOR node IN
        SELECT waiting.* FROM horsies_workflow_tasks AS waiting
        JOIN unnest(runs, indexes) AS chosen (workflow_id, task_index) USING (workflow_id, task_index)
        WHERE waiting.kind = 'signal' AND waiting.status = 'ENQUEUED' ORDER BY waiting.task_index
    LOOP
        DELETE FROM horsies_workflow_signals WHERE id = (
            SELECT early.id FROM horsies_workflow_signals AS early
            WHERE early.workflow_id = node.workflow_id AND early.name = node.signal_name ORDER BY early.id LIMIT 1)
        RETURNING value INTO signal_value;
        CONTINUE WHEN NOT FOUND;
        UPDATE horsies_tasks SET kwargs = '{"value":' || signal_value || '}', enqueued_at = clock_timestamp()
        WHERE id = node.task_id;
        delivered := delivered + 1;
    END LOOP;
    RETURN delivered;
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

-- RUNNING -> COMPLETED or FAILED for those of these runs that have no open node. Returns the nodes of parents that
-- ended with them.
CREATE FUNCTION horsies_finish_runs_v1(INOUT runs uuid[], OUT indexes integer[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    matched integer;
    succeeded boolean;
    reason text;
    ended_runs uuid[] := '{}';
BEGIN
    indexes := '{}';
    FOR run IN
        SELECT * FROM horsies_workflows WHERE id = ANY(runs) AND status = 'RUNNING' AND open_nodes = 0 ORDER BY id
    LOOP
        matched := NULL;
        reason := NULL;
        succeeded := run.failed_nodes = 0;
        IF run.success_policy IS NOT NULL THEN
            SELECT min(option.place) - 1 INTO matched
            FROM jsonb_array_elements(run.success_policy -> 'cases') WITH ORDINALITY AS option (wanted, place)
            WHERE NOT EXISTS (
                SELECT FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = run.id AND node.status <> 'COMPLETED'
                  AND option.wanted -> 'required_indices' @> to_jsonb(node.task_index));
            succeeded := matched IS NOT NULL;
        END IF;
        IF NOT succeeded THEN
            SELECT horsies_node_error_v1(node) INTO reason FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = run.id AND node.status = 'FAILED'
              AND (run.success_policy IS NULL OR EXISTS (
                SELECT FROM jsonb_array_elements(run.success_policy -> 'cases') AS option (wanted)
                WHERE option.wanted -> 'required_indices' @> to_jsonb(node.task_index)))
            ORDER BY node.task_index LIMIT 1;
            reason := coalesce(reason, horsies_task_error_v1('WORKFLOW_SUCCESS_CASE_NOT_MET',
                'No case of the success policy of workflow ' || run.name || ' was met.'));
        END IF;
        UPDATE horsies_workflows SET
            status = CASE WHEN succeeded THEN 'COMPLETED' ELSE 'FAILED' END, error = reason, matched_case = matched,
            completed_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = run.id RETURNING * INTO run;
        IF run.parent_workflow_id IS NOT NULL AND horsies_end_sub_node_v1(run) THEN
            ended_runs := ended_runs || run.parent_workflow_id;
            indexes := indexes || run.parent_task_index;
        END IF;
    END LOOP;
    runs := ended_runs;
END
$$;

-- A failure that pauses: of these nodes, just ended, those that failed where a failure pauses the run. The run and
-- what runs below it are put on hold with the error of the first by index.
CREATE FUNCTION horsies_pause_on_failure_v1(runs uuid[], indexes integer[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    failure record;
BEGIN
    FOR failure IN
        SELECT DISTINCT ON (node.workflow_id) node.workflow_id, horsies_node_error_v1(node) AS reason
        FROM unnest(runs, indexes) AS ended (workflow_id, task_index)
        JOIN horsies_workflow_tasks AS node USING (workflow_id, task_index)
        JOIN horsies_workflows AS run ON run.id = node.workflow_id
        WHERE node.pauses AND node.status = 'FAILED' AND run.status = 'RUNNING'
        ORDER BY node.workflow_id, node.task_index
    LOOP
        UPDATE horsies_workflows SET error = failure.reason WHERE id = failure.workflow_id;
        PERFORM horsies_hold_runs_v1(ARRAY(SELECT horsies_tree_v1(failure.workflow_id)));
    END LOOP;
END
$$;

-- Everything that follows from the end of these nodes, in RUNNING runs: dependents count and decide, ready ones
-- become tasks, skipped ones are the next to count, runs without open nodes end and so do the nodes they stand for.
-- "fresh" ends may pause a run; after a resume the same ends may not pause it again.
CREATE FUNCTION horsies_propagate_v1(runs uuid[], indexes integer[], fresh boolean) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    touched uuid[];
    ready_runs uuid[];
    ready_indexes integer[];
    skipped_runs uuid[];
    skipped_indexes integer[];
    parent_runs uuid[];
    parent_indexes integer[];
BEGIN
    WHILE cardinality(runs) > 0 LOOP
        IF fresh THEN
            PERFORM horsies_pause_on_failure_v1(runs, indexes);
        END IF;
        touched := ARRAY(SELECT DISTINCT ended.id FROM unnest(runs) AS ended (id));
        -- Marked in a statement of its own: a node that ended may also be the dependent of another, and one
        -- statement must not update a row twice.
        WITH marked AS (
            UPDATE horsies_workflow_tasks AS node SET propagated = true
            FROM unnest(runs, indexes) AS chosen (workflow_id, task_index)
            JOIN horsies_workflows AS run ON run.id = chosen.workflow_id
            WHERE node.workflow_id = chosen.workflow_id AND node.task_index = chosen.task_index
              AND NOT node.propagated AND run.status = 'RUNNING'
            RETURNING node.workflow_id, node.task_index)
        SELECT array_agg(workflow_id), array_agg(task_index) INTO runs, indexes FROM marked;
        WITH ended AS MATERIALIZED (
            SELECT node.workflow_id, node.status, node.dependents, node.context_dependents
            FROM unnest(runs, indexes) AS chosen (workflow_id, task_index)
            JOIN horsies_workflow_tasks AS node USING (workflow_id, task_index)),
        counted AS (
            UPDATE horsies_workflows AS run SET
                open_nodes = run.open_nodes - ends.total, failed_nodes = run.failed_nodes + ends.failed,
                updated_at = clock_timestamp()
            FROM (SELECT workflow_id, count(*) AS total, count(*) FILTER (WHERE status = 'FAILED') AS failed
                  FROM ended GROUP BY workflow_id) AS ends
            WHERE run.id = ends.workflow_id),
        dependent AS (
            SELECT workflow_id, task_index, sum(ok) AS ok, sum(bad) AS bad, sum(seen) AS seen
            FROM (SELECT workflow_id, unnest(dependents) AS task_index, (status = 'COMPLETED')::integer AS ok,
                         (status <> 'COMPLETED')::integer AS bad, 0 AS seen FROM ended
                  UNION ALL
                  SELECT workflow_id, unnest(context_dependents), 0, 0, 1 FROM ended) AS edge
            GROUP BY workflow_id, task_index),
        decided AS (
            UPDATE horsies_workflow_tasks AS node SET
                deps_open = node.deps_open - dependent.ok - dependent.bad,
                deps_ok = node.deps_ok + dependent.ok,
                deps_bad = node.deps_bad + dependent.bad,
                context_open = node.context_open - dependent.seen,
                status = horsies_join_v1(node.status, node.join_type, node.min_success, node.allow_failed_deps,
                    node.deps_open - dependent.ok - dependent.bad, node.deps_ok + dependent.ok,
                    node.deps_bad + dependent.bad, node.context_open - dependent.seen)
            FROM dependent
            WHERE node.workflow_id = dependent.workflow_id AND node.task_index = dependent.task_index
            RETURNING node.workflow_id, node.task_index, node.status, node.propagated)
        SELECT array_agg(workflow_id) FILTER (WHERE status = 'READY'), array_agg(task_index) FILTER (WHERE status = 'READY'),
            array_agg(workflow_id) FILTER (WHERE status = 'SKIPPED' AND NOT propagated),
            array_agg(task_index) FILTER (WHERE status = 'SKIPPED' AND NOT propagated)
        INTO ready_runs, ready_indexes, skipped_runs, skipped_indexes FROM decided;
        IF skipped_runs IS NOT NULL THEN
            UPDATE horsies_workflow_tasks AS node SET completed_at = clock_timestamp()
            FROM unnest(skipped_runs, skipped_indexes) AS skipped (workflow_id, task_index)
            WHERE node.workflow_id = skipped.workflow_id AND node.task_index = skipped.task_index;
        END IF;
        IF ready_runs IS NOT NULL THEN
            SELECT enqueued.runs, enqueued.indexes INTO ready_runs, ready_indexes
            FROM horsies_enqueue_nodes_v1(ready_runs, ready_indexes) AS enqueued;
        END IF;
        SELECT finished.runs, finished.indexes INTO parent_runs, parent_indexes
        FROM horsies_finish_runs_v1(touched) AS finished;
        runs := skipped_runs || ready_runs || parent_runs;
        indexes := skipped_indexes || ready_indexes || parent_indexes;
        fresh := true;
    END LOOP;
END
$$;

-- What a node's counters mean for it. A node that is no longer PENDING has been decided.
CREATE FUNCTION horsies_join_v1(
    status text, join_type text, min_success integer, allow_failed_deps boolean, open_count bigint, ok_count bigint,
    bad_count bigint, context_open bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN status <> 'PENDING' THEN status
        WHEN join_type = 'all' THEN CASE
            WHEN open_count > 0 THEN 'PENDING'
            WHEN bad_count = 0 OR allow_failed_deps THEN 'READY'
            ELSE 'SKIPPED' END
        WHEN ok_count >= coalesce(min_success, 1) THEN CASE WHEN context_open > 0 THEN 'PENDING' ELSE 'READY' END
        WHEN ok_count + open_count < coalesce(min_success, 1) THEN 'SKIPPED'
        ELSE 'PENDING'
    END
$$;

-- Items of maps that ended: count them, let parked ones follow, and collect the results of maps that are through.
-- Returns the maps that ended.
CREATE FUNCTION horsies_end_items_v1(task_ids uuid[], OUT runs uuid[], OUT indexes integer[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    counted record;
    node horsies_workflow_tasks;
BEGIN
    runs := '{}';
    indexes := '{}';
    FOR counted IN
        WITH ended AS (
            SELECT task.workflow_id, task.workflow_node_index AS task_index, count(*) AS total,
                count(*) FILTER (WHERE task.status <> 'COMPLETED') AS bad
            FROM horsies_tasks AS task WHERE task.id = ANY(task_ids) AND task.workflow_item_index IS NOT NULL
            GROUP BY 1, 2),
        changed AS (
            UPDATE horsies_workflow_tasks AS node SET
                items_open = node.items_open - ended.total, items_bad = node.items_bad + ended.bad
            FROM ended
            WHERE node.workflow_id = ended.workflow_id AND node.task_index = ended.task_index AND node.status = 'RUNNING'
            RETURNING node AS map, ended.total)
        SELECT changed.map, changed.total FROM changed
    LOOP
        node := counted.map;
        IF node.items_open > 0 THEN
            IF node.max_parallel IS NOT NULL THEN
                PERFORM horsies_unpark_items_v1(node.workflow_id, node.task_index, counted.total::integer);
            END IF;
            CONTINUE;
        END IF;
        UPDATE horsies_workflow_tasks SET
            status = CASE WHEN node.items_bad = 0 OR node.allow_failed_items THEN 'COMPLETED' ELSE 'FAILED' END,
            completed_at = clock_timestamp(),
            result = CASE WHEN node.items_bad = 0 OR node.allow_failed_items
                THEN '{"ok":' || horsies_item_results_v1(node) || '}'
                ELSE '{"err":' || horsies_task_error_v1('MAP_ITEMS_FAILED', node.items_bad || ' of ' || node.items_total
                    || ' items of map node ' || node.node_id || ' failed.', horsies_failed_items_v1(node)) || '}' END
        WHERE workflow_id = node.workflow_id AND task_index = node.task_index;
        runs := runs || node.workflow_id;
        indexes := indexes || node.task_index;
    END LOOP;
END
$$;

-- The next parked items of a map become due, in order. Of a cancelled run there are none left.
CREATE FUNCTION horsies_unpark_items_v1(run_id uuid, node_index integer, count integer) RETURNS void
LANGUAGE sql AS $$
    UPDATE horsies_tasks SET enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = ANY(ARRAY(
        SELECT id FROM horsies_tasks
        WHERE workflow_id = run_id AND workflow_node_index = node_index AND status = 'PENDING'
          AND enqueued_at = horsies_parked_v1()
        ORDER BY workflow_item_index LIMIT count))
$$;

-- The tasks of a map's items; of an item that was run again only the last run counts.
CREATE FUNCTION horsies_items_v1(node horsies_workflow_tasks) RETURNS SETOF horsies_tasks LANGUAGE sql STABLE AS $$
    SELECT DISTINCT ON (workflow_item_index) * FROM horsies_tasks
    WHERE workflow_id = node.workflow_id AND workflow_node_index = node.task_index AND workflow_item_index IS NOT NULL
    ORDER BY workflow_item_index, id DESC
$$;

-- The list of the results of a map's items, in order.
CREATE FUNCTION horsies_item_results_v1(node horsies_workflow_tasks) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT '[' || string_agg(coalesce(item.result, '{"err":' || horsies_task_error_v1(
            coalesce(item.error_code, 'WORKER_CRASHED'), item.failed_reason) || '}'), ',' ORDER BY item.workflow_item_index) || ']'
    FROM horsies_items_v1(node) AS item
$$;

-- Which items failed, the first hundred of them.
CREATE FUNCTION horsies_failed_items_v1(node horsies_workflow_tasks) RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object('failed_items', json_agg(failed.workflow_item_index)) FROM (
        SELECT workflow_item_index FROM horsies_items_v1(node)
        WHERE status IN ('FAILED', 'CANCELLED', 'EXPIRED') ORDER BY workflow_item_index LIMIT 100) AS failed
$$;

-- Nodes whose expansion task ended well: its result is the run to start below them. Under a run that was paused
-- meanwhile it starts on hold, under one that has ended not at all.
CREATE FUNCTION horsies_start_children_v1(task_ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    expansion record;
    child_id uuid;
BEGIN
    FOR expansion IN
        SELECT node.workflow_id, node.task_index, task.id AS task_id, task.result, task.started_at, run.status
        FROM horsies_tasks AS task
        JOIN horsies_workflow_tasks AS node
            ON node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index
        JOIN horsies_workflows AS run ON run.id = node.workflow_id
        WHERE task.id = ANY(task_ids) AND task.status = 'COMPLETED' AND node.kind = 'workflow'
          AND node.status = 'ENQUEUED' AND node.task_id = task.id
    LOOP
        IF expansion.status IN ('RUNNING', 'PAUSED') THEN
            SELECT started.id::uuid INTO child_id
            FROM horsies_start_v1(json_build_array(expansion.result::json -> 'ok')) AS started;
            IF expansion.status = 'PAUSED' THEN
                PERFORM horsies_hold_runs_v1(ARRAY[child_id]);
            END IF;
            UPDATE horsies_workflow_tasks SET
                status = 'RUNNING', started_at = expansion.started_at, sub_workflow_id = child_id
            WHERE workflow_id = expansion.workflow_id AND task_index = expansion.task_index;
        ELSE
            UPDATE horsies_workflow_tasks SET status = 'SKIPPED', completed_at = clock_timestamp()
            WHERE workflow_id = expansion.workflow_id AND task_index = expansion.task_index;
        END IF;
        -- The plan lives on as rows; what the task leaves behind is where to find them.
        UPDATE horsies_tasks SET result = '{"ok":' || coalesce(to_json(child_id)::text, 'null') || '}'
        WHERE id = expansion.task_id;
    END LOOP;
END
$$;

-- These tasks of workflows have just ended; everything that follows from it.
CREATE FUNCTION horsies_advance_v1(task_ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ended_runs uuid[];
    ended_indexes integer[];
    map_runs uuid[];
    map_indexes integer[];
BEGIN
    PERFORM root.id FROM horsies_workflows AS root
    WHERE root.id = ANY(ARRAY(
        SELECT run.root_workflow_id FROM horsies_tasks AS task
        JOIN horsies_workflows AS run ON run.id = task.workflow_id WHERE task.id = ANY(task_ids)))
    ORDER BY root.id FOR NO KEY UPDATE;
    WITH ended AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE task.status WHEN 'COMPLETED' THEN 'COMPLETED' ELSE 'FAILED' END,
            completed_at = clock_timestamp(), started_at = task.started_at, result_task_id = task.id
        FROM horsies_tasks AS task
        WHERE task.id = ANY(task_ids) AND node.workflow_id = task.workflow_id
          AND node.task_index = task.workflow_node_index AND node.task_id = task.id AND node.status = 'ENQUEUED'
          AND NOT (node.kind = 'workflow' AND task.status = 'COMPLETED')
        RETURNING node.workflow_id, node.task_index)
    SELECT array_agg(workflow_id), array_agg(task_index) INTO ended_runs, ended_indexes FROM ended;
    IF cardinality(ended_runs) IS DISTINCT FROM cardinality(task_ids) THEN
        PERFORM horsies_start_children_v1(task_ids);
        SELECT items.runs, items.indexes INTO map_runs, map_indexes FROM horsies_end_items_v1(task_ids) AS items;
    END IF;
    PERFORM horsies_propagate_v1(ended_runs || map_runs, ended_indexes || map_indexes, true);
END
$$;

-- New runs with all their nodes and the tasks of their roots, in one statement for any number of them. A run whose
-- id or key is taken is not touched; what stands in its way is returned instead.
CREATE FUNCTION horsies_start_v1(runs json) RETURNS TABLE (id text, created boolean, name text, fingerprint text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    created_ids uuid[];
    ready_runs uuid[];
    ready_indexes integer[];
BEGIN
    WITH created AS (
        INSERT INTO horsies_workflows (
            id, name, on_error, output_task_index, success_policy, definition_key, fingerprint, workflow_key,
            parent_workflow_id, parent_task_index, depth, root_workflow_id, total_nodes, open_nodes, sent_at)
        SELECT run.id, run.name, run.on_error, run.output_index, nullif(run.success_policy, 'null'), run.definition_key,
            run.fingerprint, run.workflow_key, run.parent_workflow_id, run.parent_task_index, run.depth,
            run.root_workflow_id, json_array_length(run.nodes), json_array_length(run.nodes), run.sent_at
        FROM json_to_recordset(runs) AS run (
            id uuid, name text, on_error text, output_index integer, success_policy jsonb, definition_key text,
            fingerprint text, workflow_key text, parent_workflow_id uuid, parent_task_index integer, depth integer,
            root_workflow_id uuid, sent_at timestamptz, nodes json)
        ON CONFLICT DO NOTHING
        RETURNING id)
    SELECT array_agg(id) INTO created_ids FROM created;
    WITH inserted AS (
        INSERT INTO horsies_workflow_tasks (
            workflow_id, task_index, node_id, kind, status, dependencies, dependents, context_dependents, join_type,
            min_success, allow_failed_deps, pauses, deps_open, context_open, task_name, task_kwargs, queue_name,
            priority, task_options, max_retries, timeout_ms, good_until, expires_in_ms, inputs, delay_ms, not_before,
            signal_name, signal_timeout_ms, map_over, map_parameter, max_parallel, allow_failed_items,
            sub_definition_key, sub_workflow_name)
        SELECT run.id, node.task_index, node.node_id, node.kind,
            CASE WHEN cardinality(node.dependencies) = 0 THEN 'READY' ELSE 'PENDING' END,
            node.dependencies, node.dependents, node.context_dependents, node.join_type, node.min_success,
            node.allow_failed_deps, node.pauses, cardinality(node.dependencies),
            CASE WHEN node.inputs IS NULL THEN 0
                 ELSE (SELECT count(*) FROM json_object_keys(node.inputs::json -> 'context')) END,
            node.task_name, node.task_kwargs, node.queue_name, node.priority, node.task_options, node.max_retries,
            node.timeout_ms, node.good_until, node.expires_in_ms, node.inputs, node.delay_ms, node.not_before,
            node.signal_name, node.signal_timeout_ms, node.map_over, node.map_parameter, node.max_parallel,
            node.allow_failed_items, node.sub_definition_key, node.sub_workflow_name
        FROM json_to_recordset(runs) AS run (id uuid, nodes json),
            json_to_recordset(run.nodes) AS node (
                task_index integer, node_id text, kind text, dependencies integer[], dependents integer[],
                context_dependents integer[], join_type text, min_success integer, allow_failed_deps boolean,
                pauses boolean, task_name text, task_kwargs text, queue_name text, priority integer,
                task_options text, max_retries integer, timeout_ms integer, good_until timestamptz,
                expires_in_ms bigint, inputs text, delay_ms bigint, not_before timestamptz, signal_name text,
                signal_timeout_ms bigint, map_over integer, map_parameter text, max_parallel integer,
                allow_failed_items boolean, sub_definition_key text, sub_workflow_name text)
        WHERE run.id = ANY(created_ids)
        RETURNING workflow_id, task_index, status)
    SELECT array_agg(workflow_id ORDER BY workflow_id, task_index), array_agg(task_index ORDER BY workflow_id, task_index)
    INTO ready_runs, ready_indexes FROM inserted WHERE status = 'READY';
    IF ready_runs IS NOT NULL THEN
        PERFORM horsies_enqueue_nodes_v1(ready_runs, ready_indexes);
    END IF;
    RETURN QUERY
    SELECT coalesce(existing.id, sent.id)::text, sent.id = ANY(created_ids) IS TRUE, existing.name::text,
        existing.fingerprint::text
    FROM ROWS FROM (json_to_recordset(runs) AS (id uuid, workflow_key text)) WITH ORDINALITY
        AS sent (id, workflow_key, place)
    LEFT JOIN LATERAL (
        SELECT other.id, other.name, other.fingerprint FROM horsies_workflows AS other
        WHERE other.id = sent.id OR (other.workflow_key = sent.workflow_key
            AND other.status IN ('PENDING', 'RUNNING', 'PAUSED'))
        ORDER BY (other.id = sent.id) DESC LIMIT 1) AS existing ON true
    ORDER BY sent.place;
END
$$;

-- The result of a completed run: its output node's, or those of all nodes nobody depends on, by node id.
CREATE FUNCTION horsies_run_result_v1(run horsies_workflows) RETURNS text LANGUAGE sql STABLE AS $$
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
