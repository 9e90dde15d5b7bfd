-- Statements inside a task's transaction, in addition to those that record its outcome (turn.sql).

-- name: read_mark
-- The mark that the library sets when it begins the transaction. A different or missing value means that the task
-- ended the transaction itself and this is a later one. In another replication role the triggers would not fire.
SELECT current_setting('horsies.attempt', true) AS mark,
    current_setting('session_replication_role') AS replication_role

-- name: limit_idle
-- Ends the session if it stays idle for the rest of this transaction. The recorded outcome locks the task's row and,
-- for a node, the root of its run: a frozen child must not keep others waiting for them.
SELECT set_config('idle_in_transaction_session_timeout', %(milliseconds)s::integer::text, true) AS setting
