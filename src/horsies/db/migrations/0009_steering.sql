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
            WHERE id = ANY(ARRAY(SELECT horsies_tree_v1(run_id))) AND coalesce(status, '') = 'PAUSED'
            RETURNING id)
        SELECT array_agg(id) INTO resumed FROM changed;
        UPDATE horsies_tasks SET held = false, updated_at = clock_timestamp()
        WHERE workflow_id = ANY(resumed) AND held AND status IN ('PENDING', 'RUNNING');
        PERFORM horsies_catch_up_v1(resumed);
    END IF;
    RETURN was_status;
END
$$;

-- Bring these runs, where they are RUNNING, up to what their rows say: ends that were not counted count, without
-- pausing again; nodes whose counters have decided are decided, ready ones become tasks, and runs in which nothing is
-- open end.
CREATE FUNCTION horsies_catch_up_v1(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ended horsies_nodes_v1;
BEGIN
    SELECT array_agg(workflow_id), array_agg(task_index) INTO ended.runs, ended.indexes
    FROM horsies_workflow_tasks
    WHERE workflow_id = ANY(runs) AND status IN ('COMPLETED', 'FAILED', 'SKIPPED') AND NOT propagated;
    PERFORM horsies_propagate_v1(ended, false);
    PERFORM horsies_propagate_v1(horsies_decide_nodes_v1(runs), true);
    PERFORM horsies_propagate_v1(horsies_finish_runs_v1(runs), true);
END
$$;

-- Nodes of these runs that wait although their counters have decided, and READY ones without a task. Returns those
-- that ended: skipped, or maps with nothing to do.
CREATE FUNCTION horsies_decide_nodes_v1(runs uuid[]) RETURNS horsies_nodes_v1 LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ready horsies_nodes_v1;
    ended horsies_nodes_v1;
BEGIN
    WITH waiting AS MATERIALIZED (
        SELECT node.workflow_id, node.task_index, node.kind, CASE node.status WHEN 'READY' THEN 'READY'
            ELSE horsies_join_v1(node.join_type, node.min_success, node.allow_failed_deps, node.deps_open,
                node.deps_ok, node.deps_bad, node.context_open) END AS decision
        FROM horsies_workflows AS run JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id
        WHERE run.id = ANY(runs) AND coalesce(run.status, '') = 'RUNNING' AND node.status IN ('PENDING', 'READY')),
    decided AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = horsies_next_status_v1(waiting.decision, waiting.kind),
            task_id = CASE WHEN waiting.decision = 'READY' AND waiting.kind <> 'map' THEN horsies_new_id_v1() END,
            enqueued_at = CASE waiting.decision WHEN 'READY' THEN clock_timestamp() END,
            completed_at = CASE waiting.decision WHEN 'SKIPPED' THEN clock_timestamp() END
        FROM waiting
        WHERE node.workflow_id = waiting.workflow_id AND node.task_index = waiting.task_index
          AND waiting.decision <> 'PENDING'
        RETURNING node.workflow_id, node.task_index, waiting.decision)
    SELECT array_agg(workflow_id) FILTER (WHERE decision = 'READY'), array_agg(task_index) FILTER (WHERE decision = 'READY'),
        array_agg(workflow_id) FILTER (WHERE decision = 'SKIPPED'),
        array_agg(task_index) FILTER (WHERE decision = 'SKIPPED')
    INTO ready.runs, ready.indexes, ended.runs, ended.indexes FROM decided;
    ready := horsies_enqueue_nodes_v1(ready);
    ended.runs := ended.runs || ready.runs;
    ended.indexes := ended.indexes || ready.indexes;
    RETURN ended;
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
        WHERE id = ANY(runs) AND coalesce(status, '') IN ('PENDING', 'RUNNING', 'PAUSED')
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
    WHERE task.workflow_id = ANY(ended) AND coalesce(task.status, '') = 'RUNNING';
    IF interrupt THEN
        PERFORM pg_notify('horsies_cancel', id::text) FROM horsies_tasks
        WHERE workflow_id = ANY(ended) AND coalesce(status, '') = 'RUNNING';
    END IF;
    RETURN cardinality(ended);
END
$$;

-- The nodes that stand for these ended runs in their parents end with them; where the parent goes on, so does its graph.
CREATE FUNCTION horsies_tell_parents_v1(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    ended horsies_nodes_v1;
BEGIN
    FOR run IN
        SELECT * FROM horsies_workflows WHERE id = ANY(runs) AND parent_workflow_id IS NOT NULL ORDER BY depth DESC
    LOOP
        IF horsies_end_sub_node_v1(run) THEN
            ended.runs := ended.runs || run.parent_workflow_id;
            ended.indexes := ended.indexes || run.parent_task_index;
        END IF;
    END LOOP;
    PERFORM horsies_propagate_v1(ended, true);
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
    -- Locked as it is chosen: one that a worker takes at this moment, because its time is up, is passed over.
    UPDATE horsies_tasks SET
        kwargs = '{"value":' || signal_value || '}', enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = (
        SELECT task.id FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
        WHERE node.workflow_id = run_id AND node.kind = 'signal' AND node.signal_name = signal
          AND node.status = 'ENQUEUED' AND task.status = 'PENDING' AND task.kwargs = '{}'
        ORDER BY node.task_index LIMIT 1 FOR UPDATE OF task);
    IF FOUND THEN
        RETURN 'delivered';
    END IF;
    INSERT INTO horsies_workflow_signals (workflow_id, name, value) VALUES (run_id, signal, signal_value);
    RETURN 'stored';
END
$$;

-- FAILED or PAUSED -> RUNNING with failed nodes tried again, all of them or the named ones: what was skipped because
-- of them waits again, what succeeded stays. A failed sub-workflow is itself tried again from its failures. Returns
-- 'retried', or the status that does not allow it, 'NO_FAILED_NODE', 'PARENT_ENDED', 'KEY_TAKEN'; NULL when there is
-- no such run.
CREATE FUNCTION horsies_retry_v1(run_id uuid, node_ids text[]) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    failed integer[];
BEGIN
    PERFORM horsies_lock_tree_v1(run_id);
    SELECT * INTO run FROM horsies_workflows WHERE id = run_id;
    IF NOT FOUND OR run.status NOT IN ('FAILED', 'PAUSED', 'RUNNING') THEN
        RETURN run.status;
    END IF;
    IF run.status = 'FAILED' AND run.parent_workflow_id IS NOT NULL AND EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run.parent_workflow_id AND node.task_index = run.parent_task_index
          AND (node.status <> 'RUNNING' OR node.sub_workflow_id <> run_id))
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
    IF NOT horsies_reopen_v1(run_id) THEN
        RETURN 'KEY_TAKEN';
    END IF;
    PERFORM horsies_reset_nodes_v1(run_id, failed);
    PERFORM horsies_recount_v1(ARRAY[run_id]);
    IF run.status = 'PAUSED' THEN
        PERFORM horsies_resume_v1(run_id);
    END IF;
    PERFORM horsies_retry_parts_v1(run_id, failed);
    PERFORM horsies_catch_up_v1(ARRAY[run_id]);
    RETURN 'retried';
END
$$;

-- FAILED -> RUNNING, and no error any more. Returns false when another run has taken its key meanwhile.
CREATE FUNCTION horsies_reopen_v1(run_id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE horsies_workflows SET
        status = CASE status WHEN 'FAILED' THEN 'RUNNING' ELSE status END, error = NULL, completed_at = NULL,
        matched_case = NULL, updated_at = clock_timestamp()
    WHERE id = run_id;
    RETURN true;
EXCEPTION WHEN unique_violation THEN
    RETURN false;
END
$$;

-- Failed nodes are READY again, or RUNNING where only a part of them will be tried again, and what was skipped below
-- them waits again; a skipped node that another failure stops is skipped once more when its counters are looked at.
CREATE FUNCTION horsies_reset_nodes_v1(run_id uuid, failed integer[]) RETURNS void LANGUAGE sql AS $$
    WITH RECURSIVE below AS (
        SELECT node.task_index, node.dependents FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.task_index = ANY(failed)
        UNION
        SELECT node.task_index, node.dependents FROM below
        CROSS JOIN LATERAL unnest(below.dependents) AS dependent (task_index)
        JOIN horsies_workflow_tasks AS node ON node.workflow_id = run_id AND node.task_index = dependent.task_index
        WHERE node.status = 'SKIPPED')
    UPDATE horsies_workflow_tasks AS node SET
        status = CASE
            WHEN NOT node.task_index = ANY(failed) THEN 'PENDING'
            WHEN node.items_total > 0 OR EXISTS (SELECT FROM horsies_workflows AS child
                WHERE child.id = node.sub_workflow_id AND child.status = 'FAILED') THEN 'RUNNING'
            ELSE 'READY' END,
        propagated = false, result = NULL, result_task_id = NULL, task_id = NULL, sub_workflow_summary = NULL,
        started_at = NULL, completed_at = NULL, enqueued_at = NULL
    WHERE node.workflow_id = run_id AND node.task_index = ANY(ARRAY(SELECT below.task_index FROM below))
$$;

-- Of these nodes those that are more than one task: a map runs its failed items again, a sub-workflow its failed
-- nodes, on hold if the run was paused once more meanwhile.
CREATE FUNCTION horsies_retry_parts_v1(run_id uuid, indexes integer[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    node horsies_workflow_tasks;
BEGIN
    FOR node IN
        SELECT * FROM horsies_workflow_tasks
        WHERE workflow_id = run_id AND task_index = ANY(indexes) AND status = 'RUNNING' ORDER BY task_index
    LOOP
        UPDATE horsies_workflow_tasks SET enqueued_at = clock_timestamp(), started_at = clock_timestamp()
        WHERE workflow_id = run_id AND task_index = node.task_index;
        IF node.kind = 'map' THEN
            PERFORM horsies_retry_items_v1(node);
        ELSE
            PERFORM horsies_retry_v1(node.sub_workflow_id, NULL);
            PERFORM horsies_hold_runs_v1(ARRAY(SELECT horsies_tree_v1(node.sub_workflow_id)))
            FROM horsies_workflows WHERE id = run_id AND coalesce(status, '') = 'PAUSED';
        END IF;
    END LOOP;
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
        WHERE run.id = ANY(ARRAY(SELECT horsies_tree_v1(run_id))) AND run.id <> run_id
          AND coalesce(run.status, '') = 'PAUSED'
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
