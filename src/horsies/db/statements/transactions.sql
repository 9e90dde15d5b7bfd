-- Statements inside the transaction of a task, beside those that record its outcome (turn.sql). The two checks share
-- a message with them and with COMMIT: a cast that fails keeps the server from the COMMIT, and its error has the reason.

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

-- name: require_completed
-- Whether the statement before this one has recorded the outcome: without it, the task belongs to another worker.
SELECT CASE count(*) WHEN 0 THEN 'horsies: lost' ELSE '0' END::integer AS met FROM horsies_tasks AS task
WHERE task.id = %(id)s::uuid AND task.generation = %(generation)s AND task.status = 'COMPLETED'

-- name: limit_idle
-- Ends the session when it stays idle in the rest of this transaction, which the code of the task ends, or when its
-- client is gone during a statement. The recorded outcome holds the row of the task and, for a node, the root of its
-- run: neither a frozen child nor a killed one must keep others from them.
SELECT set_config('idle_in_transaction_session_timeout', %(milliseconds)s::integer::text, true) AS setting,
    set_config('client_connection_check_interval', %(check_milliseconds)s::integer::text, true) AS check_setting
