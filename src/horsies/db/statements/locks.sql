-- The search for sessions that keep sessions of Horsies waiting.

-- name: find_blockers
-- Sessions that block a session of Horsies, and sessions that hold or request one of these lock modes on a table of
-- Horsies, in both cases for at least this many seconds. If such a session itself waits for other sessions, these are
-- included, and listed first. A wait that has ended leaves no trace, so the locks on the tables are searched as well. A
-- prepared transaction has no session.
WITH RECURSIVE own AS MATERIALIZED (
    SELECT relation.oid, relation.relname FROM pg_class AS relation
    WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND relation.relkind = 'r'
      AND starts_with(relation.relname, 'horsies_')
), locks AS MATERIALIZED (
    SELECT coalesce(held.pid, 0) AS pid, own.relname FROM pg_locks AS held JOIN own ON own.oid = held.relation
    WHERE held.locktype = 'relation' AND held.mode = ANY(%(modes)s::text[]) AND held.pid IS DISTINCT FROM pg_backend_pid()
      AND held.database = (SELECT stored.oid FROM pg_database AS stored WHERE stored.datname = current_database())
), blocking (pid) AS (
    SELECT first.pid FROM (
        SELECT unnest(pg_blocking_pids(waiting.pid)) AS pid FROM pg_stat_activity AS waiting
        WHERE waiting.datname = current_database() AND waiting.wait_event_type = 'Lock'
          AND starts_with(waiting.application_name, 'horsies:')
          AND coalesce(waiting.query_start < clock_timestamp() - make_interval(secs => %(seconds)s), true)
        UNION SELECT locks.pid FROM locks) AS first
    UNION
    SELECT unnest(pg_blocking_pids(blocking.pid)) FROM blocking WHERE blocking.pid <> 0
)
SELECT nullif(blocking.pid, 0) AS pid, activity.usename::text AS user_name, activity.application_name,
    activity.state, activity.xact_start AS since, left(activity.query, 300) AS statement,
    activity.wait_event_type = 'Lock' AS waits, clock_timestamp() AS looked_at,
    ARRAY(SELECT DISTINCT locks.relname::text FROM locks WHERE locks.pid = blocking.pid ORDER BY 1 LIMIT 3) AS tables
FROM blocking LEFT JOIN pg_stat_activity AS activity ON activity.pid = blocking.pid
WHERE coalesce(activity.xact_start < clock_timestamp() - make_interval(secs => %(seconds)s), true)
ORDER BY coalesce(activity.wait_event_type = 'Lock', false), activity.xact_start LIMIT 5
