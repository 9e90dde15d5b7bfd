-- Statements for the dashboard's panels, in addition to monitor.sql. Each reads a bounded number of rows, even if
-- queues and history are long.

-- name: count_recent_arrivals
-- Tasks sent during the last minute, by queue. At most the newest "sample" ids are read; "since" is the smallest
-- possible id of that minute. On a busy system the sample covers less than a minute, and "covered_seconds" is the time
-- that it covers.
WITH newest AS MATERIALIZED (
    SELECT queue_name, created_at FROM horsies_tasks
    WHERE id >= %(since)s::uuid ORDER BY id DESC LIMIT %(sample)s::integer),
covered AS MATERIALIZED (
    SELECT CASE WHEN count(*) < %(sample)s::integer THEN 60
                ELSE greatest(extract(epoch FROM now() - min(created_at)), 0.1) END::float8 AS seconds
    FROM newest)
SELECT newest.queue_name, covered.seconds AS covered_seconds, count(*) AS arrived
FROM newest CROSS JOIN covered GROUP BY newest.queue_name, covered.seconds

-- name: count_open_runs
-- Unfinished runs by status, exact up to "most", from the index on open runs.
SELECT known.status, counted.runs
FROM unnest(ARRAY['PENDING', 'RUNNING', 'PAUSED']) AS known (status) CROSS JOIN LATERAL (
    SELECT count(*) AS runs FROM (
        SELECT FROM horsies_workflows AS run
        WHERE run.status IN ('PENDING', 'RUNNING', 'PAUSED') AND run.status = known.status
        ORDER BY run.created_at LIMIT %(most)s::integer + 1) AS seen) AS counted

-- name: next_in_queue
-- A queue's due tasks in the order in which workers claim them, from the front of the claim index for each priority, so
-- that delayed tasks are never scanned. Keys take turns with each other and with the tasks without a key; "place" is
-- the position of a task among the tasks of its key.
WITH RECURSIVE levels AS (
    (SELECT priority FROM horsies_tasks
     WHERE status = 'PENDING' AND NOT held AND queue_name = %(queue)s::text ORDER BY priority LIMIT 1)
    UNION ALL
    SELECT (SELECT task.priority FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = %(queue)s::text
              AND task.priority > levels.priority ORDER BY task.priority LIMIT 1)
    FROM levels WHERE levels.priority IS NOT NULL)
SELECT front.id::text, front.task_name, front.priority,
    extract(epoch FROM now() - front.enqueued_at)::float8 AS due_seconds, front.retry_count, front.key
FROM (
    SELECT plain.id, plain.task_name, plain.priority, plain.enqueued_at, plain.retry_count, NULL::text AS key,
        row_number() OVER (ORDER BY plain.priority, plain.enqueued_at, plain.id) AS place
    FROM (SELECT * FROM levels LIMIT 200) AS levels CROSS JOIN LATERAL (
        SELECT task.id, task.task_name, task.priority, task.enqueued_at, task.retry_count
        FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = %(queue)s::text
          AND task.priority = levels.priority AND task.enqueued_at <= now()
        ORDER BY task.enqueued_at, task.id LIMIT %(limit)s::integer) AS plain
    UNION ALL
    SELECT keyed.* FROM horsies_lane_fronts_v1(%(queue)s::text, %(limit)s::integer) AS keyed) AS front
ORDER BY front.place, front.priority, front.enqueued_at, front.id LIMIT %(limit)s::integer

-- name: tasks_of_worker
-- The tasks in flight of one worker, oldest first, each with its newest heartbeat.
SELECT task.id::text, task.task_name, task.queue_name, task.status, task.worker_pid,
    extract(epoch FROM now() - coalesce(task.started_at, task.claimed_at))::float8 AS seconds,
    extract(epoch FROM now() - beat.sent_at)::float8 AS heartbeat_seconds
FROM horsies_tasks AS task LEFT JOIN LATERAL (
    SELECT heard.sent_at FROM horsies_heartbeats AS heard
    WHERE heard.task_id = task.id AND heard.role = 'runner'
    ORDER BY heard.sent_at DESC LIMIT 1) AS beat ON true
WHERE task.claimed_by_worker_id = %(worker_id)s AND task.status IN ('CLAIMED', 'RUNNING')
ORDER BY task.started_at NULLS LAST, task.id LIMIT %(limit)s::integer

-- name: memory_of_name
-- The private memory of the children that ran this task, from the lists of children in their workers' latest snapshots,
-- because attempts do not record memory. Async children are omitted, because they run several tasks in one process.
SELECT count(*) AS children, (percentile_disc(0.5) WITHIN GROUP (ORDER BY running.megabytes)) AS p50_mb,
    max(running.megabytes) AS most_mb
FROM (SELECT (child ->> 'private_mb')::float8 AS megabytes
      FROM horsies_workers AS worker CROSS JOIN LATERAL jsonb_array_elements(worker.children) AS child
      JOIN horsies_tasks AS task ON task.id = (child ->> 'task_id')::uuid
      WHERE worker.stopped_at IS NULL AND NOT child ? 'tasks' AND task.task_name = %(name)s::text) AS running
WHERE running.megabytes IS NOT NULL

-- name: read_worker_detail
-- A worker's children at its latest snapshot, the number of tasks that the worker knows, and the age of that snapshot.
SELECT worker.children, CASE WHEN worker.known_tasks IS NOT NULL THEN (
        SELECT count(*) FROM jsonb_object_keys(worker.known_tasks -> 'tasks')) END AS tasks_known,
    extract(epoch FROM now() - (
        SELECT state.snapshot_at FROM horsies_worker_states AS state
        WHERE state.worker_id = worker.worker_id ORDER BY state.snapshot_at DESC LIMIT 1))::float8
        AS snapshot_seconds
FROM horsies_workers AS worker WHERE worker.worker_id = %(worker_id)s

-- name: thinned_worker_history
-- One worker's snapshots since a given time, as one point per step.
SELECT date_bin(%(step)s::interval, state.snapshot_at, %(since)s::timestamptz) AS at,
    max(state.memory_usage_mb + coalesce(state.children_memory_mb, 0))::float8 AS memory_mb,
    avg(state.tasks_running)::float8 AS busy, avg(state.cpu_percent)::float8 AS cpu_percent
FROM horsies_worker_states AS state
WHERE state.worker_id = %(worker_id)s AND state.snapshot_at >= %(since)s::timestamptz
GROUP BY 1 ORDER BY 1

-- name: estimate_rows
-- The planner's estimate of the number of stored tasks (NULL before the first ANALYZE), and the server's version. The
-- parameter is the name of this schema's tasks table.
SELECT (SELECT CASE WHEN known.reltuples >= 0 THEN known.reltuples::float8 END FROM pg_class AS known
        WHERE known.oid = (SELECT task.tableoid FROM horsies_tasks AS task ORDER BY task.id LIMIT 1)) AS tasks,
    current_setting('server_version') AS server_version
