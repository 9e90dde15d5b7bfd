-- Control of runs: pause, resume, cancel, expire. Every one locks the root of the tree first and then needs a fixed
-- number of statements, whatever the number of nodes.

-- RUNNING -> PAUSED for a run and what runs below it. Returns the status it met, NULL when there is no such run.
CREATE OR REPLACE FUNCTION horsies_pause_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status = 'RUNNING' THEN
        PERFORM horsies_pause_runs(ARRAY(SELECT horsies_tree(run_id)));
    END IF;
    RETURN was_status;
END
$$;

-- RUNNING -> PAUSED for these runs, and their tasks on hold: the claim does not see a held task, and one that runs
-- keeps the mark in case it is retried. What was claimed ahead goes back to the queue, still on hold.
CREATE OR REPLACE FUNCTION horsies_pause_runs(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    paused uuid[];
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET status = 'PAUSED', paused_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = ANY(runs) AND coalesce(status, '') = 'RUNNING'
        RETURNING id)
    SELECT array_agg(id) INTO paused FROM changed;
    UPDATE horsies_tasks AS task SET
        held = true,
        status = CASE task.status WHEN 'CLAIMED' THEN 'PENDING' ELSE task.status END,
        claimed = false,
        claim_expires_at = NULL,
        claimed_by_worker_id = CASE task.status WHEN 'CLAIMED' THEN NULL ELSE task.claimed_by_worker_id END,
        claimed_at = CASE task.status WHEN 'CLAIMED' THEN NULL ELSE task.claimed_at END,
        updated_at = clock_timestamp()
    WHERE task.workflow_id = ANY(paused) AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING');
END
$$;

-- PAUSED -> RUNNING for a run and what is paused below it. Returns the status it met.
CREATE OR REPLACE FUNCTION horsies_resume_v1(run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status = 'PAUSED' THEN
        PERFORM horsies_resume_runs(ARRAY(SELECT horsies_tree(run_id)));
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> RUNNING for those of these runs: tasks are let go, what ended meanwhile counts now, and a run in which
-- nothing is left to do ends here.
CREATE OR REPLACE FUNCTION horsies_resume_runs(runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    resumed uuid[];
BEGIN
    WITH changed AS (
        UPDATE horsies_workflows SET status = 'RUNNING', paused_at = NULL, updated_at = clock_timestamp()
        WHERE id = ANY(runs) AND coalesce(status, '') = 'PAUSED'
        RETURNING id)
    SELECT array_agg(id) INTO resumed FROM changed;
    UPDATE horsies_tasks SET held = false, updated_at = clock_timestamp()
    WHERE workflow_id = ANY(resumed) AND held AND status IN ('PENDING', 'RUNNING');
    PERFORM horsies_catch_up(resumed);
END
$$;

-- Any open status -> CANCELLED, for a run and everything below it. Returns the status it met.
CREATE OR REPLACE FUNCTION horsies_cancel_v1(run_id uuid, reason text, interrupt boolean) RETURNS text
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
    family uuid[];
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        family := ARRAY(SELECT horsies_family_v1(run_id));
        PERFORM horsies_end_runs(family, 'CANCELLED', reason, interrupt);
        PERFORM horsies_finish_parent_nodes(family);
    END IF;
    RETURN was_status;
END
$$;

-- PAUSED -> EXPIRED when a run has been paused for longer than allowed. Each run below has an age of its own.
CREATE OR REPLACE FUNCTION horsies_expire_v1(run_id uuid, max_paused_seconds double precision, reason text) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    expired boolean;
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT status = 'PAUSED' AND paused_at < clock_timestamp() - max_paused_seconds * interval '1 second'
    INTO expired FROM horsies_workflows WHERE id = run_id;
    IF expired THEN
        PERFORM horsies_end_runs(ARRAY[run_id], 'EXPIRED', reason, false);
        PERFORM horsies_finish_parent_nodes(ARRAY[run_id]);
    END IF;
    RETURN coalesce(expired, false);
END
$$;

-- Open -> CANCELLED or EXPIRED for these runs. Nodes that have not begun are skipped and their tasks cancelled; tasks
-- that run are left to end, or asked to stop with "interrupt". Their good_until passes now: what ends in a failure is
-- not tried again, what comes back unstarted expires. Returns how many runs it ended.
CREATE OR REPLACE FUNCTION horsies_end_runs(runs uuid[], new_status text, reason text, interrupt boolean) RETURNS integer
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
