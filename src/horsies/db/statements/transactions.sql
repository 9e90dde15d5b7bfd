-- Statements inside the transaction of a task, beside those that record its outcome (turn.sql).

-- name: read_mark
-- The mark that the library sets when it begins the transaction. Another value, or none: the task ended the
-- transaction itself, and this is a later one. In another replication role the triggers would not fire.
SELECT current_setting('horsies.attempt', true) AS mark,
    current_setting('session_replication_role') AS replication_role

-- name: limit_idle
-- Ends the session when it stays idle in the rest of this transaction. The recorded outcome holds the row of the
-- task and, for a node, the root of its run: a frozen child must not keep others from them.
SELECT set_config('idle_in_transaction_session_timeout', %(milliseconds)s::integer::text, true) AS setting
