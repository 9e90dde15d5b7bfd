-- Facts for the checks of `horsies doctor`. Every statement is bounded: it reads the catalog, the server's statistics,
-- partial indexes on open rows, or a fixed number of rows at the end of a primary key.

-- name: find_table
-- Whether a table exists. The table's name is a parameter, because the schema is not added to names inside literals.
SELECT EXISTS (
    SELECT FROM pg_class AS relation
    WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid
      AND relation.relname = %(table)s::text) AS is_there

-- name: read_migrations
-- The schema files that were applied to this database: a few dozen rows.
SELECT kind, version, sha FROM horsies_migrations

-- name: list_triggers
SELECT tested.tgname::text AS name, relation.relname::text AS table_name,
    NOT (tested.tgenabled = 'D' OR tested.tgenabled = 'R') AS is_enabled
FROM pg_trigger AS tested JOIN pg_class AS relation ON relation.oid = tested.tgrelid
WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND NOT tested.tgisinternal
  AND starts_with(tested.tgname, 'horsies_')

-- name: find_silencers
-- Where session_replication_role is set to "replica", which prevents triggers from firing: for the database or the
-- server, for this role or the role of another Horsies session, or in this session's configuration or database URL.
SELECT role.rolname::text AS role_name, stored.setdatabase <> 0 AS is_of_database, true AS is_stored,
    current_database()::text AS database_name
FROM pg_db_role_setting AS stored LEFT JOIN pg_roles AS role ON role.oid = stored.setrole
WHERE stored.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
  AND EXISTS (SELECT FROM unnest(stored.setconfig) AS one (setting)
      WHERE lower(one.setting) = 'session_replication_role=replica')
  AND (role.rolname IS NULL OR role.rolname = current_user OR EXISTS (
      SELECT FROM pg_stat_activity AS session
      WHERE session.usename = role.rolname AND session.datname = current_database()
        AND starts_with(session.application_name, 'horsies:')))
UNION ALL
SELECT NULL, false, false, current_database()::text FROM pg_settings AS own
WHERE own.name = 'session_replication_role' AND own.setting = 'replica'
  AND own.source NOT IN ('database', 'user', 'database user', 'global')

-- name: list_functions
SELECT DISTINCT proname::text AS name FROM pg_proc
WHERE pronamespace = to_regnamespace(%(schema)s::text)::oid AND starts_with(proname, 'horsies_')

-- name: list_indexes
-- Every index on a table of Horsies, including indexes that other programs created, and whether it is valid: an invalid
-- index slows down writes.
SELECT entry.relname::text AS name, relation.relname::text AS table_name, tested.indisvalid AS is_valid
FROM pg_index AS tested JOIN pg_class AS entry ON entry.oid = tested.indexrelid
JOIN pg_class AS relation ON relation.oid = tested.indrelid
WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND starts_with(relation.relname, 'horsies_')

-- name: read_server_state
-- The server's settings and load, and this session's role, in one row.
SELECT current_setting('server_version')::text AS version,
    current_setting('server_version_num')::integer AS version_number,
    pg_encoding_to_char(stored.encoding)::text AS encoding, stored.datname::text AS database_name,
    current_setting('fsync') = 'on' AS has_fsync,
    current_setting('synchronous_commit')::text AS synchronous_commit,
    current_setting('autovacuum') = 'on' AS has_autovacuum, pg_is_in_recovery() AS is_standby,
    coalesce((SELECT every.setting FROM pg_settings AS every WHERE every.name = 'default_transaction_read_only')
        = 'on', false) AS is_read_only,
    pg_notification_queue_usage()::float8 AS notification_usage,
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
        AS connection_limit,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
    (SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND starts_with(application_name, 'horsies:')) AS own_connections,
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_sessions, clock_timestamp() AS server_time
FROM pg_database AS stored WHERE stored.datname = current_database()

-- name: list_tables
-- Table sizes and statistics; "row_estimate" is -1 until a table is analysed for the first time.
SELECT relation.relname::text AS name, relation.relpersistence = 'u' AS is_unlogged,
    coalesce(relation.reloptions, '{}')::text[] AS options, relation.reltuples::float8 AS row_estimate,
    pg_total_relation_size(relation.oid) AS bytes, pg_stat_get_live_tuples(relation.oid) AS live_rows,
    pg_stat_get_dead_tuples(relation.oid) AS dead_rows,
    greatest(pg_stat_get_last_analyze_time(relation.oid), pg_stat_get_last_autoanalyze_time(relation.oid))
        AS analysed_at
FROM pg_class AS relation
WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND relation.relkind = 'r'
  AND starts_with(relation.relname, 'horsies_')
ORDER BY name

-- name: find_xmin_holders
-- Transactions and slots that keep vacuum from removing dead rows: sessions in this database, standbys, replication
-- slots, prepared transactions. The text of a session's statement is omitted, because it may contain arguments; it only
-- decides whether the session changes the schema, as the sessions of "horsies migrate" do unless they have been idle for
-- a minute. The state is NULL for a role that must not see it.
SELECT 'session' AS kind, pid::text AS name, concat_ws(', ', nullif(application_name, ''), state) AS detail,
    extract(epoch FROM clock_timestamp() - coalesce(xact_start, backend_start))::float8 AS seconds,
    age(coalesce(backend_xmin, backend_xid))::bigint AS transactions,
    coalesce(application_name IN ('horsies:migrate', 'horsies:schema')
        AND (state IS NULL OR state = 'active' OR state_change > clock_timestamp() - interval '1 minute')
        OR state = 'active' AND query ~*
        '^(\s|--[^\n]*\n|/\*.*\*/|BEGIN[^;]*;)*(ALTER|DROP|REINDEX|CREATE\s+(UNIQUE\s+)?INDEX)\y', false)
        AS changes_schema
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
  AND backend_type <> 'autovacuum worker' AND (datname IS NULL OR datname = current_database())
UNION ALL
SELECT 'slot', slot_name::text, CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, age(xmin)::bigint, false
FROM pg_replication_slots WHERE xmin IS NOT NULL
UNION ALL
SELECT 'prepared', gid::text, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8,
    age(transaction)::bigint, false
FROM pg_prepared_xacts WHERE database = current_database()
ORDER BY transactions DESC, name LIMIT 20

-- name: measure_claim_index
-- The size of the claim index, and the number of tasks in it, counted up to the limit that the check needs.
SELECT pg_relation_size(entry.oid) AS bytes, (
    SELECT count(*) FROM (
        SELECT FROM horsies_tasks WHERE status = 'PENDING' AND NOT held
        LIMIT least(pg_relation_size(entry.oid) / 10240, 100000) + 1) AS waiting) AS waiting
FROM pg_class AS entry
WHERE entry.relnamespace = to_regnamespace(%(schema)s::text)::oid AND entry.relname = 'horsies_tasks_claim'

-- name: list_worker_releases
-- The release of every worker that has not shut down.
SELECT worker_id::text, version::text, extract(epoch FROM now() - started_at)::float8 AS started_seconds_ago
FROM horsies_workers WHERE stopped_at IS NULL ORDER BY seen_at DESC LIMIT 1000

-- name: count_abandoned
-- Tasks that recovery should have handled: claimed by or running on dead workers, with a lapsed lease, or past their
-- deadline. There are few tasks in flight; tasks past their deadline are counted from the index on deadlines, up to
-- 10,000. Parameters: an age in seconds.
SELECT count(*) FILTER (WHERE worker.stopped_at < now() - %(seconds)s::float8 * interval '1 second'
        OR (worker.worker_id IS NULL
            AND coalesce(task.started_at, task.claimed_at, task.updated_at)
                < now() - %(seconds)s::float8 * interval '1 second')) AS ownerless,
    count(*) FILTER (WHERE task.status = 'CLAIMED'
        AND task.claim_expires_at < now() - %(seconds)s::float8 * interval '1 second') AS lapsed,
    (SELECT count(*) FROM (
        SELECT FROM horsies_tasks WHERE status = 'PENDING' AND good_until IS NOT NULL
          AND good_until < now() - %(seconds)s::float8 * interval '1 second' LIMIT 10000) AS late) AS late
FROM horsies_tasks AS task LEFT JOIN horsies_workers AS worker ON worker.worker_id = task.claimed_by_worker_id
WHERE task.status IN ('CLAIMED', 'RUNNING')

-- name: list_crashes
-- The attempts of the last hour whose child process died, among the newest "window" attempts. Names are scalar
-- subqueries, because a join might be planned as a hash over the whole history. Parameters: how many of the newest
-- attempts to read.
WITH newest AS MATERIALIZED (
    SELECT task_id, outcome, finished_at FROM horsies_task_attempts ORDER BY id DESC LIMIT %(window)s::integer),
crashed AS MATERIALIZED (
    SELECT task_id, (SELECT task.task_name FROM horsies_tasks AS task WHERE task.id = newest.task_id) AS task_name
    FROM newest WHERE outcome = 'WORKER_FAILURE' AND finished_at > now() - interval '1 hour')
SELECT task_name::text, count(*) AS crashes, max(repeated.times) AS most_of_one_task
FROM crashed JOIN (SELECT task_id, count(*) AS times FROM crashed GROUP BY task_id) AS repeated USING (task_id)
WHERE task_name IS NOT NULL GROUP BY task_name ORDER BY crashes DESC, task_name LIMIT 20

-- name: list_losses
-- Workers that another worker declared lost within this time, newest first; their tasks have been recovered.
-- Parameters: the time in seconds, and how many workers to return.
SELECT worker_id, coalesce(name, hostname || ':' || pid)::text AS label, stopped_at AS lost_at, now() AS looked_at,
    queues::text[] AS queues
FROM horsies_workers
WHERE was_lost AND stopped_at > now() - %(seconds)s::float8 * interval '1 second'
ORDER BY stopped_at DESC LIMIT %(limit)s

-- name: find_overlong_tasks
-- Tasks that have been RUNNING for more than 30 seconds beyond their time limit, tasks without a heartbeat for five
-- minutes, and tasks without a time limit that have been RUNNING for "seconds"; from the in-flight index. The start of
-- a task counts as its first heartbeat. Parameters: an age in seconds, and the maximum number of rows.
SELECT task.id::text, task.task_name, task.timeout_ms, task.started_at, beat.sent_at AS heartbeat_at,
    now() AS looked_at
FROM horsies_tasks AS task LEFT JOIN LATERAL (
    SELECT heard.sent_at FROM horsies_heartbeats AS heard
    WHERE heard.task_id = task.id AND heard.role = 'runner'
    ORDER BY heard.sent_at DESC LIMIT 1) AS beat ON true
WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.status = 'RUNNING'
  AND (task.started_at < now() - (task.timeout_ms + 30000) * interval '1 millisecond'
       OR (task.started_at < now() - interval '5 minutes'
           AND coalesce(beat.sent_at < now() - interval '5 minutes', true))
       OR (task.timeout_ms IS NULL AND task.started_at < now() - %(seconds)s::float8 * interval '1 second'))
ORDER BY task.started_at, task.id LIMIT %(limit)s::integer

-- name: find_long_pauses
-- Runs that an error has paused, and runs that have been paused for "seconds", newest first, among the newest thousand
-- paused runs; from the index on open runs. A run that an operator paused has no error.
SELECT run.id::text, run.name, run.paused_at,
    coalesce(run.error::json #>> '{error_code,__builtin_task_code__}', run.error::json ->> 'error_code')
        AS error_code,
    CASE WHEN run.error IS NOT NULL THEN (
        SELECT failed.node_id FROM horsies_workflow_tasks AS failed
        WHERE failed.workflow_id = run.id AND failed.status = 'FAILED' AND failed.pauses
        ORDER BY failed.task_index LIMIT 1) END AS failed_node,
    now() AS looked_at
FROM (SELECT id, name, paused_at, error FROM horsies_workflows
      WHERE status IN ('PENDING', 'RUNNING', 'PAUSED') AND status = 'PAUSED'
      ORDER BY created_at DESC LIMIT 1000) AS run
WHERE run.error IS NOT NULL OR run.paused_at < now() - %(seconds)s::float8 * interval '1 second'
ORDER BY run.paused_at DESC, run.id LIMIT %(limit)s::integer

-- name: find_overdue_schedules
-- Schedules with a slot that has been overdue for "seconds", and whose row no scheduler has changed since; by the index
-- on due schedules.
SELECT state.schedule_name::text AS name FROM horsies_schedule_state AS state
WHERE state.next_run_at < now() - %(seconds)s::float8 * interval '1 second' AND state.paused_at IS NULL
  AND state.updated_at < now() - %(seconds)s::float8 * interval '1 second'
  AND NOT coalesce(state.disabled_at >= state.updated_at, false)
ORDER BY state.next_run_at, state.schedule_name LIMIT %(limit)s::integer

-- name: read_oldest_ended
-- The oldest finished task among the tasks with the first thousand ids, leaving out tasks with their own retention.
SELECT extract(epoch FROM now() - min(first.ended_at))::float8 AS seconds FROM (
    SELECT coalesce(completed_at, failed_at, updated_at) AS ended_at, status, retention FROM horsies_tasks
    ORDER BY horsies_tasks.id LIMIT 1000) AS first
WHERE first.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') AND first.retention IS NULL

-- name: measure_payload
-- The mean stored size of the arguments and results of the newest 200 tasks, without decompressing them.
SELECT avg(coalesce(pg_column_size(newest.args), 0) + coalesce(pg_column_size(newest.kwargs), 0)
    + coalesce(pg_column_size(newest.result), 0))::float8 AS bytes
FROM (SELECT args, kwargs, result FROM horsies_tasks ORDER BY horsies_tasks.id DESC LIMIT 200) AS newest

-- name: begin_reading
-- Settings for the rest of the transaction: no writes, no long statements, no long waits for locks. Parameters: how
-- long a statement may take, and how long it may wait for a lock.
SELECT set_config('transaction_read_only', 'on', true) AS is_read_only,
    set_config('statement_timeout', %(statement_ms)s::integer::text, true) AS statement_timeout,
    set_config('lock_timeout', %(lock_ms)s::integer::text, true) AS lock_timeout

-- name: read_backend
-- The server process behind this connection; if it changes between transactions, there is a pooler in between.
SELECT pg_backend_pid() AS pid
