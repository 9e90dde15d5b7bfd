-- Statements for the Prometheus gauges, in addition to those of the overview. Each reads a bounded number of rows.

-- name: read_gauges
-- The number of open runs and of late schedules, from their partial indexes, counted up to "most"; the planner's
-- estimate of the number of stored tasks; and two figures of the server that slow everything down if they grow. A role
-- without pg_read_all_stats sees only its own sessions' transactions. Parameters: the schema, the highest count, and
-- how many seconds after its slot a schedule counts as late.
SELECT runs.running, runs.paused, runs.oldest_paused_seconds, late.overdue, late.lag_seconds,
    (SELECT greatest(known.reltuples, 0)::float8 FROM pg_class AS known
     WHERE known.relnamespace = to_regnamespace(%(schema)s::text)::oid AND known.relname = %(tasks)s::text
    ) AS tasks_stored,
    (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - session.xact_start)), 0)::float8
     FROM pg_stat_activity AS session
     WHERE session.datname = current_database() AND session.pid <> pg_backend_pid()
       AND session.backend_type = 'client backend') AS oldest_transaction_seconds,
    pg_notification_queue_usage() AS notify_queue_ratio, waits.parked, waits.held
FROM (SELECT count(*) FILTER (WHERE open.status <> 'PAUSED') AS running,
          count(*) FILTER (WHERE open.status = 'PAUSED') AS paused,
          coalesce(extract(epoch FROM now() - min(open.paused_at) FILTER (WHERE open.status = 'PAUSED')), 0
          )::float8 AS oldest_paused_seconds
      FROM (SELECT run.status, run.paused_at FROM horsies_workflows AS run
            WHERE run.status IN ('PENDING', 'RUNNING', 'PAUSED')
            ORDER BY run.status, run.created_at LIMIT %(most)s::integer) AS open) AS runs
CROSS JOIN (
    SELECT count(*) AS overdue,
        coalesce(max(extract(epoch FROM now() - due.next_run_at)), 0)::float8 AS lag_seconds
    FROM (SELECT schedule.next_run_at FROM horsies_schedule_state AS schedule
          WHERE schedule.next_run_at < now() - %(grace_seconds)s::float8 * interval '1 second'
            AND schedule.updated_at < now() - %(grace_seconds)s::float8 * interval '1 second'
            AND schedule.paused_at IS NULL
            AND (schedule.disabled_at IS NULL OR schedule.disabled_at < schedule.updated_at)
          ORDER BY schedule.next_run_at LIMIT %(most)s::integer) AS due) AS late
CROSS JOIN (
    SELECT count(*) FILTER (WHERE wait.problem IS NULL) AS parked,
        count(*) FILTER (WHERE wait.problem IS NOT NULL) AS held
    FROM (SELECT parked.problem FROM horsies_parked AS parked JOIN horsies_tasks AS task
              ON task.id = parked.task_id AND task.generation = parked.generation
          WHERE coalesce(task.status, '') = 'PENDING' LIMIT %(most)s::integer) AS wait) AS waits

-- name: read_table_sizes
-- For each table of this schema: its size with its indexes, and how many dead rows it has. Reads the catalog and file
-- sizes.
SELECT relation.relname::text AS name, pg_total_relation_size(relation.oid)::float8 AS bytes,
    coalesce(pg_stat_get_dead_tuples(relation.oid), 0)::float8 AS dead_rows
FROM pg_class AS relation
WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND relation.relkind = 'r'
  AND starts_with(relation.relname, 'horsies_')
ORDER BY relation.relname
