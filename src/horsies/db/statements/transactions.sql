-- Statements inside the transaction of a task, beside those of a worker's turn (turn.sql). A check shares a message
-- with what it guards and with COMMIT: a cast that fails keeps the server from the COMMIT, and its error has the reason.

-- name: require_mark
-- The mark that the library sets when it begins the transaction. Another value, or none: the task ended the
-- transaction itself, and this is a later one. In another replication role the triggers would not fire. The server
-- would plan the statements that record the outcome again for each task, which takes a third of their time, because
-- a custom plan for arrays of one element looks cheaper than the generic one. The outcome is recorded with the
-- session's role: a role that the task has set need not have rights on the library's tables.
SELECT CASE WHEN current_setting('horsies.attempt', true) IS DISTINCT FROM %(mark)s THEN 'horsies: ended'
    WHEN current_setting('session_replication_role') <> 'origin' THEN 'horsies: replica'
    ELSE '0' END::integer AS met, set_config('plan_cache_mode', 'force_generic_plan', true) AS plan_mode,
    set_config('role', NULL, true) AS role

-- name: use_session_role
-- The outcome is recorded with the session's role: a role that the task has set need not have rights on the library's
-- tables. The server would plan statements with arrays again for each task, which takes a third of their time,
-- because a custom plan for arrays of one element looks cheaper than the generic one.
SELECT set_config('role', NULL, true) AS role, set_config('plan_cache_mode', 'force_generic_plan', true) AS plan_mode

-- name: complete_own
-- RUNNING -> COMPLETED with the result, and the attempt row, for the task of this transaction: what complete_tasks does
-- for one of its tasks, with the checks on which the COMMIT depends. Two more statements for the checks would cost a
-- fifth of this one. 'ended': the mark is not the one that the library has set when it began the transaction, so the
-- task has ended the transaction itself, and this is a later one. 'replica': in another replication role the triggers
-- would not fire. 'lost': the task belongs to another worker.
WITH finished AS (
    UPDATE horsies_tasks AS task SET
        status = 'COMPLETED', completed_at = clock_timestamp(), updated_at = clock_timestamp(), result = %(result)s,
        next_retry_at = NULL
    WHERE task.id = %(id)s::uuid AND task.generation = %(generation)s::integer
      AND task.claimed_by_worker_id = %(worker_id)s AND coalesce(task.status, '') = 'RUNNING'
    RETURNING task.id, task.retry_count, task.started_at, task.completed_at, task.worker_hostname,
        task.worker_pid, task.worker_process_name),
attempt AS (
    INSERT INTO horsies_task_attempts (
        task_id, attempt, outcome, started_at, finished_at, worker_id, worker_hostname, worker_pid,
        worker_process_name)
    SELECT id, retry_count + 1, 'COMPLETED', started_at, completed_at, %(worker_id)s, worker_hostname, worker_pid,
        worker_process_name
    FROM finished
    ON CONFLICT (task_id, attempt) DO NOTHING)
SELECT CASE WHEN current_setting('horsies.attempt', true) IS DISTINCT FROM %(mark)s THEN 'horsies: ended'
    WHEN current_setting('session_replication_role') <> 'origin' THEN 'horsies: replica'
    WHEN NOT EXISTS (SELECT FROM finished) THEN 'horsies: lost'
    ELSE '0' END::integer AS met

-- name: limit_idle
-- Ends the session when it stays idle in the rest of this transaction, which the code of the task ends, or when its
-- client is gone during a statement. The recorded outcome holds the row of the task and, for a node, the root of its
-- run: neither a frozen child nor a killed one must keep others from them.
SELECT set_config('idle_in_transaction_session_timeout', %(milliseconds)s::integer::text, true) AS setting,
    set_config('client_connection_check_interval', %(check_milliseconds)s::integer::text, true) AS check_setting
