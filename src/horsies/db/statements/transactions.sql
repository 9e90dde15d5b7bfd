-- Statements inside the transaction of a task, in addition to turn.sql. A check is sent in the same message as the
-- statements that it guards and the COMMIT: if the check fails, a cast raises an error, which contains the reason, and
-- the server skips the COMMIT.

-- name: require_mark
-- Check that the transaction still has the mark that the library set when it began. If the mark is missing or
-- different, the task has ended that transaction itself and begun another. The check also fails in another replication
-- role, in which the triggers would not fire.
--
-- The statement also prepares the transaction for the statements that record the outcome. It selects generic plans: a
-- custom plan for arrays of one element looks cheaper, so the server would plan these statements again for each task,
-- which takes a third of their time. It also restores the session's role, because a role that the task has set may have
-- no privileges on the library's tables.
SELECT CASE WHEN current_setting('horsies.attempt', true) IS DISTINCT FROM %(mark)s THEN 'horsies: ended'
    WHEN current_setting('session_replication_role') <> 'origin' THEN 'horsies: replica'
    ELSE '0' END::integer AS met, set_config('plan_cache_mode', 'force_generic_plan', true) AS plan_mode,
    set_config('role', NULL, true) AS role

-- name: use_session_role
-- Restore the session's role before the outcome is recorded, because a role that the task has set may have no
-- privileges on the library's tables. Also select generic plans: a custom plan for arrays of one element looks cheaper,
-- so the server would plan the statements again for each task, which takes a third of their time.
SELECT set_config('role', NULL, true) AS role, set_config('plan_cache_mode', 'force_generic_plan', true) AS plan_mode

-- name: complete_own
-- RUNNING -> COMPLETED with the result, and the attempt row, for the task of this transaction. The statement combines
-- complete_tasks for one task with the checks on which the COMMIT depends; two separate statements for the checks would
-- add a fifth to the time. 'ended' means that the transaction lacks the mark that the library set at its beginning,
-- because the task has ended that transaction itself and begun another. 'replica' means that triggers would not fire in
-- this replication role. 'lost' means that the task belongs to another worker.
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
-- Make the server end the session if it stays idle in the rest of this transaction, which the task's code ends, or if
-- its client disappears during a statement. Recording the outcome locks the row of the task and, for a node, the root
-- of its run, and a frozen or killed child must not keep these rows locked.
SELECT set_config('idle_in_transaction_session_timeout', %(milliseconds)s::integer::text, true) AS setting,
    set_config('client_connection_check_interval', %(check_milliseconds)s::integer::text, true) AS check_setting
