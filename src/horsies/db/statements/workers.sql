-- Statements on the workers' own records, and the search for tasks of dead workers by the reaper. The reaper has no
-- separate statements that change tasks: it records outcomes with the workers' statements, on behalf of the dead
-- worker.

-- name: register_worker
-- Store a worker's current row. A worker that was declared lost registers again under the same id.
INSERT INTO horsies_workers (
    worker_id, lock_key, hostname, pid, processes, queues, process_space, process_started, known_tasks,
    name, version, release)
VALUES (%(worker_id)s, %(lock_key)s, %(hostname)s, %(pid)s, %(processes)s, %(queues)s::varchar[],
    %(process_space)s, %(process_started)s, %(known_tasks)s::text::jsonb, %(name)s, %(version)s,
    %(release)s)
ON CONFLICT (worker_id) DO UPDATE SET seen_at = clock_timestamp(), stopped_at = NULL, was_lost = false

-- name: register_defaults
-- Store the settings from task decorators, for sends from SQL and for signals; the settings of the worker that started
-- last are used. Rows are written in name order, so that two workers that start at the same time do not deadlock. Rows
-- without a change are not written.
INSERT INTO horsies_task_defaults AS stored (
    task_name, queue_name, queues, retry_policy, max_retries, timeout_ms, is_async, burst, key_parameter,
    computes_key, fixed_key, is_durable, signals, encrypts, reject_bytes)
SELECT task.task_name, task.queue_name, task.queues, nullif(task.retry_policy, 'null'), task.max_retries,
    task.timeout_ms, task.is_async, task.burst, task.key_parameter, task.computes_key, task.fixed_key,
    task.is_durable, task.signals, task.encrypts, task.reject_bytes
FROM jsonb_to_recordset(%(defaults)s::text::jsonb) AS task (
    task_name text, queue_name text, queues jsonb, retry_policy jsonb, max_retries integer, timeout_ms integer,
    is_async boolean, burst boolean, key_parameter text, computes_key boolean, fixed_key text,
    is_durable boolean, signals text[], encrypts boolean, reject_bytes bigint)
ORDER BY task.task_name
ON CONFLICT (task_name) DO UPDATE SET queue_name = EXCLUDED.queue_name, queues = EXCLUDED.queues,
    retry_policy = EXCLUDED.retry_policy, max_retries = EXCLUDED.max_retries, timeout_ms = EXCLUDED.timeout_ms,
    is_async = EXCLUDED.is_async, burst = EXCLUDED.burst, key_parameter = EXCLUDED.key_parameter,
    computes_key = EXCLUDED.computes_key, fixed_key = EXCLUDED.fixed_key,
    is_durable = EXCLUDED.is_durable, signals = EXCLUDED.signals, encrypts = EXCLUDED.encrypts,
    reject_bytes = EXCLUDED.reject_bytes,
    updated_at = clock_timestamp()
WHERE (stored.queue_name, stored.queues, stored.retry_policy, stored.max_retries, stored.timeout_ms,
        stored.is_async, stored.burst, stored.key_parameter, stored.computes_key, stored.fixed_key,
        stored.is_durable, stored.signals, stored.encrypts, stored.reject_bytes)
    IS DISTINCT FROM (EXCLUDED.queue_name, EXCLUDED.queues, EXCLUDED.retry_policy, EXCLUDED.max_retries,
        EXCLUDED.timeout_ms, EXCLUDED.is_async, EXCLUDED.burst, EXCLUDED.key_parameter, EXCLUDED.computes_key,
        EXCLUDED.fixed_key, EXCLUDED.is_durable, EXCLUDED.signals, EXCLUDED.encrypts, EXCLUDED.reject_bytes)

-- name: store_lane_limits
-- Store the configured limits for all keys of a queue; the settings of the worker that started last are used. Rows
-- without a change are not written. The limits that operators gave to single keys are kept.
WITH limited AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(limits)s::text::jsonb) AS queue (
        queue_name text, max_concurrency integer, rate_seconds float8, rate_burst integer, weight float8,
        is_fifo boolean, halts boolean)),
lifted AS (
    DELETE FROM horsies_lanes AS stored
    WHERE stored.lane = 0 AND stored.queue_name = ANY(%(queues)s::text[])
      AND stored.queue_name NOT IN (SELECT limited.queue_name FROM limited))
INSERT INTO horsies_lanes AS stored (
    queue_name, lane, max_concurrency, rate_seconds, rate_burst, weight, is_fifo, halts)
SELECT limited.queue_name, 0, limited.max_concurrency, limited.rate_seconds, limited.rate_burst, limited.weight,
    limited.is_fifo, limited.halts
FROM limited ORDER BY limited.queue_name
ON CONFLICT (queue_name, lane) DO UPDATE SET
    max_concurrency = EXCLUDED.max_concurrency, rate_seconds = EXCLUDED.rate_seconds,
    rate_burst = EXCLUDED.rate_burst, weight = EXCLUDED.weight, is_fifo = EXCLUDED.is_fifo, halts = EXCLUDED.halts,
    updated_at = clock_timestamp()
WHERE (stored.max_concurrency, stored.rate_seconds, stored.rate_burst, stored.weight, stored.is_fifo, stored.halts)
    IS DISTINCT FROM (EXCLUDED.max_concurrency, EXCLUDED.rate_seconds, EXCLUDED.rate_burst, EXCLUDED.weight,
        EXCLUDED.is_fifo, EXCLUDED.halts)

-- name: store_task_rates
-- Store the rates in the application's task decorators: each is the rate of the key that all calls of a task share, in
-- every queue. The rates stored by other applications are kept, and so are the limits that operators set.
WITH known AS MATERIALIZED (
    SELECT queue.name AS queue_name, horsies_lane_v1(queue.name, task.key) AS lane, task.key, task.rate_seconds,
        task.rate_burst
    FROM unnest(%(queues)s::text[]) AS queue (name)
    CROSS JOIN jsonb_to_recordset(%(rates)s::text::jsonb) AS task (
        key text, rate_seconds float8, rate_burst integer)),
lifted AS (
    UPDATE horsies_lanes AS stored SET
        task_rate_seconds = NULL, task_rate_burst = NULL, updated_at = clock_timestamp()
    FROM known WHERE stored.queue_name = known.queue_name AND stored.lane = known.lane
      AND known.rate_seconds IS NULL AND stored.task_rate_seconds IS NOT NULL)
INSERT INTO horsies_lanes AS stored (queue_name, lane, lane_key, task_rate_seconds, task_rate_burst)
SELECT known.queue_name, known.lane, known.key, known.rate_seconds, known.rate_burst
FROM known WHERE known.rate_seconds IS NOT NULL ORDER BY known.queue_name, known.lane
ON CONFLICT (queue_name, lane) DO UPDATE SET
    task_rate_seconds = EXCLUDED.task_rate_seconds, task_rate_burst = EXCLUDED.task_rate_burst,
    updated_at = clock_timestamp()
WHERE (stored.task_rate_seconds, stored.task_rate_burst)
    IS DISTINCT FROM (EXCLUDED.task_rate_seconds, EXCLUDED.task_rate_burst)

-- name: take_worker_lock
-- Take the session lock that proves that this worker is alive; the server releases the lock when this connection ends.
SELECT pg_try_advisory_lock(%(lock_key)s) AS held

-- name: notice_lost_client
-- Make the server check whether this session's client is still reachable, because the lock of a worker with a lost host
-- or network must not be held for hours. This has no effect on Unix sockets.
SELECT set_config('tcp_keepalives_idle', %(idle_seconds)s::text, false) AS idle_seconds,
    set_config('tcp_keepalives_interval', %(interval_seconds)s::text, false) AS interval_seconds,
    set_config('tcp_keepalives_count', %(probes)s::text, false) AS probes,
    set_config('tcp_user_timeout', %(user_timeout_ms)s::text, false) AS user_timeout_ms

-- name: read_trigger_mode
-- Whether triggers fire in this session: a database or role may have session_replication_role = replica.
SELECT current_setting('session_replication_role') = 'replica' AS is_silent

-- name: end_earlier_session
-- End the session that holds this worker's lock, and wait up to a second until it has ended. A session that only probes
-- the lock holds it in shared mode and is left running.
SELECT pg_terminate_backend(held.pid, 1000) AS held FROM pg_locks AS held
WHERE held.locktype = 'advisory' AND held.mode = 'ExclusiveLock' AND held.granted AND held.objsubid = 1
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND held.classid::bigint << 32 | held.objid::bigint = %(lock_key)s AND held.pid <> pg_backend_pid()

-- name: see_worker
-- Store this worker's heartbeat. No row is returned if the worker's row was deleted, and a row with a stop time if the
-- worker was declared lost. With "calls", all workers are notified, including this worker, which thereby tests whether
-- notifications arrive. Not every heartbeat sends a notification, because it wakes every listening session. The commit
-- does not wait for the disk, which halves the cost of a heartbeat: if the server crashes, losing the latest heartbeat
-- does no harm. Parameters: whether the worker receives notifications, whether it waits for tasks, and whether it sends
-- a notification to test that.
WITH seen AS (
    UPDATE horsies_workers SET seen_at = clock_timestamp(), hears = %(hears)s, waits = %(waits)s
    WHERE worker_id = %(worker_id)s
    RETURNING worker_id::text, stopped_at IS NOT NULL AS was_stopped, seen_at)
SELECT seen.worker_id, seen.was_stopped, seen.seen_at FROM seen
CROSS JOIN LATERAL set_config('synchronous_commit', 'off', true) AS relaxed
LEFT JOIN LATERAL (SELECT pg_notify('horsies_echo', '') WHERE %(calls)s::boolean) AS called ON true

-- name: wait_for_tasks
-- Record that this worker has become idle, so that sends may wake it. If the row is locked, the next heartbeat records
-- it instead.
UPDATE horsies_workers SET waits = true WHERE worker_id = (
    SELECT worker_id FROM horsies_workers WHERE worker_id = %(worker_id)s FOR UPDATE SKIP LOCKED)

-- name: pass_wake_up
-- Pass on wake-ups for these queues that this worker cannot serve.
SELECT horsies_pass_wake_up_v1(%(worker_id)s, %(queues)s::text[]) AS woken

-- name: read_own_row
-- Whether this worker was declared lost, for use while the database refuses its heartbeats. This is a plain read, which
-- neither a locked row nor a trigger can block.
SELECT stopped_at IS NOT NULL AS was_stopped FROM horsies_workers WHERE worker_id = %(worker_id)s

-- name: record_worker_stop
-- A graceful shutdown.
UPDATE horsies_workers SET stopped_at = clock_timestamp(), was_lost = false
WHERE worker_id = %(worker_id)s AND stopped_at IS NULL
RETURNING worker_id::text

-- name: watch_workers
-- Other workers' last heartbeats, and whether their session locks are free. All workers form a ring in id order, and
-- the workers of each process space form a second ring. An observer checks the next two workers of each ring regardless
-- of their heartbeats. Among the next hundred workers (first ring) and the next twenty (second ring), it also checks
-- those with a late heartbeat, so that the cost does not grow with the number of workers and workers that died together
-- with their neighbours are found too. The clock only decides which workers to check; a heartbeat with a time in the
-- future (after the server's clock was set back) counts as late. A probe takes the lock in shared mode, so an observer
-- does not mistake another observer's probe for a live worker. The index horsies_workers_ring contains the open workers
-- in id order. Parameters: the observer, and the age from which a heartbeat is late.
WITH near AS (
    (SELECT ring.*, row_number() OVER () AS place FROM (
        (SELECT worker_id, lock_key, hostname, pid, process_space, process_started, seen_at FROM horsies_workers
         WHERE stopped_at IS NULL AND worker_id > %(worker_id)s ORDER BY worker_id LIMIT 100)
        UNION ALL
        (SELECT worker_id, lock_key, hostname, pid, process_space, process_started, seen_at FROM horsies_workers
         WHERE stopped_at IS NULL AND worker_id < %(worker_id)s ORDER BY worker_id LIMIT 100)) AS ring LIMIT 100)
    UNION ALL
    (SELECT space.*, row_number() OVER () FROM (
        (SELECT worker_id, lock_key, hostname, pid, process_space, process_started, seen_at FROM horsies_workers
         WHERE stopped_at IS NULL AND process_space = %(process_space)s::text AND worker_id > %(worker_id)s
         ORDER BY worker_id LIMIT 20)
        UNION ALL
        (SELECT worker_id, lock_key, hostname, pid, process_space, process_started, seen_at FROM horsies_workers
         WHERE stopped_at IS NULL AND process_space = %(process_space)s::text AND worker_id < %(worker_id)s
         ORDER BY worker_id LIMIT 20)) AS space LIMIT 20)),
other AS MATERIALIZED (
    SELECT DISTINCT worker_id, lock_key, hostname, pid, process_space, process_started, seen_at FROM near
    WHERE place <= 2 OR seen_at > clock_timestamp()
        OR seen_at < clock_timestamp() - %(late_seconds)s::float8 * interval '1 second')
SELECT worker_id::text, seen_at::text AS sign, hostname::text, pid, process_space, process_started,
    pg_try_advisory_xact_lock_shared(lock_key) AS lock_is_free
FROM other ORDER BY seen_at

-- name: find_active_sessions
-- The workers in this list whose session lock is held by a session that has executed a statement within the given time.
-- Such a worker is alive, even if its row is locked or the server is too slow for its turns. A role without
-- pg_read_all_stats sees no times for other roles' sessions. Parameters: workers, and the age of an active session's
-- latest statement.
SELECT worker.worker_id::text FROM horsies_workers AS worker
JOIN pg_locks AS held ON held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
    AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND held.classid::bigint << 32 | held.objid::bigint = worker.lock_key
JOIN pg_stat_activity AS session ON session.pid = held.pid
WHERE worker.worker_id = ANY(%(worker_ids)s::text[])
  AND greatest(session.query_start, session.state_change)
      > clock_timestamp() - %(seconds)s::float8 * interval '1 second'

-- name: close_lost_workers
-- Close the rows of lost workers. A worker is skipped if it has proved to be alive since (its heartbeat has changed, or
-- its lock is held again), or if it has no task that needs recovery. Parameters: workers found lost: their last
-- heartbeats, and the conditions that must still hold.
WITH watched AS MATERIALIZED (
    SELECT worker.worker_id, worker.lock_key, found.needs_free_lock, found.needs_tasks
    FROM unnest(%(worker_ids)s::text[], %(signs)s::text[], %(needs_free_lock)s::boolean[],
                %(needs_tasks)s::boolean[]) AS found (worker_id, sign, needs_free_lock, needs_tasks)
    JOIN horsies_workers AS worker ON worker.worker_id = found.worker_id
        AND worker.seen_at = found.sign::timestamptz
    WHERE worker.stopped_at IS NULL
    FOR UPDATE OF worker SKIP LOCKED),
lost AS MATERIALIZED (
    SELECT worker_id FROM watched
    WHERE (NOT needs_free_lock OR pg_try_advisory_xact_lock_shared(lock_key))
      AND (NOT needs_tasks OR EXISTS (
            SELECT 1 FROM horsies_tasks AS task WHERE task.status IN ('CLAIMED', 'RUNNING')
              AND task.claimed_by_worker_id = watched.worker_id)))
UPDATE horsies_workers AS worker SET stopped_at = clock_timestamp(), was_lost = true
FROM lost WHERE worker.worker_id = lost.worker_id
RETURNING worker.worker_id::text

-- name: find_abandoned
-- Tasks in flight on these workers, by the in-flight index. Rows locked by another transaction are skipped and found by
-- a later search, because this search must not wait for them.
SELECT id::text, generation, task_name, queue_name, retry_count, max_retries, task_options, worker_pid,
    status, claimed_by_worker_id::text AS worker_id, workflow_id::text
FROM horsies_tasks
WHERE status IN ('CLAIMED', 'RUNNING') AND claimed_by_worker_id = ANY(%(worker_ids)s::text[])
  AND status = ANY(%(statuses)s::text[]) AND id <> ALL(%(excluded)s::uuid[])
ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED

-- name: find_ownerless
-- Tasks of workers whose row is closed but whose recovery did not finish, and tasks of workers without a row that have
-- had no heartbeat for the threshold of their state. The row may be missing because the worker was never registered,
-- because the row was deleted, or because a manual edit removed the worker's id. A manual edit may even have removed
-- all times of the task. Parameters: the maximum age of the last heartbeat, by state.
SELECT task.id::text, task.generation, task.task_name, task.queue_name, task.retry_count, task.max_retries,
    task.task_options, task.worker_pid, task.status,
    task.claimed_by_worker_id::text AS worker_id, task.workflow_id::text
FROM horsies_tasks AS task
LEFT JOIN horsies_workers AS worker ON worker.worker_id = task.claimed_by_worker_id
WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.status = ANY(%(statuses)s::text[])
  AND (worker.stopped_at IS NOT NULL
       OR worker.worker_id IS NULL AND coalesce(greatest(task.claimed_at, task.started_at, (
        SELECT max(beat.sent_at) FROM horsies_heartbeats AS beat
        WHERE beat.task_id = task.id AND beat.sent_at >= task.claimed_at)
      ), task.updated_at) < now() - CASE task.status WHEN 'CLAIMED' THEN %(claimed_seconds)s::float8
                                   ELSE %(running_seconds)s::float8 END * interval '1 second')
  AND task.id <> ALL(%(excluded)s::uuid[])
ORDER BY task.id LIMIT %(limit)s FOR UPDATE OF task SKIP LOCKED

-- name: find_stale
-- Tasks in these states without a heartbeat for the given time. The times that count as a heartbeat are the claim, the
-- start, the heartbeats of this attempt and the heartbeats of the worker. For a registered worker, which may need time
-- to reconnect, the start of the server counts too. A worker that holds its session lock is alive.
WITH locked AS MATERIALIZED (
    SELECT held.classid::bigint << 32 | held.objid::bigint AS lock_key FROM pg_locks AS held
    WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
      AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT task.id::text, task.generation, task.task_name, task.queue_name, task.retry_count, task.max_retries,
    task.task_options, task.worker_pid, task.status,
    task.claimed_by_worker_id::text AS worker_id, task.workflow_id::text
FROM horsies_tasks AS task
LEFT JOIN horsies_workers AS worker
    ON worker.worker_id = task.claimed_by_worker_id AND worker.stopped_at IS NULL
WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.status = ANY(%(statuses)s::text[])
  AND coalesce(greatest(task.claimed_at, task.started_at, worker.seen_at,
        CASE WHEN worker.worker_id IS NOT NULL THEN pg_postmaster_start_time() END, (
        SELECT max(beat.sent_at) FROM horsies_heartbeats AS beat
        WHERE beat.task_id = task.id AND beat.sent_at >= task.claimed_at)
      ), task.updated_at) < now() - %(stale_seconds)s::float8 * interval '1 second'
  AND NOT EXISTS (SELECT 1 FROM locked WHERE locked.lock_key = worker.lock_key)
  AND task.id <> ALL(%(excluded)s::uuid[])
ORDER BY task.id LIMIT %(limit)s

-- name: find_owned
-- The attempts in this list, one per task, that the worker still owns (idiom "by position", see
-- functions/20_claim.sql).
SELECT task.id::text FROM horsies_tasks AS task
WHERE task.id = ANY(%(ids)s::uuid[])
  AND task.generation = (%(generations)s::integer[])[array_position(%(ids)s::uuid[], task.id)]
  AND task.claimed_by_worker_id = %(worker_id)s AND task.status IN ('CLAIMED', 'RUNNING')

-- name: wake_queues
-- Notify the workers of these queues that a place under a cap may be free now.
SELECT queue.name FROM unnest(%(queues)s::text[]) AS queue (name)
CROSS JOIN LATERAL pg_notify('task_queue_' || queue.name, '') AS woken

-- name: try_lead
-- Take the lock of a job that only one worker does at a time; a worker that does not get the lock skips the job.
-- Parameters: the advisory lock key of the job.
SELECT pg_try_advisory_xact_lock(1751348596, %(job)s) AS leads

-- name: store_worker_state
-- Store a snapshot of this worker, and replace the stored state of its children.
WITH worker AS (
    UPDATE horsies_workers SET children = %(children)s::text::jsonb WHERE worker_id = %(worker_id)s
    RETURNING *)
INSERT INTO horsies_worker_states (
    worker_id, hostname, pid, processes, queues, tasks_running, tasks_claimed, memory_usage_mb, cpu_percent,
    memory_percent, children_memory_mb, max_claim_batch, max_claim_per_worker, cluster_wide_cap,
    queue_priorities, queue_max_concurrency, recovery_config, hears, worker_started_at)
SELECT worker_id, hostname, pid, processes, queues, %(tasks_running)s, %(tasks_claimed)s, %(memory_usage_mb)s,
    %(cpu_percent)s, %(memory_percent)s, %(children_memory_mb)s, %(max_claim_batch)s,
    %(max_claim_per_worker)s, %(cluster_wide_cap)s, %(queue_priorities)s::text::jsonb,
    %(queue_max_concurrency)s::text::jsonb, %(recovery_config)s::text::jsonb, hears, started_at
FROM worker

-- name: delete_old_heartbeats
-- Delete old heartbeats. Parameters: the maximum age, and how many rows to delete at most.
DELETE FROM horsies_heartbeats WHERE id = ANY(ARRAY(
    SELECT id FROM horsies_heartbeats WHERE sent_at < now() - %(hours)s * interval '1 hour'
    ORDER BY id LIMIT %(limit)s))
RETURNING id::text

-- name: delete_old_worker_states
DELETE FROM horsies_worker_states WHERE id = ANY(ARRAY(
    SELECT id FROM horsies_worker_states WHERE snapshot_at < now() - %(hours)s * interval '1 hour'
    ORDER BY id LIMIT %(limit)s))
RETURNING id::text

-- name: delete_old_workers
DELETE FROM horsies_workers WHERE worker_id = ANY(ARRAY(
    SELECT worker_id FROM horsies_workers WHERE stopped_at < now() - %(hours)s * interval '1 hour'
    LIMIT %(limit)s))
RETURNING worker_id::text AS id

-- name: delete_old_meters
-- Delete the meters of keys whose rate has allowed the next start for at least this many hours; such a meter no longer
-- limits any start.
DELETE FROM horsies_meters WHERE ctid = ANY(ARRAY(
    SELECT old.ctid FROM horsies_meters AS old
    WHERE old.lane <> 0 AND old.next_at < now() - %(hours)s * interval '1 hour'
    LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING queue_name::text AS id

-- name: delete_old_logs
DELETE FROM horsies_task_logs WHERE id = ANY(ARRAY(
    SELECT id FROM horsies_task_logs WHERE created_at < now() - %(hours)s * interval '1 hour'
    ORDER BY id LIMIT %(limit)s))
RETURNING id::text

-- name: delete_old_tasks
-- Delete ended tasks past their retention, oldest ids first. An id begins with its time, so the scan reads only old
-- tasks, and the time in the row decides. Tasks with their own retention are skipped, at about 0.3 us each. Attempts
-- are deleted with their tasks.
DELETE FROM horsies_tasks WHERE id = ANY(ARRAY(
    SELECT id FROM horsies_tasks
    WHERE id < (lpad(to_hex((extract(epoch FROM now() - %(hours)s * interval '1 hour') * 1000)::bigint),
                12, '0') || repeat('0', 20))::uuid
      AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      AND workflow_id IS NULL AND retention IS NULL
      AND coalesce(completed_at, failed_at, updated_at) < now() - %(hours)s * interval '1 hour'
    ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING id::text

-- name: delete_old_untimed_tasks
-- Delete ended tasks past their retention whose ids are not UUIDv7 and so contain no time, by the index for these
-- tasks.
DELETE FROM horsies_tasks WHERE id = ANY(ARRAY(
    SELECT id FROM horsies_tasks
    WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      AND workflow_id IS NULL AND retention IS NULL AND substr(id::text, 15, 1) <> '7'
      AND coalesce(completed_at, failed_at, updated_at) < now() - %(hours)s * interval '1 hour'
    ORDER BY coalesce(completed_at, failed_at, updated_at) LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING id::text

-- name: delete_kept_tasks
-- Delete ended tasks past their own retention, which their send or queue has set, by the index for these tasks.
-- Parameters: how many rows to delete at most.
DELETE FROM horsies_tasks WHERE id = ANY(ARRAY(
    SELECT id FROM horsies_tasks
    WHERE retention IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      AND workflow_id IS NULL
      AND coalesce(completed_at, failed_at, updated_at) AT TIME ZONE 'UTC' + retention
          < now() AT TIME ZONE 'UTC'
    ORDER BY coalesce(completed_at, failed_at, updated_at) AT TIME ZONE 'UTC' + retention
    LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING id::text
