-- Statements for operators. No statement scans the history: open states come from partial indexes, rates from the
-- newest attempts, and lists from the end of the primary key, because ids begin with a time.

-- name: count_waiting
-- The number of PENDING tasks by queue, from the claim index and from the indexes of tasks with keys. For every queue
-- and priority, one index probe finds the task that has been due longest, regardless of how many tasks wait. Pairs of
-- queue and priority beyond the first 5,000 are omitted. Due and delayed tasks are counted only up to one more than
-- "most" per queue, so a queue of a million tasks costs as much as a queue of ten thousand. The ORDER BY clauses keep a
-- plan made on an empty table from reading the whole table later.
WITH RECURSIVE heads AS (
    (SELECT queue_name, priority, enqueued_at FROM horsies_tasks
     WHERE status = 'PENDING' AND NOT held ORDER BY queue_name, priority, enqueued_at LIMIT 1)
    UNION ALL
    SELECT following.* FROM heads CROSS JOIN LATERAL (
        SELECT task.queue_name, task.priority, task.enqueued_at FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held
          AND (task.queue_name, task.priority) > (heads.queue_name, heads.priority)
        ORDER BY task.queue_name, task.priority, task.enqueued_at LIMIT 1) AS following),
queues AS MATERIALIZED (
    SELECT queue_name, array_agg(priority) AS priorities,
        min(enqueued_at) FILTER (WHERE enqueued_at <= now()) AS oldest_due_at
    FROM (SELECT * FROM heads LIMIT 5000) AS seen GROUP BY queue_name)
SELECT counted.queue_name, sum(counted.due)::bigint AS due, sum(counted.delayed)::bigint AS delayed,
    extract(epoch FROM now() - min(counted.oldest_due_at))::float8 AS oldest_waiting_seconds
FROM (SELECT queue.queue_name::text, (
    SELECT count(*) FROM (
        SELECT FROM unnest(queue.priorities) AS level CROSS JOIN LATERAL (
            SELECT FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue.queue_name
              AND task.priority = level AND task.enqueued_at <= now()
            ORDER BY task.enqueued_at LIMIT %(most)s::integer + 1) AS found
        LIMIT %(most)s::integer + 1) AS counted) AS due, (
    SELECT count(*) FROM (
        SELECT FROM unnest(queue.priorities) AS level CROSS JOIN LATERAL (
            SELECT FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue.queue_name
              AND task.priority = level AND task.enqueued_at > now()
            ORDER BY task.enqueued_at LIMIT %(most)s::integer + 1) AS found
        LIMIT %(most)s::integer + 1) AS counted) AS delayed, queue.oldest_due_at
FROM queues AS queue
UNION ALL
SELECT keyed.* FROM horsies_count_keyed_v1(NULL, %(most)s::integer + 1) AS keyed) AS counted
GROUP BY counted.queue_name

-- name: count_in_flight
-- The number of CLAIMED and RUNNING tasks by queue, from the in-flight index.
SELECT queue_name, count(*) FILTER (WHERE status = 'CLAIMED') AS claimed,
    count(*) FILTER (WHERE status = 'RUNNING') AS running
FROM horsies_tasks WHERE status IN ('CLAIMED', 'RUNNING') GROUP BY queue_name

-- name: count_recent_attempts
-- Attempts that ended during the last minute, by queue. At most the newest "sample" attempts are read; on a busy system
-- they cover less than a minute, and "covered_seconds" is the time that they cover. The queue of an attempt is a scalar
-- subquery, because a join might be planned as a hash over the whole history.
WITH newest AS MATERIALIZED (
    SELECT task_id, outcome, will_retry, error_code, finished_at
    FROM horsies_task_attempts ORDER BY id DESC LIMIT %(sample)s::integer),
recent AS MATERIALIZED (
    SELECT (SELECT task.queue_name FROM horsies_tasks AS task WHERE task.id = newest.task_id) AS queue_name,
        outcome, will_retry, coalesce(error_code, '') AS error_code, finished_at
    FROM newest WHERE finished_at > now() - interval '1 minute'),
covered AS MATERIALIZED (
    SELECT CASE WHEN count(*) < %(sample)s::integer THEN 60
                ELSE greatest(extract(epoch FROM now() - min(finished_at)), 0.1) END::float8 AS seconds
    FROM recent)
SELECT recent.queue_name, covered.seconds AS covered_seconds,
    count(*) FILTER (WHERE outcome = 'COMPLETED') AS done,
    count(*) FILTER (WHERE outcome <> 'COMPLETED' AND NOT will_retry AND error_code <> 'TASK_CANCELLED')
        AS failed,
    count(*) FILTER (WHERE will_retry) AS retried
FROM recent CROSS JOIN covered WHERE recent.queue_name IS NOT NULL GROUP BY recent.queue_name, covered.seconds

-- name: list_queue_states
-- Queues that an operator has paused or resumed at least once.
SELECT queue_name AS name, paused_at FROM horsies_queues

-- name: list_known_queues
-- The known queue names: queues that were paused or resumed before, are served by a worker, or contain tasks. Each
-- queue with waiting tasks costs one index probe.
WITH RECURSIVE waiting AS (
    (SELECT queue_name FROM horsies_tasks
     WHERE status = 'PENDING' AND NOT held ORDER BY queue_name LIMIT 1)
    UNION ALL
    SELECT (SELECT task.queue_name FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name > waiting.queue_name
            ORDER BY task.queue_name LIMIT 1)
    FROM waiting WHERE waiting.queue_name IS NOT NULL)
SELECT queue_name::text AS name FROM horsies_queues
UNION SELECT unnest(queues)::text FROM horsies_workers WHERE stopped_at IS NULL
UNION SELECT queue_name::text FROM waiting WHERE queue_name IS NOT NULL
UNION SELECT keyed.queue_name FROM horsies_count_keyed_v1(NULL, 1) AS keyed
UNION SELECT queue_name::text FROM horsies_tasks WHERE status IN ('CLAIMED', 'RUNNING')
ORDER BY name

-- name: list_workers
-- Workers with their newest snapshots and their tasks in flight: every worker that has not shut down, all workers on
-- record, or one worker. A task whose code has ended but whose outcome the database refuses occupies no child. pg_locks
-- shows a worker's 64-bit lock key as two parts. In a snapshot's list of children, only async children have a number of
-- "tasks"; all slots of a worker belong to its async children, except one for each other child.
SELECT worker.worker_id, worker.hostname, worker.pid, worker.processes, worker.queues::text[] AS queues,
    worker.started_at, worker.seen_at, worker.stopped_at, worker.was_lost, worker.hears,
    extract(epoch FROM now() - worker.seen_at)::float8 AS seen_seconds_ago,
    EXISTS (
        SELECT 1 FROM pg_locks AS held
        WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
          AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND (held.classid::bigint << 32 | held.objid::bigint) = worker.lock_key) AS holds_lock,
    (SELECT count(*) FROM horsies_tasks AS task
     WHERE task.claimed_by_worker_id = worker.worker_id AND task.status IN ('CLAIMED', 'RUNNING')
       AND task.status = 'RUNNING' AND NOT EXISTS (
           SELECT FROM horsies_blocked AS blocked
           WHERE blocked.id = task.id AND blocked.kind = 'task' AND blocked.generation = task.generation
             AND blocked.status = task.status AND blocked.action = 'record')) AS tasks_running,
    (SELECT count(*) FROM horsies_tasks AS task
     WHERE task.claimed_by_worker_id = worker.worker_id AND task.status IN ('CLAIMED', 'RUNNING')
       AND task.status = 'CLAIMED') AS tasks_claimed,
    newest.memory_usage_mb, newest.children_memory_mb, newest.cpu_percent, newest.cluster_wide_cap,
    newest.queue_max_concurrency AS queue_caps, worker.name,
    CASE WHEN worker.children @? '$[*].tasks' THEN worker.processes - (
        SELECT count(*) FROM jsonb_array_elements(worker.children) AS child WHERE NOT child ? 'tasks')
        ELSE 0 END AS async_places,
    CASE WHEN worker.children @? '$[*].tasks' THEN (
        SELECT count(*) FROM horsies_tasks AS task
        WHERE task.claimed_by_worker_id = worker.worker_id AND task.status IN ('CLAIMED', 'RUNNING')
          AND task.status = 'RUNNING' AND task.task_options LIKE '{"async":true%%') ELSE 0 END AS async_running,
    (SELECT sum((child ->> 'private_mb')::float8) FROM jsonb_array_elements(worker.children) AS child)
        AS children_private_mb
FROM horsies_workers AS worker LEFT JOIN LATERAL (
    SELECT state.memory_usage_mb, state.children_memory_mb, state.cpu_percent, state.cluster_wide_cap,
        state.queue_max_concurrency
    FROM horsies_worker_states AS state
    WHERE state.worker_id = worker.worker_id ORDER BY state.snapshot_at DESC LIMIT 1) AS newest ON true
WHERE (worker.stopped_at IS NULL OR %(include_stopped)s::boolean)
  AND (%(worker_id)s::text IS NULL OR worker.worker_id = %(worker_id)s::text)
ORDER BY worker.stopped_at IS NOT NULL, worker.seen_at DESC, worker.worker_id LIMIT 1000

-- name: list_newest_tasks
-- The newest tasks, from the end of the primary key. The inner LIMIT bounds the cost of a filter that matches nothing;
-- the outer LIMIT ends the scan as soon as there are enough rows. "ORDER BY id" would sort by text. Parameters: the
-- same filters, over the newest "window" tasks only.
SELECT id::text, task_name, queue_name, status, retry_count, max_retries, error_code, created_at, enqueued_at,
    started_at, finished_at, worker_hostname, worker_pid,
    extract(epoch FROM now() - created_at)::float8 AS age_seconds
FROM (
    SELECT id, task_name, queue_name, status, retry_count, max_retries, error_code, created_at, enqueued_at,
        started_at, coalesce(completed_at, failed_at) AS finished_at, worker_hostname, worker_pid,
        claimed_by_worker_id
    FROM horsies_tasks WHERE id < %(before)s::uuid AND id >= %(since)s::uuid
    ORDER BY id DESC LIMIT %(window)s::integer) AS newest
WHERE (cardinality(%(statuses)s::text[]) = 0 OR status = ANY(%(statuses)s::text[]))
  AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
  AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
  AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
  AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
       OR worker_hostname = ANY(%(workers)s::text[]))
  AND (NOT %(retried_only)s::boolean OR retry_count > 0)
ORDER BY newest.id DESC LIMIT %(limit)s::integer

-- name: end_of_window
-- The end of the window of list_newest_tasks: the last id inside the window and the first id beyond it; fewer rows at
-- the end of the table. Parameters: the part of the primary key that list_newest_tasks has read.
SELECT task.id::text FROM horsies_tasks AS task
WHERE task.id < %(before)s::uuid AND task.id >= %(since)s::uuid
ORDER BY task.id DESC OFFSET %(window)s::integer - 1 LIMIT 2

-- name: list_live_tasks
-- All waiting and running tasks of any age, from the two partial indexes; tasks held by a paused workflow are found
-- through the open runs. The ids are collected first, then limited and sorted; otherwise the planner might search for
-- these tasks by walking the primary key through the whole history.
WITH live AS MATERIALIZED (
    SELECT id FROM horsies_keyed_tasks_v1(nullif(%(queues)s::text[], '{}'))
    WHERE 'PENDING' = ANY(%(statuses)s::text[])
      AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
      AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
      AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
           OR worker_hostname = ANY(%(workers)s::text[]))
      AND (NOT %(retried_only)s::boolean OR retry_count > 0)
    UNION ALL
    SELECT id FROM horsies_tasks
    WHERE status = 'PENDING' AND NOT held AND 'PENDING' = ANY(%(statuses)s::text[])
      AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
      AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
      AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
      AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
           OR worker_hostname = ANY(%(workers)s::text[]))
      AND (NOT %(retried_only)s::boolean OR retry_count > 0)
    UNION ALL
    SELECT kept.id FROM horsies_workflows AS run CROSS JOIN LATERAL (
        SELECT id FROM horsies_tasks
        WHERE workflow_id = run.id AND status = 'PENDING' AND held AND lane IS NULL
          AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
          AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
          AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
          AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
               OR worker_hostname = ANY(%(workers)s::text[]))
          AND (NOT %(retried_only)s::boolean OR retry_count > 0)
        OFFSET 0) AS kept
    WHERE run.status IN ('PENDING', 'RUNNING', 'PAUSED') AND 'PENDING' = ANY(%(statuses)s::text[])
    UNION ALL
    SELECT id FROM horsies_tasks
    WHERE status IN ('CLAIMED', 'RUNNING') AND status = ANY(%(statuses)s::text[])
      AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
      AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
      AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
      AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
           OR worker_hostname = ANY(%(workers)s::text[]))
      AND (NOT %(retried_only)s::boolean OR retry_count > 0))
SELECT task.id::text, task_name, queue_name, status, retry_count, max_retries, error_code, created_at,
    enqueued_at, started_at, coalesce(completed_at, failed_at) AS finished_at, worker_hostname, worker_pid,
    extract(epoch FROM now() - created_at)::float8 AS age_seconds
FROM horsies_tasks AS task
WHERE task.id = ANY(ARRAY(
    SELECT live.id FROM live WHERE live.id < %(before)s::uuid AND live.id >= %(since)s::uuid
    ORDER BY live.id DESC LIMIT %(limit)s::integer))
ORDER BY task.id DESC

-- name: list_tasks_by_error
-- All tasks that ended with one of these error codes, regardless of age, from the index on error codes.
WITH failed AS MATERIALIZED (
    SELECT id FROM horsies_tasks
    WHERE error_code IS NOT NULL AND error_code = ANY(%(error_codes)s::text[])
      AND (cardinality(%(statuses)s::text[]) = 0 OR status = ANY(%(statuses)s::text[]))
      AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
      AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
      AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
           OR worker_hostname = ANY(%(workers)s::text[]))
      AND (NOT %(retried_only)s::boolean OR retry_count > 0))
SELECT task.id::text, task_name, queue_name, status, retry_count, max_retries, error_code, created_at,
    enqueued_at, started_at, coalesce(completed_at, failed_at) AS finished_at, worker_hostname, worker_pid,
    extract(epoch FROM now() - created_at)::float8 AS age_seconds
FROM horsies_tasks AS task
WHERE task.id = ANY(ARRAY(
    SELECT failed.id FROM failed WHERE failed.id < %(before)s::uuid AND failed.id >= %(since)s::uuid
    ORDER BY failed.id DESC LIMIT %(limit)s::integer))
ORDER BY task.id DESC

-- name: list_tasks_by_fingerprint
-- The tasks whose final failure has this fingerprint, regardless of age, by the index on fingerprints.
SELECT task.id::text, task_name, queue_name, status, retry_count, max_retries, error_code, created_at,
    enqueued_at, started_at, coalesce(completed_at, failed_at) AS finished_at, worker_hostname, worker_pid,
    extract(epoch FROM now() - created_at)::float8 AS age_seconds
FROM horsies_tasks AS task
WHERE task.fingerprint = %(fingerprint)s::text AND task.id < %(before)s::uuid AND task.id >= %(since)s::uuid
  AND (cardinality(%(statuses)s::text[]) = 0 OR status = ANY(%(statuses)s::text[]))
  AND (cardinality(%(queues)s::text[]) = 0 OR queue_name = ANY(%(queues)s::text[]))
  AND (cardinality(%(names)s::text[]) = 0 OR task_name = ANY(%(names)s::text[]))
  AND (cardinality(%(error_codes)s::text[]) = 0 OR error_code = ANY(%(error_codes)s::text[]))
  AND (cardinality(%(workers)s::text[]) = 0 OR claimed_by_worker_id = ANY(%(workers)s::text[])
       OR worker_hostname = ANY(%(workers)s::text[]))
  AND (NOT %(retried_only)s::boolean OR retry_count > 0)
ORDER BY task.id DESC LIMIT %(limit)s::integer

-- name: read_task_detail
-- All columns of one task, by primary key; arguments and result only on request.
SELECT id::text, task_name, queue_name, status, priority, retry_count, max_retries, next_retry_at, timeout_ms,
    good_until, held, sent_at, created_at, enqueued_at, claimed_at, started_at, completed_at, failed_at,
    cancel_requested_at, error_code, failed_reason, generation, claimed_by_worker_id, worker_hostname,
    worker_pid, worker_process_name, idempotency_key, retried_from_task_id::text, workflow_id::text,
    schedule_name, scheduled_for, task_options,
    CASE WHEN %(payload)s::boolean THEN args END AS args,
    CASE WHEN %(payload)s::boolean THEN kwargs END AS kwargs,
    CASE WHEN %(payload)s::boolean THEN result END AS result,
    extract(epoch FROM now() - created_at)::float8 AS age_seconds, redacted_at
FROM horsies_tasks WHERE id = %(id)s::uuid

-- name: read_rights
-- The privileges of this session's role on the schema and its tables; missing privileges are written in GRANT syntax.
-- Reads only the catalog.
SELECT current_user::text AS role_name, to_regnamespace(%(schema)s::text) IS NOT NULL AS has_schema,
    coalesce(has_schema_privilege(to_regnamespace(%(schema)s::text)::oid, 'USAGE'), false) AS can_use,
    coalesce(has_schema_privilege(to_regnamespace(%(schema)s::text)::oid, 'CREATE'),
        has_database_privilege(current_database(), 'CREATE')) AS can_create,
    coalesce((SELECT bool_and(pg_has_role(relation.relowner, 'USAGE')) FROM pg_class AS relation
        WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND relation.relkind = 'r'
          AND starts_with(relation.relname, 'horsies_')), true) AS is_owner,
    ARRAY(SELECT privilege || ' ON ' || relation.relname
        FROM pg_class AS relation, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
        WHERE relation.relnamespace = to_regnamespace(%(schema)s::text)::oid AND relation.relkind = 'r'
          AND starts_with(relation.relname, 'horsies_')
          AND NOT has_table_privilege(relation.oid, privilege)
        ORDER BY relation.relname, privilege) AS missing

-- name: newest_worker_states
-- The newest snapshot of every worker: two index probes per worker, instead of a scan of all snapshots.
WITH RECURSIVE known AS (
    (SELECT worker_id FROM horsies_worker_states ORDER BY worker_id LIMIT 1)
    UNION ALL
    SELECT (SELECT following.worker_id FROM horsies_worker_states AS following
            WHERE following.worker_id > known.worker_id ORDER BY following.worker_id LIMIT 1)
    FROM known WHERE known.worker_id IS NOT NULL)
SELECT state.id, state.worker_id, state.snapshot_at, state.hostname, state.pid, state.processes,
    state.queues::text[] AS queues, state.tasks_running, state.tasks_claimed, state.memory_usage_mb,
    state.cpu_percent, state.memory_percent, state.children_memory_mb, state.max_claim_batch,
    state.max_claim_per_worker, state.cluster_wide_cap, state.queue_priorities, state.queue_max_concurrency,
    state.recovery_config, state.hears, state.worker_started_at
FROM known CROSS JOIN LATERAL (
    SELECT * FROM horsies_worker_states AS snapshot
    WHERE snapshot.worker_id = known.worker_id ORDER BY snapshot.snapshot_at DESC LIMIT 1) AS state
ORDER BY state.snapshot_at DESC, state.worker_id

-- name: worker_state_history
-- One worker's snapshots, newest first, by the index on (worker_id, snapshot_at). Parameters: a worker, and how many
-- of its newest snapshots to read; NULL for all.
SELECT id, worker_id, snapshot_at, hostname, pid, processes, queues::text[] AS queues, tasks_running,
    tasks_claimed, memory_usage_mb, cpu_percent, memory_percent, children_memory_mb, max_claim_batch,
    max_claim_per_worker, cluster_wide_cap, queue_priorities, queue_max_concurrency, recovery_config, hears,
    worker_started_at
FROM horsies_worker_states WHERE worker_id = %(worker_id)s ORDER BY snapshot_at DESC LIMIT %(limit)s::bigint

-- name: find_stale_tasks
-- RUNNING tasks without a heartbeat for longer than the threshold. The start of a task counts as its first heartbeat.
SELECT task.id::text, task.worker_hostname, task.worker_pid, task.worker_process_name,
    beat.sent_at AS last_heartbeat, task.started_at, task.task_name
FROM horsies_tasks AS task LEFT JOIN LATERAL (
    SELECT heard.sent_at FROM horsies_heartbeats AS heard
    WHERE heard.task_id = task.id AND heard.role = 'runner'
    ORDER BY heard.sent_at DESC LIMIT 1) AS beat ON true
WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.status = 'RUNNING'
  AND greatest(beat.sent_at, task.started_at) < now() - %(threshold_seconds)s::float8 * interval '1 second'
ORDER BY task.started_at, task.id

-- name: count_worker_tasks
-- Running tasks by child process, from the in-flight index.
SELECT task.worker_hostname, task.worker_pid, task.worker_process_name, count(*) AS active_tasks,
    min(task.started_at) AS oldest_task_start, max(beat.sent_at) AS latest_heartbeat
FROM horsies_tasks AS task LEFT JOIN LATERAL (
    SELECT heard.sent_at FROM horsies_heartbeats AS heard
    WHERE heard.task_id = task.id AND heard.role = 'runner'
    ORDER BY heard.sent_at DESC LIMIT 1) AS beat ON true
WHERE task.status IN ('CLAIMED', 'RUNNING') AND task.status = 'RUNNING'
GROUP BY task.worker_hostname, task.worker_pid, task.worker_process_name
ORDER BY active_tasks DESC, task.worker_hostname, task.worker_pid

-- name: find_expired_tasks
-- PENDING tasks past their deadline that have not been expired yet, by the index on deadlines.
SELECT id::text, task_name, queue_name, priority, sent_at, enqueued_at, good_until,
    extract(epoch FROM now() - good_until)::float8 AS expired_for_seconds
FROM horsies_tasks WHERE status = 'PENDING' AND good_until IS NOT NULL AND good_until <= now()
ORDER BY good_until, horsies_tasks.id

-- name: read_server
-- The server's version; the cheapest possible query.
SELECT current_setting('server_version') AS server_version
