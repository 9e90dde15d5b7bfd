-- Starts: a plan, the complete description of a graph, becomes rows.

-- New runs with all their nodes and the tasks of the nodes without dependencies, in a handful of statements
-- for any number of runs. Where an id or key is taken, the stored run that has it is returned.
CREATE OR REPLACE FUNCTION horsies_start_v1(p_plans json)
RETURNS TABLE (id text, created boolean, name text, fingerprint text) LANGUAGE plpgsql AS $$
DECLARE
    plans jsonb := p_plans;  -- parsed once; plain JSON would be parsed again at every access
    created_ids uuid[] := '{}';
    ready horsies_nodes;
BEGIN
    LOOP
        created_ids := created_ids || horsies_insert_runs(plans);
        EXIT WHEN cardinality(created_ids) = jsonb_array_length(plans);
        -- A run that held the key may have ended between the insert and this query: then the key is free.
        EXIT WHEN NOT EXISTS (SELECT FROM horsies_find_runs(plans) AS run WHERE run.found_id IS NULL);
    END LOOP;
    WITH inserted AS (
        INSERT INTO horsies_workflow_tasks (
            workflow_id, task_index, node_id, kind, status, task_id, enqueued_at, dependencies, dependents,
            context_dependents, join_type, min_success, allow_failed_deps, pauses, deps_open, context_open,
            task_name, task_kwargs, queue_name, priority, task_options, max_retries, timeout_ms, good_until,
            expires_in_ms, inputs, delay_ms, not_before, signal_name, signal_timeout_ms, map_over,
            map_parameter, max_parallel, max_items, allow_failed_items, sub_definition_key, sub_workflow_name)
        SELECT run.id, node.task_index, node.node_id, node.kind,
            horsies_next_status(node.decision, node.kind),
            CASE WHEN node.decision = 'READY' AND node.kind <> 'map' THEN horsies_new_id() END,
            CASE node.decision WHEN 'READY' THEN clock_timestamp() END,
            node.dependencies, node.dependents, node.context_dependents, node.join_type, node.min_success,
            node.allow_failed_deps, node.pauses, cardinality(node.dependencies),
            CASE WHEN node.inputs IS NULL THEN 0
                 ELSE (SELECT count(*) FROM json_object_keys(node.inputs::json -> 'context')) END,
            node.task_name, node.task_kwargs, node.queue_name, node.priority, node.task_options,
            node.max_retries, node.timeout_ms, node.good_until, node.expires_in_ms, node.inputs,
            node.delay_ms, node.not_before, node.signal_name, node.signal_timeout_ms, node.map_over,
            node.map_parameter, node.max_parallel, node.max_items, node.allow_failed_items,
            node.sub_definition_key, node.sub_workflow_name
        FROM jsonb_to_recordset(plans) AS run (id uuid, nodes jsonb) CROSS JOIN LATERAL (
            SELECT *, CASE WHEN cardinality(sent.dependencies) = 0 THEN 'READY' ELSE 'PENDING' END AS decision
            FROM jsonb_to_recordset(run.nodes) AS sent (
                task_index integer, node_id text, kind text, dependencies integer[], dependents integer[],
                context_dependents integer[], join_type text, min_success integer, allow_failed_deps boolean,
                pauses boolean, task_name text, task_kwargs text, queue_name text, priority integer,
                task_options text, max_retries integer, timeout_ms integer, good_until timestamptz,
                expires_in_ms bigint, inputs text, delay_ms bigint, not_before timestamptz, signal_name text,
                signal_timeout_ms bigint, map_over integer, map_parameter text, max_parallel integer,
                max_items integer, allow_failed_items boolean, sub_definition_key text,
                sub_workflow_name text)) AS node
        WHERE run.id = ANY(created_ids)
        RETURNING workflow_id, task_index, status)
    SELECT array_agg(workflow_id ORDER BY workflow_id, task_index),
        array_agg(task_index ORDER BY workflow_id, task_index)
    INTO ready.runs, ready.indexes FROM inserted WHERE status <> 'PENDING';
    PERFORM horsies_enqueue_nodes(ready);
    RETURN QUERY
    SELECT coalesce(run.found_id, run.id)::text, run.id = ANY(created_ids), run.found_name,
        run.found_fingerprint
    FROM horsies_find_runs(plans) AS run ORDER BY run.place;
END
$$;

-- The rows of these runs, where neither id nor key is taken. They are inserted in the order of their keys, so
-- that two such statements cannot deadlock.
CREATE OR REPLACE FUNCTION horsies_insert_runs(p_plans jsonb) RETURNS uuid[] LANGUAGE sql AS $$
    WITH created AS (
        INSERT INTO horsies_workflows (
            id, name, on_error, output_task_index, success_policy, definition_key, fingerprint, workflow_key,
            parent_workflow_id, parent_task_index, depth, root_workflow_id, total_nodes, open_nodes, sent_at)
        SELECT run.id, run.name, run.on_error, run.output_index, nullif(run.success_policy, 'null'),
            run.definition_key, run.fingerprint, run.workflow_key, run.parent_workflow_id,
            run.parent_task_index, run.depth, run.root_workflow_id, jsonb_array_length(run.nodes),
            jsonb_array_length(run.nodes), run.sent_at
        FROM jsonb_to_recordset(p_plans) AS run (
            id uuid, name text, on_error text, output_index integer, success_policy jsonb,
            definition_key text, fingerprint text, workflow_key text, parent_workflow_id uuid,
            parent_task_index integer, depth integer, root_workflow_id uuid, sent_at timestamptz, nodes jsonb)
        ORDER BY run.workflow_key, run.id
        ON CONFLICT DO NOTHING
        RETURNING id)
    SELECT coalesce(array_agg(id), '{}') FROM created
$$;

-- For each of these runs, in their order, the stored run that has its id, or the open one that has its key.
CREATE OR REPLACE FUNCTION horsies_find_runs(p_plans jsonb)
RETURNS TABLE (place bigint, id uuid, found_id uuid, found_name text, found_fingerprint text)
LANGUAGE sql STABLE AS $$
    SELECT run.place, run.id, existing.id, existing.name, existing.fingerprint
    FROM ROWS FROM (jsonb_to_recordset(p_plans) AS (id uuid, workflow_key text)) WITH ORDINALITY
        AS run (id, workflow_key, place)
    LEFT JOIN LATERAL (
        SELECT other.id, other.name, other.fingerprint, 1 AS rank FROM horsies_workflows AS other
        WHERE other.id = run.id
        UNION ALL
        SELECT other.id, other.name, other.fingerprint, 2 FROM horsies_workflows AS other
        WHERE other.workflow_key = run.workflow_key AND other.status IN ('PENDING', 'RUNNING', 'PAUSED')
        ORDER BY rank LIMIT 1) AS existing ON true
$$;

-- Runs of schedules, one array per column: started like any others, then marked with their schedule and slot.
-- Their first tasks wait for the rest of the delay, counted from the slot, and deadlines counted from the
-- start move with it; sleeps until a given time and signals without a time limit do not. An existing run
-- stays as it is.
CREATE OR REPLACE FUNCTION horsies_start_scheduled_v1(
    p_ids uuid[], p_plans text[], p_names text[], p_slots timestamptz[], p_delay_seconds float8[])
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    created_ids uuid[];
BEGIN
    SELECT coalesce(array_agg(run.id::uuid), '{}') INTO created_ids
    FROM horsies_start_v1(('[' || array_to_string(p_plans, ',') || ']')::json) AS run WHERE run.created;
    UPDATE horsies_workflows AS run SET
        schedule_name = p_names[array_position(p_ids, run.id)],
        scheduled_for = p_slots[array_position(p_ids, run.id)]
    WHERE run.id = ANY(created_ids);
    IF 0 < ANY(p_delay_seconds) THEN
        UPDATE horsies_tasks AS task SET
            enqueued_at = task.enqueued_at + sent.wait,
            good_until = least(node.good_until, task.good_until + sent.wait)
        FROM (
            SELECT id, slot + delay * interval '1 second' - now() AS wait
            FROM unnest(p_ids, p_slots, p_delay_seconds) AS sent (id, slot, delay)) AS sent
        JOIN horsies_workflow_tasks AS node ON node.workflow_id = sent.id
        WHERE sent.wait > interval '0' AND sent.id = ANY(created_ids) AND task.id = node.task_id
          AND node.not_before IS NULL AND task.enqueued_at < horsies_never_v1();
    END IF;
    RETURN cardinality(created_ids);
END
$$;
