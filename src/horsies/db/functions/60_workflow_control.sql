-- Control of runs: pause, resume, cancel, expire. Each function first locks the root of the tree and then needs a fixed
-- number of statements, regardless of the number of nodes.

-- RUNNING -> PAUSED for a run and the runs below it. Returns the run's previous status, or NULL if the run does not
-- exist.
CREATE OR REPLACE FUNCTION horsies_pause_v1(p_run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    was_status text := horsies_lock_tree(p_run_id);
BEGIN
    IF was_status = 'RUNNING' THEN
        PERFORM horsies_pause_runs(ARRAY(SELECT horsies_tree(p_run_id)));
    END IF;
    RETURN was_status;
END
$$;

-- RUNNING -> PAUSED for these runs. Their tasks are held: a claim does not find held tasks, and a running task stays
-- marked as held in case it is retried. Tasks claimed ahead of time return to the queue as held tasks. Tasks that wait
-- in children's windows return too, once their workers have been notified.
CREATE OR REPLACE FUNCTION horsies_pause_runs(p_runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    paused uuid[];
    may_wait boolean;
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET
            status = 'PAUSED', paused_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = ANY(p_runs) AND coalesce(status, '') = 'RUNNING'
        RETURNING id)
    SELECT array_agg(id) INTO paused FROM changed;
    WITH changed AS (
        UPDATE horsies_tasks SET
            held = true,
            -- A task with a key leaves its lane. A running task stays in its lane, because it still counts under the
            -- lane's limits; if the task later returns to the queue, the status of its run decides about its lane.
            lane = CASE status WHEN 'RUNNING' THEN lane END,
            status = CASE status WHEN 'CLAIMED' THEN 'PENDING' ELSE status END,
            claimed = false,
            claim_expires_at = NULL,
            claimed_by_worker_id = CASE status WHEN 'CLAIMED' THEN NULL ELSE claimed_by_worker_id END,
            claimed_at = CASE status WHEN 'CLAIMED' THEN NULL ELSE claimed_at END,
            updated_at = clock_timestamp()
        WHERE workflow_id = ANY(paused) AND status IN ('PENDING', 'CLAIMED', 'RUNNING')
        RETURNING status = 'RUNNING' AND burst AS may_wait)
    SELECT bool_or(changed.may_wait) INTO may_wait FROM changed;
    IF may_wait THEN
        PERFORM pg_notify('horsies_pause', '');
    END IF;
END
$$;

-- PAUSED -> RUNNING for a run and the paused runs below it. Returns the run's previous status.
CREATE OR REPLACE FUNCTION horsies_resume_v1(p_run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    was_status text := horsies_lock_tree(p_run_id);
BEGIN
    IF was_status = 'PAUSED' THEN
        PERFORM horsies_resume_runs(ARRAY(SELECT horsies_tree(p_run_id)));
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> RUNNING for these runs: their tasks are released, nodes that ended during the pause are counted, and runs
-- without open nodes end.
CREATE OR REPLACE FUNCTION horsies_resume_runs(p_runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    resumed uuid[];
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET status = 'RUNNING', paused_at = NULL, updated_at = clock_timestamp()
        WHERE id = ANY(p_runs) AND coalesce(status, '') = 'PAUSED'
        RETURNING id)
    SELECT array_agg(id) INTO resumed FROM changed;
    UPDATE horsies_tasks SET
        held = lane_key IS NOT NULL,
        lane = CASE WHEN lane_key IS NOT NULL THEN horsies_lane_v1(queue_name, lane_key) END,
        updated_at = clock_timestamp()
    WHERE workflow_id = ANY(resumed) AND held AND status IN ('PENDING', 'RUNNING');
    PERFORM horsies_catch_up(resumed);
END
$$;

-- Any open status -> CANCELLED, for a run and all its descendants. Returns the run's previous status. If the run has
-- already ended, maps that an earlier release left RUNNING in it are ended.
CREATE OR REPLACE FUNCTION horsies_cancel_v1(p_run_id uuid, p_reason text, p_interrupt boolean) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    was_status text := horsies_lock_tree(p_run_id);
    family uuid[];
BEGIN
    IF was_status IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        family := ARRAY(SELECT horsies_family_v1(p_run_id));
        PERFORM horsies_end_runs(family, 'CANCELLED', p_reason, p_interrupt);
        PERFORM horsies_finish_parent_nodes(family);
    ELSE
        PERFORM horsies_stop_maps(ARRAY[p_run_id]);
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> EXPIRED if a run has been paused for too long. Runs below it are not affected, because each run's pause has
-- its own limit.
CREATE OR REPLACE FUNCTION horsies_expire_v1(
    p_run_id uuid, p_max_paused_seconds double precision, p_reason text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    is_late boolean;
BEGIN
    PERFORM horsies_lock_tree(p_run_id);
    SELECT status = 'PAUSED' AND paused_at < clock_timestamp() - p_max_paused_seconds * interval '1 second'
    INTO is_late FROM horsies_workflows WHERE id = p_run_id;
    IF is_late THEN
        PERFORM horsies_end_runs(ARRAY[p_run_id], 'EXPIRED', p_reason, false);
        PERFORM horsies_finish_parent_nodes(ARRAY[p_run_id]);
    END IF;
    RETURN coalesce(is_late, false);
END
$$;

-- Open -> CANCELLED or EXPIRED for these runs. Nodes that have not started are skipped and their tasks cancelled; maps
-- fail. Running tasks may finish, unless "p_interrupt" requests them to stop. The good_until of running tasks is set to
-- the current time, so that a failed task is not retried and a task that is released before its start expires.
CREATE OR REPLACE FUNCTION horsies_end_runs(
    p_runs uuid[], p_status text, p_reason text, p_interrupt boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    ended uuid[];
    cleaning uuid[] := '{}';
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET
            status = p_status, error = p_reason, completed_at = clock_timestamp(),
            updated_at = clock_timestamp()
        WHERE id = ANY(p_runs) AND coalesce(status, '') IN ('PENDING', 'RUNNING', 'PAUSED')
        RETURNING id)
    SELECT array_agg(id) INTO ended FROM changed;
    IF ended IS NULL THEN
        RETURN;
    END IF;
    -- A parked run of a durable function is left out here: it ends by itself after its clean-up.
    IF EXISTS (SELECT FROM horsies_steps) THEN
        cleaning := ARRAY(SELECT horsies_begin_clean_up_v1(ARRAY(
            SELECT task.id FROM horsies_tasks AS task
            WHERE task.workflow_id = ANY(ended) AND coalesce(task.status, '') IN ('PENDING', 'CLAIMED')
            ORDER BY task.id FOR UPDATE)));
    END IF;
    -- A worker that is starting a task holds the lock on its row. When the lock is free, the task is RUNNING.
    WITH waiting AS (
        SELECT id FROM horsies_tasks
        WHERE workflow_id = ANY(ended) AND status IN ('PENDING', 'CLAIMED') AND id <> ALL(cleaning) FOR UPDATE),
    skipped AS (
        UPDATE horsies_workflow_tasks SET status = 'SKIPPED'
        WHERE workflow_id = ANY(ended) AND (status IN ('PENDING', 'READY')
            OR (status = 'ENQUEUED' AND task_id IN (SELECT id FROM waiting))))
    UPDATE horsies_tasks AS task SET
        status = 'CANCELLED', cancel_requested_at = clock_timestamp(), failed_at = clock_timestamp(),
        error_code = 'TASK_CANCELLED', claimed = false, claim_expires_at = NULL,
        updated_at = clock_timestamp()
    FROM waiting WHERE task.id = waiting.id;
    PERFORM horsies_stop_maps(ended);
    UPDATE horsies_tasks SET
        good_until = least(good_until, clock_timestamp()), held = lane_key IS NOT NULL,
        cancel_requested_at = CASE WHEN p_interrupt THEN clock_timestamp() ELSE cancel_requested_at END,
        updated_at = clock_timestamp()
    WHERE workflow_id = ANY(ended) AND coalesce(status, '') = 'RUNNING';
    IF p_interrupt THEN
        PERFORM pg_notify('horsies_cancel', id::text) FROM horsies_tasks
        WHERE workflow_id = ANY(ended) AND coalesce(status, '') = 'RUNNING';
    END IF;
END
$$;
