-- Durable functions: a run is a task with recorded steps. While a run waits it is parked: its status is PENDING, and it
-- has no process, no connection and no lease.
--
-- The run's row is the lock between the worker that parks the run and the events that wake it. The worker locks the row
-- and then checks, with a new snapshot, for stored signals and ended children. A signal, or the end of a child, also
-- locks the row before it checks whether the run is parked. So the second of these two transactions sees the first.
-- Parking has its own transaction, which locks only rows of runs and waits for no other row, so it cannot be part of a
-- deadlock.

-- RUNNING -> PENDING for waiting runs of this worker. Each run has a request in JSON with these optional keys:
-- {"seconds": number, "signals": [name, ...], "children": [id, ...], "problem": sentence, "args": JSON text, "kwargs":
-- JSON text}. A run whose event has already occurred is due immediately. A run with a problem is held until an operator
-- resumes it. A run with an accepted cancellation begins its clean-up, or is left to the statement that cancels it. The
-- wait does not end the attempt, so retry_count does not change. good_until is cleared, because the run has already
-- started. A node whose workflow has ended keeps its good_until, and the run begins its clean-up if it has one.
CREATE OR REPLACE FUNCTION horsies_park_v1(
    p_worker_id text, p_ids uuid[], p_generations integer[], p_requests text[]) RETURNS SETOF uuid
LANGUAGE plpgsql AS $$
DECLARE
    request jsonb;
    run_id uuid;
    names text[];
    awaited uuid[];
    wakes_at timestamptz;
    has_come boolean;
    is_late boolean;
    keeps_place boolean;
BEGIN
    PERFORM FROM horsies_tasks WHERE id = ANY(p_ids) ORDER BY id FOR NO KEY UPDATE;
    FOR place IN 1 .. cardinality(p_ids) LOOP
        request := p_requests[place]::jsonb;
        names := ARRAY(SELECT jsonb_array_elements_text(coalesce(request -> 'signals', '[]')));
        awaited := ARRAY(SELECT jsonb_array_elements_text(coalesce(request -> 'children', '[]'))::uuid);
        wakes_at := clock_timestamp() + (request ->> 'seconds')::float8 * interval '1 second';
        has_come := EXISTS (
            SELECT FROM horsies_task_signals AS sent WHERE sent.task_id = p_ids[place] AND sent.name = ANY(names))
            OR EXISTS (SELECT FROM unnest(awaited) AS child (id) WHERE horsies_has_ended(child.id));
        IF request ? 'args' THEN  -- the run continues with new arguments and an empty record
            DELETE FROM horsies_steps AS step WHERE step.task_id = p_ids[place] AND EXISTS (
                SELECT FROM horsies_tasks AS task
                WHERE task.id = p_ids[place] AND task.generation = p_generations[place]
                  AND task.claimed_by_worker_id = p_worker_id AND coalesce(task.status, '') = 'RUNNING'
                  AND task.cancel_requested_at IS NULL);
            has_come := true;
        END IF;
        -- A run in a fifo lane keeps its place, so that no other task with its key passes it while it waits.
        keeps_place := (
            SELECT task.lane IS NOT NULL AND horsies_keeps_place_v1(task.queue_name, task.lane)
            FROM horsies_tasks AS task WHERE task.id = p_ids[place]);
        run_id := NULL;
        UPDATE horsies_tasks AS task SET
            status = 'PENDING', claimed_by_worker_id = NULL, claimed_at = NULL, started_at = NULL,
            worker_pid = NULL, worker_hostname = NULL, worker_process_name = NULL,
            next_retry_at = CASE WHEN keeps_place AND request ? 'problem' THEN horsies_never_v1()
                WHEN keeps_place AND NOT has_come THEN coalesce(wakes_at, horsies_never_v1()) END,
            -- If the workflow has ended, this time is the deadline of its running nodes.
            good_until = CASE WHEN task.workflow_id IS NOT NULL AND EXISTS (
                SELECT FROM horsies_workflows AS flow WHERE flow.id = task.workflow_id
                  AND coalesce(flow.status, '') NOT IN ('PENDING', 'RUNNING', 'PAUSED')) THEN task.good_until END,
            args = coalesce(request ->> 'args', task.args), kwargs = coalesce(request ->> 'kwargs', task.kwargs),
            held = task.held OR request ? 'problem',
            lane = CASE WHEN task.lane IS NOT NULL AND (keeps_place OR NOT request ? 'problem')
                THEN horsies_returned_lane_v1(task.lane, task.workflow_id) END,
            enqueued_at = CASE WHEN keeps_place THEN task.enqueued_at WHEN has_come OR request ? 'problem' THEN clock_timestamp()
                ELSE coalesce(wakes_at, horsies_never_v1()) END,
            -- The lane's index contains only tasks that were due at updated_at. The clock may have been set back since
            -- the send, so updated_at must not be earlier than the due time.
            updated_at = greatest(clock_timestamp(), CASE WHEN keeps_place THEN task.enqueued_at END)
        WHERE task.id = p_ids[place] AND task.generation = p_generations[place]
          AND task.claimed_by_worker_id = p_worker_id AND coalesce(task.status, '') = 'RUNNING'
          AND task.cancel_requested_at IS NULL
        RETURNING task.id, task.good_until IS NOT NULL INTO run_id, is_late;
        IF run_id IS NULL THEN
            RETURN QUERY SELECT horsies_clean_up_v1(p_worker_id, p_ids[place : place], p_generations[place : place]);
            CONTINUE;
        END IF;
        INSERT INTO horsies_parked (task_id, generation, since, until, signals, children, problem)
        VALUES (run_id, p_generations[place], clock_timestamp(), wakes_at, names, awaited, request ->> 'problem')
        ON CONFLICT (task_id) DO UPDATE SET
            generation = excluded.generation, since = excluded.since, until = excluded.until,
            signals = excluded.signals, children = excluded.children, problem = excluded.problem;
        IF is_late THEN
            PERFORM horsies_begin_clean_up_v1(ARRAY[run_id]);
        END IF;
        RETURN NEXT run_id;
    END LOOP;
END
$$;

-- Return whether tasks with this name are runs of a durable function. Such a run does not fail when no worker has its
-- function, because its recorded steps would then be useless. If no worker has registered the name yet, a version at
-- the end of the name identifies a durable function.
CREATE OR REPLACE FUNCTION horsies_is_durable_v1(p_task_name text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT defaults.is_durable FROM horsies_task_defaults AS defaults WHERE defaults.task_name = p_task_name),
        p_task_name ~ '@[1-9][0-9]*$')
$$;

-- Return whether a child (a task or a workflow) has ended. A child whose row was deleted counts as ended.
CREATE OR REPLACE FUNCTION horsies_has_ended(p_id uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (
        SELECT FROM horsies_tasks AS task
        WHERE task.id = p_id AND coalesce(task.status, '') IN ('PENDING', 'CLAIMED', 'RUNNING'))
    AND NOT EXISTS (
        SELECT FROM horsies_workflows AS flow
        WHERE flow.id = p_id AND coalesce(flow.status, '') IN ('PENDING', 'RUNNING', 'PAUSED'))
$$;

-- Make these runs due if they are parked for one of these children, which have ended. A run that is not parked yet is
-- locked as well, because its worker may be about to park it.
CREATE OR REPLACE FUNCTION horsies_wake_parents(p_runs uuid[], p_children uuid[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM horsies_tasks AS task
    WHERE task.id = ANY(p_runs) AND coalesce(task.status, '') IN ('PENDING', 'CLAIMED', 'RUNNING')
    ORDER BY task.id FOR NO KEY UPDATE;
    UPDATE horsies_tasks AS task SET
        enqueued_at = least(task.enqueued_at, clock_timestamp()), next_retry_at = NULL,
        updated_at = clock_timestamp()
    FROM horsies_parked AS parked
    WHERE task.id = ANY(p_runs) AND coalesce(task.status, '') = 'PENDING'
      AND parked.task_id = task.id AND parked.generation = task.generation AND parked.children && p_children
      AND parked.problem IS NULL AND greatest(task.enqueued_at, task.next_retry_at) > clock_timestamp();
END
$$;

-- Store a signal for a run, and wake the run if it is parked for this signal. Returns 'delivered' if the run was woken,
-- 'stored' if the run may wait for the signal later, the status of a run that has ended, or NULL if the task does not
-- exist.
CREATE OR REPLACE FUNCTION horsies_signal_task_v1(p_task_id uuid, p_name text, p_value text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    was_status text;
BEGIN
    SELECT task.status INTO was_status FROM horsies_tasks AS task WHERE task.id = p_task_id FOR NO KEY UPDATE;
    IF was_status IS NULL OR was_status NOT IN ('PENDING', 'CLAIMED', 'RUNNING') THEN
        RETURN was_status;
    END IF;
    INSERT INTO horsies_task_signals (task_id, name, value) VALUES (p_task_id, p_name, p_value);
    UPDATE horsies_tasks AS task SET
        enqueued_at = least(task.enqueued_at, clock_timestamp()), next_retry_at = NULL,
        updated_at = clock_timestamp()
    FROM horsies_parked AS parked
    WHERE task.id = p_task_id AND coalesce(task.status, '') = 'PENDING'
      AND parked.task_id = task.id AND parked.generation = task.generation AND p_name = ANY(parked.signals)
      AND parked.problem IS NULL;
    RETURN CASE WHEN FOUND THEN 'delivered' ELSE 'stored' END;
END
$$;

-- Take the oldest signal with one of these names and record it as a step, in one transaction. The lock on the run's row
-- keeps an older attempt from taking a signal once the run belongs to a newer attempt. Returns the recorded step; if
-- the step is already recorded, the attempt has repeated this statement after losing the response. Returns no row if
-- there is no signal, and a row without a kind if the run belongs to another attempt.
CREATE OR REPLACE FUNCTION horsies_take_signal_v1(
    p_worker_id text, p_task_id uuid, p_generation integer, p_step text, p_position integer, p_names text[],
    OUT kind text, OUT result text, OUT error text)
RETURNS SETOF record LANGUAGE plpgsql AS $$
DECLARE
    attempt_number integer;
    signal_name text;
BEGIN
    SELECT task.retry_count + 1 INTO attempt_number FROM horsies_tasks AS task
    WHERE task.id = p_task_id AND task.generation = p_generation AND task.claimed_by_worker_id = p_worker_id
      AND coalesce(task.status, '') = 'RUNNING' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT step.kind, step.result, step.error INTO kind, result, error FROM horsies_steps AS step
    WHERE step.task_id = p_task_id AND step.name = p_step;
    IF FOUND THEN
        RETURN NEXT;
        RETURN;
    END IF;
    DELETE FROM horsies_task_signals AS sent WHERE sent.id = (
        SELECT oldest.id FROM horsies_task_signals AS oldest
        WHERE oldest.task_id = p_task_id AND oldest.name = ANY(p_names) ORDER BY oldest.id LIMIT 1)
    RETURNING sent.name, sent.value INTO signal_name, result;
    IF FOUND THEN
        kind := 'signal';
        INSERT INTO horsies_steps (
            task_id, name, position, kind, result, attempt, started_at, ended_at)
        VALUES (
            p_task_id, p_step, p_position, kind, result, attempt_number, clock_timestamp(), clock_timestamp());
        RETURN NEXT;
    END IF;
END
$$;

-- Make a held run due, in its lane if it has a key. If the run is a node of a paused workflow, it stays held.
CREATE OR REPLACE FUNCTION horsies_continue_task(p_task_id uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE horsies_tasks AS task SET
        held = task.lane_key IS NOT NULL OR EXISTS (
            SELECT FROM horsies_workflows AS flow WHERE flow.id = task.workflow_id AND flow.status = 'PAUSED'),
        lane = horsies_returned_lane_v1(horsies_lane_v1(task.queue_name, task.lane_key), task.workflow_id),
        enqueued_at = least(task.enqueued_at, clock_timestamp()), next_retry_at = NULL,
        updated_at = clock_timestamp()
    WHERE task.id = p_task_id;
END
$$;

-- Make a run due that is held because of a problem. Returns 'resumed', 'NOT_HELD', the status of a run that has ended,
-- or NULL if the task does not exist.
CREATE OR REPLACE FUNCTION horsies_resume_task_v1(p_task_id uuid) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    run horsies_tasks;
BEGIN
    SELECT task.* INTO run FROM horsies_tasks AS task WHERE task.id = p_task_id FOR NO KEY UPDATE;
    IF run.status IS NULL OR run.status NOT IN ('PENDING', 'CLAIMED', 'RUNNING') THEN
        RETURN run.status;
    END IF;
    UPDATE horsies_parked AS parked SET problem = NULL
    WHERE parked.task_id = p_task_id AND parked.generation = run.generation AND parked.problem IS NOT NULL
      AND run.status = 'PENDING';
    IF NOT FOUND THEN
        RETURN 'NOT_HELD';
    END IF;
    PERFORM horsies_continue_task(p_task_id);
    RETURN 'resumed';
END
$$;

-- Delete the step with this name and all steps recorded after it, and let the run continue from there. The run must not
-- have a process: it is parked or held. Returns the number of deleted steps as text; 'STEP_NOT_FOUND'; 'CANCELLING' if
-- this would delete the record of a cancellation; the status of a run that is running or has ended; or NULL if the task
-- does not exist.
CREATE OR REPLACE FUNCTION horsies_reset_task_v1(p_task_id uuid, p_step text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    run horsies_tasks;
    first integer;
    forgotten bigint;
BEGIN
    SELECT task.* INTO run FROM horsies_tasks AS task WHERE task.id = p_task_id FOR NO KEY UPDATE;
    IF run.status IS NULL OR run.status <> 'PENDING' THEN
        RETURN run.status;
    END IF;
    IF NOT EXISTS (SELECT FROM horsies_steps AS step WHERE step.task_id = p_task_id AND step.name = p_step) THEN
        RETURN 'STEP_NOT_FOUND';
    END IF;
    -- The failed tries of a step, and the time limit of its wait, were recorded before the step itself.
    SELECT min(step.position) INTO first FROM horsies_steps AS step
    WHERE step.task_id = p_task_id AND (step.name = p_step OR starts_with(step.name, p_step || '!'));
    IF EXISTS (SELECT FROM horsies_steps AS step
        WHERE step.task_id = p_task_id AND step.name = '!cancel' AND step.position >= first) THEN
        RETURN 'CANCELLING';
    END IF;
    DELETE FROM horsies_steps AS step WHERE step.task_id = p_task_id AND step.position >= first;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    UPDATE horsies_parked AS parked SET problem = NULL WHERE parked.task_id = p_task_id;
    PERFORM horsies_continue_task(p_task_id);
    RETURN forgotten::text;
END
$$;

-- Cancellation. A run whose function has registered clean-up steps (kind 'on_cancel') does not become CANCELLED
-- immediately: the cancellation is recorded as a step of kind 'cancel', and the run becomes due. The next call of the
-- run replays the recorded steps, executes the clean-up steps and ends as CANCELLED. cancel_requested_at is cleared
-- when the cancellation is recorded, so that the clean-up is retried and recovered like any other attempt.

-- Begin the clean-up of these runs, if they have clean-up steps that have not begun, and cancel their children. Returns
-- the ids of the runs that begin their clean-up. The caller must have locked the rows.
CREATE OR REPLACE FUNCTION horsies_begin_clean_up_v1(p_ids uuid[]) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    runs uuid[];
BEGIN
    IF p_ids = '{}' OR NOT EXISTS (SELECT FROM horsies_steps) THEN
        RETURN;
    END IF;
    WITH recorded AS (
        INSERT INTO horsies_steps (task_id, name, position, kind, result, attempt, started_at, ended_at)
        SELECT task.id, '!cancel', (SELECT max(step.position) + 1 FROM horsies_steps AS step
            WHERE step.task_id = task.id), 'cancel', 'null', task.retry_count + 1, clock_timestamp(), clock_timestamp()
        FROM horsies_tasks AS task
        WHERE task.id = ANY(p_ids) AND coalesce(task.status, '') IN ('PENDING', 'CLAIMED', 'RUNNING')
          AND EXISTS (SELECT FROM horsies_steps AS step WHERE step.task_id = task.id AND step.kind = 'on_cancel')
        ON CONFLICT (task_id, name) DO NOTHING
        RETURNING task_id)
    SELECT array_agg(task_id ORDER BY task_id) INTO runs FROM recorded;
    IF runs IS NULL THEN
        RETURN;
    END IF;
    UPDATE horsies_tasks AS task SET
        status = 'PENDING', claimed = false, claim_expires_at = NULL, claimed_by_worker_id = NULL,
        claimed_at = NULL, started_at = NULL, worker_pid = NULL, worker_hostname = NULL,
        worker_process_name = NULL, next_retry_at = NULL, good_until = NULL, cancel_requested_at = NULL,
        updated_at = clock_timestamp()
    WHERE task.id = ANY(runs);
    UPDATE horsies_parked AS parked SET problem = NULL
    WHERE parked.task_id = ANY(runs) AND parked.problem IS NOT NULL;
    PERFORM horsies_continue_task(run.id) FROM unnest(runs) AS run (id);
    PERFORM horsies_cancel_children(runs);
    RETURN QUERY SELECT unnest(runs);
END
$$;

-- RUNNING -> PENDING for runs of this worker that have clean-up steps and that an accepted cancellation has ended.
CREATE OR REPLACE FUNCTION horsies_clean_up_v1(
    p_worker_id text, p_ids uuid[], p_generations integer[]) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT horsies_begin_clean_up_v1(ARRAY(
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.id = ANY(p_ids) AND task.generation = p_generations[array_position(p_ids, task.id)]
          AND task.claimed_by_worker_id IS NOT DISTINCT FROM p_worker_id
          AND coalesce(task.status, '') = 'RUNNING' AND task.cancel_requested_at IS NOT NULL
        ORDER BY task.id FOR NO KEY UPDATE));
END
$$;

-- Cancel the open children of these runs, except children that were started as detached. Deeper descendants are
-- cancelled too, because the trigger on tasks calls this function for every cancelled task. A child that ends at the
-- same moment locks its own row and waits for its parent's row: PostgreSQL then aborts one of the two transactions,
-- which is repeated.
CREATE OR REPLACE FUNCTION horsies_cancel_children(p_runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    children uuid[] := ARRAY(
        SELECT (step.result::jsonb #>> '{}')::uuid FROM horsies_steps AS step
        WHERE step.task_id = ANY(p_runs) AND step.kind = 'start' AND step.result IS NOT NULL);
BEGIN
    IF children <> '{}' THEN
        PERFORM horsies_cancel_tasks_v1(children, true);
        PERFORM horsies_cancel_v1(flow.id, horsies_task_error(
            'WORKFLOW_CANCELLED', 'The run that started workflow ' || flow.id || ' was cancelled.'), true)
        FROM horsies_workflows AS flow
        WHERE flow.id = ANY(children) AND coalesce(flow.status, '') IN ('PENDING', 'RUNNING', 'PAUSED');
    END IF;
END
$$;

-- PENDING or CLAIMED -> CANCELLED, because user code has not started or the run is parked. With "p_running", RUNNING
-- tasks are requested to stop: their workers are notified and record the outcome. A run that has begun its clean-up is
-- not interrupted, unless the clean-up cannot continue (see horsies_cleaning). Returns a row for each task that exists.
-- The roots of the tasks' workflows are locked first, in id order, so that a transaction that has locked a task's row
-- never waits for a run.
CREATE OR REPLACE FUNCTION horsies_cancel_tasks_v1(
    p_ids uuid[], p_running boolean, OUT id uuid, OUT was_status text, OUT applied boolean)
RETURNS SETOF record LANGUAGE plpgsql AS $$
DECLARE
    cleaning uuid[];
    waiting uuid[] := '{}';
    asked uuid[] := '{}';
BEGIN
    PERFORM FROM horsies_workflows AS root
    WHERE root.id = ANY(ARRAY(
        SELECT run.root_workflow_id
        FROM horsies_tasks AS node JOIN horsies_workflows AS run ON run.id = node.workflow_id
        WHERE node.id = ANY(p_ids)))
    ORDER BY root.id FOR NO KEY UPDATE;
    PERFORM FROM horsies_tasks AS task WHERE task.id = ANY(p_ids) ORDER BY task.id FOR UPDATE;
    cleaning := horsies_cleaning(p_ids);
    FOR id, was_status IN SELECT task.id, task.status FROM horsies_tasks AS task WHERE task.id = ANY(p_ids) LOOP
        applied := was_status IN ('PENDING', 'CLAIMED') OR (was_status = 'RUNNING' AND p_running);
        IF applied AND id <> ALL(cleaning) THEN
            IF was_status = 'RUNNING' THEN
                asked := asked || id;
            ELSE
                waiting := waiting || id;
            END IF;
            IF was_status <> 'PENDING' THEN
                PERFORM pg_notify('horsies_cancel', id::text);
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    cleaning := ARRAY(SELECT horsies_begin_clean_up_v1(waiting));
    IF waiting <> '{}' THEN
        UPDATE horsies_tasks AS task SET
            status = 'CANCELLED', cancel_requested_at = clock_timestamp(), failed_at = clock_timestamp(),
            error_code = 'TASK_CANCELLED', claimed = false, claim_expires_at = NULL,
            updated_at = clock_timestamp()
        WHERE task.id = ANY(waiting) AND task.id <> ALL(cleaning)
          AND coalesce(task.status, '') IN ('PENDING', 'CLAIMED');
        DELETE FROM horsies_parked AS parked
        WHERE parked.task_id = ANY(waiting) AND parked.task_id <> ALL(cleaning);
    END IF;
    IF asked <> '{}' THEN
        UPDATE horsies_tasks AS task SET
            cancel_requested_at = clock_timestamp(), claimed = false, claim_expires_at = NULL,
            updated_at = clock_timestamp()
        WHERE task.id = ANY(asked) AND coalesce(task.status, '') = 'RUNNING';
    END IF;
END
$$;

-- Return whether no live worker of its queue can run a waiting task, because none has the function with parameters that
-- fit the call. False if the queue has no live workers.
CREATE OR REPLACE FUNCTION horsies_lacks_code(p_id uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT count(*) > 0 AND count(*) FILTER (
            WHERE worker.known_tasks IS NULL OR worker.known_tasks -> 'tasks' ? task.task_name
              AND NOT EXISTS (
                  SELECT FROM horsies_refusals AS refusal WHERE refusal.task_id = task.id
                    AND refusal.fingerprint = worker.known_tasks -> 'tasks' ->> task.task_name)) = 0
        FROM horsies_tasks AS task JOIN horsies_workers AS worker
            ON worker.stopped_at IS NULL AND task.queue_name = ANY(worker.queues)
        WHERE task.id = p_id AND coalesce(task.status, '') = 'PENDING'), false)
$$;

-- Return the ids of these runs that have begun their clean-up and can continue it. Held runs are omitted, and runs that
-- no live worker of their queue can run.
CREATE OR REPLACE FUNCTION horsies_cleaning(p_ids uuid[]) RETURNS uuid[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT step.task_id FROM horsies_steps AS step
        WHERE step.task_id = ANY(p_ids) AND step.name = '!cancel' AND NOT EXISTS (
            SELECT FROM horsies_parked AS parked JOIN horsies_tasks AS task ON task.id = parked.task_id
            WHERE parked.task_id = step.task_id AND parked.problem IS NOT NULL
              AND parked.generation = task.generation AND coalesce(task.status, '') = 'PENDING')
          AND NOT horsies_lacks_code(step.task_id))
$$;

-- Cancel the runs whose deadline has passed, even if they are running. Like every cancelled run, they execute their
-- clean-up first. A run that was already cancelled keeps its outcome. Returns the ids of the deadlines that were due;
-- "p_only" restricts the search to these ids. This statement locks a deadline's row before its task's row, whereas
-- deleting a task locks the task's row first. In such a deadlock PostgreSQL aborts one of the two transactions, which
-- is repeated.
CREATE OR REPLACE FUNCTION horsies_end_late_runs_v1(
    p_limit integer, p_excluded uuid[], p_only uuid[]) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    due uuid[] := ARRAY(
        SELECT deadline.task_id FROM horsies_deadlines AS deadline
        WHERE deadline.reached_at IS NULL AND deadline.ends_at <= clock_timestamp()
          AND deadline.task_id <> ALL(p_excluded) AND (p_only IS NULL OR deadline.task_id = ANY(p_only))
        ORDER BY deadline.ends_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    late uuid[] := ARRAY(
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.id = ANY(due) AND coalesce(task.status, '') IN ('PENDING', 'CLAIMED', 'RUNNING')
          AND task.cancel_requested_at IS NULL AND NOT EXISTS (
              SELECT FROM horsies_steps AS step WHERE step.task_id = task.id AND step.name = '!cancel'));
BEGIN
    DELETE FROM horsies_deadlines AS deadline WHERE deadline.task_id = ANY(due) AND deadline.task_id <> ALL(late);
    UPDATE horsies_deadlines AS deadline SET reached_at = clock_timestamp() WHERE deadline.task_id = ANY(late);
    PERFORM horsies_cancel_tasks_v1(late, true);
    UPDATE horsies_tasks AS task SET failed_reason = 'The run reached its deadline.'
    WHERE task.id = ANY(late) AND coalesce(task.status, '') = 'CANCELLED';
    RETURN QUERY SELECT unnest(due);
END
$$;
