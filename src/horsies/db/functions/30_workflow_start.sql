-- Starts of runs: a plan, which is the complete description of a graph, becomes rows.

-- Insert new runs with all their nodes, and the tasks of the nodes without dependencies, in two statements for any
-- number of runs. If an id or key is already in use, the stored run with that id or key is returned.
--
-- The plans of these statements are generic, because planning took 0.5 of the 1.9 ms for a start of five nodes. A plan
-- made on an empty table must never read a whole table later (see 20_claim.sql).
CREATE OR REPLACE FUNCTION horsies_start_v1(p_plans jsonb)
RETURNS TABLE (id text, created boolean, name text, fingerprint text) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    created_ids uuid[] := '{}';
BEGIN
    LOOP
        created_ids := created_ids || horsies_insert_runs(p_plans);
        IF cardinality(created_ids) = jsonb_array_length(p_plans) THEN
            RETURN QUERY
            SELECT (plan ->> 'id')::uuid::text, true, plan ->> 'name', plan ->> 'fingerprint'
            FROM jsonb_array_elements(p_plans) AS plan;
            RETURN;
        END IF;
        -- The run that held the key may have ended between the insert and this query. Then the key is free, so try
        -- again.
        EXIT WHEN NOT EXISTS (SELECT FROM horsies_find_runs(p_plans) AS run WHERE run.found_id IS NULL);
    END LOOP;
    RETURN QUERY
    SELECT coalesce(run.found_id, run.id)::text, run.id = ANY(created_ids), run.found_name,
        run.found_fingerprint
    FROM horsies_find_runs(p_plans) AS run ORDER BY run.place;
END
$$;

-- Insert the rows of these runs, except of those whose id or key is already in use. Runs are inserted in key order, so
-- that two concurrent statements cannot deadlock. Returns the ids of the inserted runs.
CREATE OR REPLACE FUNCTION horsies_insert_runs(p_plans jsonb) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    created_ids uuid[];
    ready horsies_workflow_tasks[];
BEGIN
    WITH created AS (
        INSERT INTO horsies_workflows (
            id, name, on_error, output_task_index, success_policy, definition_key, fingerprint, workflow_key,
            parent_workflow_id, parent_task_index, depth, root_workflow_id, total_nodes, open_nodes, sent_at,
            wakes_task_id)
        SELECT run.id, run.name, run.on_error, run.output_index, nullif(run.success_policy, 'null'),
            run.definition_key, run.fingerprint, run.workflow_key, run.parent_workflow_id,
            run.parent_task_index, run.depth, run.root_workflow_id, jsonb_array_length(run.nodes),
            jsonb_array_length(run.nodes), run.sent_at, run.wakes_task_id
        FROM jsonb_to_recordset(p_plans) AS run (
            id uuid, name text, on_error text, output_index integer, success_policy jsonb,
            definition_key text, fingerprint text, workflow_key text, parent_workflow_id uuid,
            parent_task_index integer, depth integer, root_workflow_id uuid, sent_at timestamptz,
            wakes_task_id uuid, nodes jsonb)
        ORDER BY run.workflow_key, run.id
        ON CONFLICT DO NOTHING
        RETURNING id),
    inserted AS (
        INSERT INTO horsies_workflow_tasks AS node (
            workflow_id, task_index, node_id, kind, status, task_id, enqueued_at, dependencies, dependents,
            context_dependents, join_type, min_success, allow_failed_deps, pauses, deps_open, context_open,
            task_name, task_kwargs, queue_name, priority, task_options, max_retries, timeout_ms, good_until,
            expires_in_ms, inputs, lane_key, delay_ms, not_before, signal_name, signal_timeout_ms, map_over,
            map_parameter, max_parallel, max_items, allow_failed_items, sub_definition_key, sub_workflow_name)
        SELECT run.id, sent.task_index, sent.node_id, sent.kind,
            horsies_next_status(sent.decision, sent.kind),
            CASE WHEN sent.decision = 'READY' AND sent.kind <> 'map' THEN horsies_new_id() END,
            CASE sent.decision WHEN 'READY' THEN clock_timestamp() END,
            sent.dependencies, sent.dependents, sent.context_dependents, sent.join_type, sent.min_success,
            sent.allow_failed_deps, sent.pauses, cardinality(sent.dependencies),
            CASE WHEN sent.inputs IS NULL THEN 0
                 ELSE (SELECT count(*) FROM json_object_keys(sent.inputs::json -> 'context')) END,
            sent.task_name, sent.task_kwargs, sent.queue_name, sent.priority, sent.task_options,
            sent.max_retries, sent.timeout_ms, sent.good_until, sent.expires_in_ms, sent.inputs,
            CASE WHEN sent.kind IN ('task', 'map') THEN coalesce(sent.lane_key, run.lane_key) END, sent.delay_ms, sent.not_before, sent.signal_name, sent.signal_timeout_ms, sent.map_over,
            sent.map_parameter, sent.max_parallel, sent.max_items, sent.allow_failed_items,
            sent.sub_definition_key, sent.sub_workflow_name
        FROM jsonb_to_recordset(p_plans) AS run (id uuid, nodes jsonb, lane_key text) CROSS JOIN LATERAL (
            SELECT *, CASE WHEN cardinality(node.dependencies) = 0 THEN 'READY' ELSE 'PENDING' END AS decision
            FROM jsonb_to_recordset(run.nodes) AS node (
                task_index integer, node_id text, kind text, dependencies integer[], dependents integer[],
                context_dependents integer[], join_type text, min_success integer, allow_failed_deps boolean,
                pauses boolean, task_name text, task_kwargs text, queue_name text, priority integer,
                task_options text, max_retries integer, timeout_ms integer, good_until timestamptz,
                expires_in_ms bigint, inputs text, lane_key text, delay_ms bigint, not_before timestamptz, signal_name text,
                signal_timeout_ms bigint, map_over integer, map_parameter text, max_parallel integer,
                max_items integer, allow_failed_items boolean, sub_definition_key text,
                sub_workflow_name text)) AS sent
        WHERE run.id IN (SELECT created.id FROM created)
        RETURNING node)
    SELECT ARRAY(SELECT created.id FROM created), ARRAY(
        SELECT inserted.node FROM inserted WHERE (inserted.node).status <> 'PENDING'
        ORDER BY (inserted.node).workflow_id, (inserted.node).task_index)
    INTO created_ids, ready;
    PERFORM horsies_enqueue_nodes(ready, false);  -- no signal can have come yet
    RETURN created_ids;
END
$$;

-- Return for each of these runs, in order, the stored run with the same id or the open run with the same key.
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

-- Start scheduled runs, given as one array per column, and store their schedule and slot in their rows. Their first
-- tasks wait for the rest of the delay, counted from the slot. Deadlines that are counted from the start move by the
-- same time; sleeps until a fixed time and signals without a time limit do not move. An existing run is not changed.
CREATE OR REPLACE FUNCTION horsies_start_scheduled_v1(
    p_ids uuid[], p_plans text[], p_names text[], p_slots timestamptz[], p_delay_seconds float8[])
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    created_ids uuid[];
BEGIN
    SELECT coalesce(array_agg(run.id::uuid), '{}') INTO created_ids
    FROM horsies_start_v1(('[' || array_to_string(p_plans, ',') || ']')::jsonb) AS run WHERE run.created;
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
