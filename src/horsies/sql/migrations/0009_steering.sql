-- Steering of workflows: pause, resume, cancel, expire, retry, signal, mend. Every one locks the root of the tree
-- first and then needs a fixed number of statements, whatever the number of nodes.

-- The root's lock, which all changes of a tree are made under. Returns whether there is such a run.
CREATE FUNCTION horsies_lock_tree_v1(run_id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM root.id FROM horsies_workflows AS root
    WHERE root.id = (SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = run_id)
    FOR NO KEY UPDATE;
    RETURN FOUND;
END
$$;

-- RUNNING -> PAUSED for a run and what runs below it. Returns the status it met, NULL when there is no such run.
CREATE FUNCTION horsies_pause_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status = 'RUNNING' THEN
        PERFORM horsies_hold_runs_v1(ARRAY(SELECT horsies_tree_v1(run_id)));
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> RUNNING for a run and what is paused below it: tasks are let go, what ended meanwhile counts now, and
-- a run in which nothing is left to do ends here. Returns the status it met.
CREATE FUNCTION horsies_resume_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
    resumed uuid[];
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status = 'PAUSED' THEN
        WITH changed AS (
            UPDATE horsies_workflows SET status = 'RUNNING', paused_at = NULL, updated_at = clock_timestamp()
            WHERE id = ANY(ARRAY(SELECT horsies_tree_v1(run_id))) AND status = 'PAUSED'
            RETURNING id)
        SELECT array_agg(id) INTO resumed FROM changed;
        UPDATE horsies_tasks SET held = false, updated_at = clock_timestamp()
        WHERE workflow_id = ANY(resumed) AND held AND status IN ('PENDING', 'RUNNING');
        PERFORM horsies_catch_up_v1(resumed);
    END IF;
    RETURN was_status;
END
$$;

-- Count every end that was not counted yet in these runs, and end the runs in which nothing is open.
CREATE FUNCTION horsies_catch_up_v1(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ended_runs uuid[];
    ended_indexes integer[];
BEGIN
    SELECT array_agg(workflow_id), array_agg(task_index) INTO ended_runs, ended_indexes
    FROM horsies_workflow_tasks
    WHERE workflow_id = ANY(runs) AND status IN ('COMPLETED', 'FAILED', 'SKIPPED') AND NOT propagated;
    PERFORM horsies_propagate_v1(ended_runs, ended_indexes, false);
    SELECT finished.runs, finished.indexes INTO ended_runs, ended_indexes FROM horsies_finish_runs_v1(runs) AS finished;
    PERFORM horsies_propagate_v1(ended_runs, ended_indexes, true);
END
$$;

-- Open -> CANCELLED or EXPIRED for these runs. Nodes that have not begun are skipped and their tasks cancelled; tasks
-- that run are left to end, or asked to stop with "interrupt". Their good_until passes now: what ends in a failure is
-- not tried again, what comes back unstarted expires. Returns how many runs it ended.
CREATE FUNCTION horsies_end_runs_v1(runs uuid[], new_status text, reason text, interrupt boolean) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ended uuid[];
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET
            status = new_status, error = reason, completed_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = ANY(runs) AND status IN ('PENDING', 'RUNNING', 'PAUSED')
        RETURNING id)
    SELECT array_agg(id) INTO ended FROM changed;
    IF ended IS NULL THEN
        RETURN 0;
    END IF;
    -- A task that is being started right now is locked by its worker: we wait, and meet it RUNNING.
    WITH waiting AS (
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.workflow_id = ANY(ended) AND task.status IN ('PENDING', 'CLAIMED') FOR UPDATE),
    skipped AS (
        UPDATE horsies_workflow_tasks AS node SET status = 'SKIPPED', completed_at = clock_timestamp()
        WHERE node.workflow_id = ANY(ended) AND (node.status IN ('PENDING', 'READY')
            OR (node.status = 'ENQUEUED' AND node.task_id IN (SELECT waiting.id FROM waiting))))
    UPDATE horsies_tasks AS task SET
        status = 'CANCELLED', cancel_requested_at = clock_timestamp(), failed_at = clock_timestamp(),
        error_code = 'TASK_CANCELLED', claimed = false, claim_expires_at = NULL, updated_at = clock_timestamp()
    FROM waiting WHERE task.id = waiting.id;
    UPDATE horsies_tasks AS task SET
        good_until = least(task.good_until, clock_timestamp()), held = false,
        cancel_requested_at = CASE WHEN interrupt THEN clock_timestamp() ELSE task.cancel_requested_at END,
        updated_at = clock_timestamp()
    WHERE task.workflow_id = ANY(ended) AND task.status = 'RUNNING';
    IF interrupt THEN
        PERFORM pg_notify('horsies_cancel', id::text) FROM horsies_tasks
        WHERE workflow_id = ANY(ended) AND status = 'RUNNING';
    END IF;
    RETURN cardinality(ended);
END
$$;

-- The nodes that stand for these ended runs in their parents end with them; where the parent goes on, so does its graph.
CREATE FUNCTION horsies_tell_parents_v1(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    ended_runs uuid[] := '{}';
    ended_indexes integer[] := '{}';
BEGIN
    FOR run IN
        SELECT * FROM horsies_workflows WHERE id = ANY(runs) AND parent_workflow_id IS NOT NULL ORDER BY depth DESC
    LOOP
        IF horsies_end_sub_node_v1(run) THEN
            ended_runs := ended_runs || run.parent_workflow_id;
            ended_indexes := ended_indexes || run.parent_task_index;
        END IF;
    END LOOP;
    PERFORM horsies_propagate_v1(ended_runs, ended_indexes, true);
END
$$;

-- Any open status -> CANCELLED, for a run and everything below it. Returns the status it met.
CREATE FUNCTION horsies_cancel_v1(run_id uuid, reason text, interrupt boolean) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
    tree uuid[];
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        tree := ARRAY(SELECT horsies_tree_v1(run_id));
        PERFORM horsies_end_runs_v1(tree, 'CANCELLED', reason, interrupt);
        PERFORM horsies_tell_parents_v1(tree);
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> EXPIRED when a run has been paused for longer than allowed. Each run below has an age of its own.
CREATE FUNCTION horsies_expire_v1(run_id uuid, max_paused_seconds double precision, reason text) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    expired boolean;
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status = 'PAUSED' AND paused_at < clock_timestamp() - max_paused_seconds * interval '1 second'
    INTO expired FROM horsies_workflows WHERE id = run_id;
    IF expired THEN
        PERFORM horsies_end_runs_v1(ARRAY[run_id], 'EXPIRED', reason, false);
        PERFORM horsies_tell_parents_v1(ARRAY[run_id]);
    END IF;
    RETURN coalesce(expired, false);
END
$$;

-- A value for a signal node: to the first that waits for this name, else kept for the first that will. Returns
-- 'delivered', 'stored', 'UNKNOWN_SIGNAL' when the run has no node of this name, or the terminal status of a run that
-- listens no more; NULL when there is no such run.
CREATE FUNCTION horsies_signal_v1(run_id uuid, signal text, signal_value text) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IS NULL OR was_status NOT IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        RETURN was_status;
    END IF;
    IF NOT EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.kind = 'signal' AND node.signal_name = signal)
    THEN
        RETURN 'UNKNOWN_SIGNAL';
    END IF;
    UPDATE horsies_tasks SET
        kwargs = '{"value":' || signal_value || '}', enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE status = 'PENDING' AND id = (
        SELECT task.id FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
        WHERE node.workflow_id = run_id AND node.kind = 'signal' AND node.signal_name = signal
          AND node.status = 'ENQUEUED' AND task.status = 'PENDING' AND task.kwargs = '{}'
        ORDER BY node.task_index LIMIT 1);
    IF FOUND THEN
        RETURN 'delivered';
    END IF;
    INSERT INTO horsies_workflow_signals (workflow_id, name, value) VALUES (run_id, signal, signal_value);
    RETURN 'stored';
END
$$;

-- All counters of these runs from the statuses of their nodes: the one definition of what they mean. Nodes that
-- wait are decided anew.
CREATE FUNCTION horsies_recount_v1(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    decided_runs uuid[];
    decided_indexes integer[];
BEGIN
    UPDATE horsies_workflows AS run SET open_nodes = nodes.open, failed_nodes = nodes.failed
    FROM (SELECT workflow_id, count(*) FILTER (WHERE NOT propagated) AS open,
              count(*) FILTER (WHERE status = 'FAILED' AND propagated) AS failed
          FROM horsies_workflow_tasks WHERE workflow_id = ANY(runs) GROUP BY workflow_id) AS nodes
    WHERE run.id = nodes.workflow_id AND (run.open_nodes, run.failed_nodes) IS DISTINCT FROM (nodes.open, nodes.failed);
    WITH counts AS (
        SELECT node.workflow_id, node.task_index,
            count(*) FILTER (WHERE NOT dependency.propagated) AS open,
            count(*) FILTER (WHERE dependency.propagated AND dependency.status = 'COMPLETED') AS ok,
            count(*) FILTER (WHERE dependency.propagated AND dependency.status <> 'COMPLETED') AS bad,
            count(*) FILTER (WHERE NOT dependency.propagated AND node.task_index = ANY(dependency.context_dependents)) AS unseen
        FROM horsies_workflow_tasks AS node
        JOIN horsies_workflow_tasks AS dependency
            ON dependency.workflow_id = node.workflow_id AND dependency.task_index = ANY(node.dependencies)
        WHERE node.workflow_id = ANY(runs) AND node.status = 'PENDING'
        GROUP BY node.workflow_id, node.task_index)
    UPDATE horsies_workflow_tasks AS node SET
        deps_open = counts.open, deps_ok = counts.ok, deps_bad = counts.bad, context_open = counts.unseen
    FROM counts WHERE node.workflow_id = counts.workflow_id AND node.task_index = counts.task_index;
    WITH decided AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = horsies_join_v1(node.status, node.join_type, node.min_success, node.allow_failed_deps,
                node.deps_open, node.deps_ok, node.deps_bad, node.context_open)
        FROM horsies_workflows AS run
        WHERE node.workflow_id = ANY(runs) AND run.id = node.workflow_id AND run.status = 'RUNNING'
          AND node.status = 'PENDING' AND horsies_join_v1(node.status, node.join_type, node.min_success,
              node.allow_failed_deps, node.deps_open, node.deps_ok, node.deps_bad, node.context_open) <> 'PENDING'
        RETURNING node.workflow_id, node.task_index)
    SELECT array_agg(workflow_id), array_agg(task_index) INTO decided_runs, decided_indexes FROM decided;
    IF decided_runs IS NOT NULL THEN
        UPDATE horsies_workflow_tasks AS node SET completed_at = clock_timestamp()
        FROM unnest(decided_runs, decided_indexes) AS chosen (workflow_id, task_index)
        WHERE node.workflow_id = chosen.workflow_id AND node.task_index = chosen.task_index AND node.status = 'SKIPPED';
        PERFORM horsies_enqueue_nodes_v1(decided_runs, decided_indexes);
    END IF;
END
$$;

-- FAILED or PAUSED -> RUNNING with failed nodes tried again, all of them or the named ones: what was skipped because
-- of them waits again, what succeeded stays. A failed sub-workflow is itself tried again from its failures. Returns
-- 'retried', or the status that does not allow it, 'NO_FAILED_NODE', 'PARENT_ENDED'; NULL when there is no such run.
CREATE FUNCTION horsies_retry_v1(run_id uuid, node_ids text[]) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    child uuid;
    failed integer[];
    reset integer[];
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT * INTO run FROM horsies_workflows WHERE id = run_id;
    IF NOT FOUND OR run.status NOT IN ('FAILED', 'PAUSED', 'RUNNING') THEN
        RETURN run.status;
    END IF;
    IF run.status = 'FAILED' AND run.parent_workflow_id IS NOT NULL AND EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run.parent_workflow_id AND node.task_index = run.parent_task_index
          AND node.status <> 'RUNNING')
    THEN
        RETURN 'PARENT_ENDED';
    END IF;
    failed := ARRAY(
        SELECT node.task_index FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.status = 'FAILED'
          AND (node_ids IS NULL OR node.node_id = ANY(node_ids)));
    IF cardinality(failed) = 0 THEN
        RETURN 'NO_FAILED_NODE';
    END IF;
    WITH RECURSIVE below AS (
        SELECT node.task_index, node.dependents FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = ANY(failed)
        UNION
        SELECT node.task_index, node.dependents FROM horsies_workflow_tasks AS node
        JOIN below ON node.task_index = ANY(below.dependents)
        WHERE node.workflow_id = run_id AND node.status = 'SKIPPED')
    SELECT array_agg(DISTINCT below.task_index) INTO reset FROM below WHERE NOT below.task_index = ANY(failed);
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE WHEN node.task_index = ANY(failed) THEN 'READY' ELSE 'PENDING' END, propagated = false,
        result = NULL, result_task_id = NULL, task_id = NULL, sub_workflow_summary = NULL, started_at = NULL,
        completed_at = NULL, enqueued_at = NULL
    WHERE node.workflow_id = run_id AND (node.task_index = ANY(failed) OR node.task_index = ANY(reset));
    UPDATE horsies_workflows SET
        status = CASE status WHEN 'FAILED' THEN 'RUNNING' ELSE status END, error = NULL, completed_at = NULL,
        matched_case = NULL, updated_at = clock_timestamp()
    WHERE id = run_id;
    PERFORM horsies_retry_parts_v1(run_id, failed);
    PERFORM horsies_enqueue_nodes_v1(array_fill(run_id, ARRAY[cardinality(failed)]), failed);
    PERFORM horsies_recount_v1(ARRAY[run_id]);
    IF run.status = 'PAUSED' THEN
        PERFORM horsies_resume_v1(run_id);
        PERFORM horsies_recount_v1(ARRAY[run_id]);
    END IF;
    PERFORM horsies_catch_up_v1(ARRAY[run_id]);
    RETURN 'retried';
END
$$;

-- PAUSED or FAILED -> RUNNING with every failure tried again, in the run and in what is paused below it. Returns
-- 'resumed', or the status of a run that this does not move; NULL when there is no such run.
CREATE FUNCTION horsies_resume_retrying_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
    below uuid;
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IS NULL OR was_status NOT IN ('PAUSED', 'FAILED') THEN
        RETURN was_status;
    END IF;
    FOR below IN
        SELECT run.id FROM horsies_workflows AS run
        WHERE run.id = ANY(ARRAY(SELECT horsies_tree_v1(run_id))) AND run.id <> run_id AND run.status = 'PAUSED'
        ORDER BY run.depth DESC
    LOOP
        PERFORM horsies_retry_v1(below, NULL);
    END LOOP;
    IF horsies_retry_v1(run_id, NULL) = 'retried' THEN
        RETURN 'resumed';
    END IF;
    RETURN CASE WHEN horsies_resume_v1(run_id) = 'PAUSED' THEN 'resumed' ELSE was_status END;
END
$$;

-- Failed nodes that are more than one task are tried again in part: a map runs its failed items again, a sub-workflow
-- that failed its failed nodes. Both are RUNNING at once; all others of these nodes stay READY.
CREATE FUNCTION horsies_retry_parts_v1(run_id uuid, indexes integer[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    node horsies_workflow_tasks;
    child uuid;
    again integer;
BEGIN
    FOR node IN
        SELECT * FROM horsies_workflow_tasks
        WHERE workflow_id = run_id AND task_index = ANY(indexes) AND kind = 'map' AND items_total > 0
    LOOP
        INSERT INTO horsies_tasks (
            id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
            task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_item_index,
            workflow_inputs, retried_from_task_id)
        SELECT horsies_new_id_v1(), task_name, queue_name, priority, args, kwargs, clock_timestamp(),
            CASE WHEN row_number() OVER (ORDER BY workflow_item_index) <= coalesce(node.max_parallel, node.items_total)
                THEN clock_timestamp() ELSE horsies_parked_v1() END,
            least(node.good_until, clock_timestamp() + node.expires_in_ms * interval '1 millisecond'), max_retries,
            task_options, timeout_ms, '', workflow_id, workflow_node_index, workflow_item_index, workflow_inputs, id
        FROM horsies_items_v1(node) WHERE status <> 'COMPLETED';
        GET DIAGNOSTICS again = ROW_COUNT;
        UPDATE horsies_workflow_tasks SET
            status = 'RUNNING', enqueued_at = clock_timestamp(), started_at = clock_timestamp(), items_open = again,
            items_bad = 0
        WHERE workflow_id = run_id AND task_index = node.task_index;
    END LOOP;
    FOR child IN
        UPDATE horsies_workflow_tasks AS node SET
            status = 'RUNNING', enqueued_at = clock_timestamp(), started_at = clock_timestamp()
        FROM horsies_workflows AS sub
        WHERE node.workflow_id = run_id AND node.task_index = ANY(indexes) AND sub.id = node.sub_workflow_id
          AND sub.status = 'FAILED'
        RETURNING sub.id
    LOOP
        PERFORM horsies_retry_v1(child, NULL);
    END LOOP;
END
$$;

-- What does not add up in an open run, one sentence each; nothing does so on its own.
CREATE FUNCTION horsies_problems_v1(run_id uuid) RETURNS SETOF text LANGUAGE sql STABLE AS $$
    WITH run AS (SELECT * FROM horsies_workflows WHERE id = run_id AND status IN ('RUNNING', 'PAUSED')),
    node AS (SELECT node.* FROM horsies_workflow_tasks AS node JOIN run ON run.id = node.workflow_id),
    task AS (SELECT task.* FROM horsies_tasks AS task JOIN run ON run.id = task.workflow_id)
    SELECT 'node ' || node.node_id || ' waits for a task that is no longer stored'
    FROM node WHERE node.status = 'ENQUEUED' AND NOT EXISTS (SELECT FROM task WHERE task.id = node.task_id)
    UNION ALL
    SELECT 'node ' || node.node_id || ' is open although its task ended as ' || task.status
    FROM node JOIN task ON task.id = node.task_id
    WHERE node.status = 'ENQUEUED' AND task.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
    UNION ALL
    SELECT 'node ' || node.node_id || ' is ready but has no task' FROM node WHERE node.status = 'READY'
    UNION ALL
    SELECT 'node ' || node.node_id || ' runs a sub-workflow that '
        || CASE WHEN child.id IS NULL THEN 'is no longer stored' ELSE 'ended as ' || child.status END
    FROM node LEFT JOIN horsies_workflows AS child ON child.id = node.sub_workflow_id
    WHERE node.kind = 'workflow' AND node.status = 'RUNNING'
      AND (child.id IS NULL OR child.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))
    UNION ALL
    SELECT 'map node ' || map.node_id || ' counts ' || map.items_open || ' open items, there are ' || items.open
    FROM run JOIN horsies_workflow_tasks AS map ON map.workflow_id = run.id CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE item.status IN ('PENDING', 'CLAIMED', 'RUNNING')) AS open
        FROM horsies_items_v1(map) AS item) AS items
    WHERE map.kind = 'map' AND map.status = 'RUNNING' AND items.open <> map.items_open
    UNION ALL
    SELECT 'the end of node ' || node.node_id || ' was never counted'
    FROM node JOIN run ON run.status = 'RUNNING'
    WHERE node.status IN ('COMPLETED', 'FAILED', 'SKIPPED') AND NOT node.propagated
    UNION ALL
    SELECT 'the run counts ' || run.open_nodes || ' open nodes, there are ' || nodes.open
    FROM run CROSS JOIN LATERAL (SELECT count(*) AS open FROM node WHERE NOT node.propagated) AS nodes
    WHERE nodes.open <> run.open_nodes OR (run.status = 'RUNNING' AND nodes.open = 0)
    UNION ALL
    SELECT 'node ' || node.node_id || ' waits although its dependencies are decided'
    FROM node JOIN run ON run.status = 'RUNNING' CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE NOT other.propagated) AS open,
            count(*) FILTER (WHERE other.propagated AND other.status = 'COMPLETED') AS ok,
            count(*) FILTER (WHERE other.propagated AND other.status <> 'COMPLETED') AS bad,
            count(*) FILTER (WHERE NOT other.propagated AND node.task_index = ANY(other.context_dependents)) AS unseen
        FROM node AS other WHERE other.task_index = ANY(node.dependencies)) AS counts
    WHERE node.status = 'PENDING' AND horsies_join_v1(node.status, node.join_type, node.min_success,
        node.allow_failed_deps, counts.open, counts.ok, counts.bad, counts.unseen) <> 'PENDING'
    UNION ALL
    SELECT 'task ' || task.id || CASE run.status WHEN 'PAUSED' THEN ' is not on hold' ELSE ' is on hold' END
        || ' although the run is ' || run.status
    FROM task CROSS JOIN run WHERE task.status = 'PENDING' AND task.held <> (run.status = 'PAUSED')
$$;

-- Put an open run right again, as far as its rows tell what is right. Harmless on one that is.
CREATE FUNCTION horsies_mend_v1(run_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    is_paused boolean;
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT status = 'PAUSED' INTO is_paused FROM horsies_workflows
    WHERE id = run_id AND status IN ('RUNNING', 'PAUSED');
    IF is_paused IS NULL THEN
        RETURN;
    END IF;
    UPDATE horsies_tasks SET held = is_paused, updated_at = clock_timestamp()
    WHERE workflow_id = run_id AND status = 'PENDING' AND held <> is_paused;
    UPDATE horsies_workflow_tasks AS node SET status = 'READY'
    WHERE node.workflow_id = run_id AND node.status = 'ENQUEUED'
      AND NOT EXISTS (SELECT FROM horsies_tasks AS task WHERE task.id = node.task_id);
    UPDATE horsies_workflow_tasks AS node SET status = 'READY', sub_workflow_id = NULL
    WHERE node.workflow_id = run_id AND node.kind = 'workflow' AND node.status = 'RUNNING'
      AND NOT EXISTS (SELECT FROM horsies_workflows AS child WHERE child.id = node.sub_workflow_id);
    UPDATE horsies_workflow_tasks AS node SET items_open = items.total, items_bad = 0
    FROM (SELECT workflow_node_index, count(DISTINCT workflow_item_index) AS total FROM horsies_tasks
          WHERE workflow_id = run_id AND workflow_item_index IS NOT NULL GROUP BY 1) AS items
    WHERE node.workflow_id = run_id AND node.kind = 'map' AND node.status = 'RUNNING'
      AND node.task_index = items.workflow_node_index;
    PERFORM horsies_advance_v1(ARRAY(
        SELECT task.id FROM horsies_workflow_tasks AS node
        JOIN horsies_tasks AS task ON task.workflow_id = node.workflow_id AND task.workflow_node_index = node.task_index
        WHERE node.workflow_id = run_id AND task.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
          AND ((node.status = 'ENQUEUED' AND node.task_id = task.id)
               OR (node.status = 'RUNNING' AND task.workflow_item_index IS NOT NULL
                   AND NOT EXISTS (SELECT FROM horsies_tasks AS later
                       WHERE later.workflow_id = run_id AND later.workflow_node_index = node.task_index
                         AND later.workflow_item_index = task.workflow_item_index AND later.id > task.id)))));
    PERFORM horsies_tell_parents_v1(ARRAY(
        SELECT id FROM horsies_workflows
        WHERE parent_workflow_id = run_id AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')));
    IF NOT is_paused THEN
        PERFORM horsies_enqueue_nodes_v1(array_agg(workflow_id), array_agg(task_index)) FROM horsies_workflow_tasks
        WHERE workflow_id = run_id AND status = 'READY' HAVING count(*) > 0;
        PERFORM horsies_recount_v1(ARRAY[run_id]);
        PERFORM horsies_catch_up_v1(ARRAY[run_id]);
    END IF;
END
$$;
