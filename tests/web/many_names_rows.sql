-- 3,000 queues, 10,000 task names, 400 workers: waiting, running and ended tasks, runs, schedules, changes, and
-- measures of ten minutes.
ALTER TABLE horsies_tasks DISABLE TRIGGER USER;
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, kwargs, sent_at, enqueued_at)
SELECT gen_random_uuid(), 'shop.task_' || n % 10000, 'tenant-' || n % 3000, 'sha', '{}', now(), now() - interval '1 second'
FROM generate_series(1, 30000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, sent_at, enqueued_at, started_at, failed_at,
    error_code, fingerprint, kwargs)
SELECT gen_random_uuid(), 'shop.task_' || n % 10000, 'tenant-' || n % 3000, 'FAILED', 'sha', now(), now(), now(), now(),
    'BROKE', substr(md5('b' || n % 10000), 1, 12), '{}' FROM generate_series(1, 10000) AS n;
INSERT INTO horsies_task_attempts (task_id, attempt, outcome, will_retry, started_at, finished_at, error_code,
    error_message, worker_hostname, worker_pid, fingerprint, exception_type, raised_in)
SELECT id, 1, 'FAILED', false, now(), now(), 'BROKE', 'it broke', 'host', 1, fingerprint, 'shop.Broken',
    'shop/tasks.py:' || task_name FROM horsies_tasks WHERE status = 'FAILED';
INSERT INTO horsies_queues (queue_name, paused_at) SELECT 'tenant-' || n, now() FROM generate_series(1, 30) AS n;
-- Workers that stay alive for the hours of a test, and have all task names.
INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, seen_at, started_at, known_tasks)
SELECT 'worker-' || n, n, 'host-' || n, n, 4,
    (SELECT array_agg('tenant-' || queue) FROM generate_series(0, 2899) AS queue), now() + interval '1 day',
    now() - interval '1 day', known.tasks
FROM generate_series(1, 40) AS n, (
    SELECT jsonb_build_object('tasks', jsonb_object_agg('shop.task_' || name, substr(md5(name::text), 1, 16))) AS tasks
    FROM generate_series(0, 9999) AS name) AS known;
INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, seen_at, started_at)
SELECT 'small-' || n, 40 + n, 'host-' || n, n, 4, ARRAY['tenant-' || n], now() + interval '1 day',
    now() - interval '1 day' FROM generate_series(1, 360) AS n;
-- Schedules whose next slot is after the test.
INSERT INTO horsies_schedule_state (schedule_name, next_run_at, task_name, timing)
SELECT 'schedule-' || n, now() + interval '1 day', 'shop.task_' || n,
    '{"pattern": {"type": "interval", "hours": 1}}' FROM generate_series(1, 3000) AS n;
INSERT INTO horsies_workflows (id, root_workflow_id, name, status, on_error, definition_key, fingerprint,
    total_nodes, open_nodes, created_at, started_at, completed_at)
SELECT id, id, 'flow_' || n % 1000, CASE WHEN n < 100 THEN 'RUNNING' ELSE 'COMPLETED' END, 'fail', 'flow', 'f', 3,
    CASE WHEN n < 100 THEN 1 ELSE 0 END, now(), now(), CASE WHEN n >= 100 THEN now() END
FROM generate_series(1, 3000) AS n, LATERAL (SELECT gen_random_uuid() AS id, n AS same) AS made;
INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail)
SELECT 'person-' || n % 20, 'web', 'pause_queue', 'queue tenant-' || n % 3000, 'done', 'the bank is down'
FROM generate_series(1, 10000) AS n;
INSERT INTO horsies_measures
SELECT date_trunc('minute', now()) - slot * interval '1 minute', 1, 'tenant-' || name % 3000, 'shop.task_' || name,
    5, CASE WHEN name % 500 = 0 THEN 1 ELSE 0 END, 0, 0, 0, 100, 100, array_fill(1, ARRAY[16]), array_fill(1, ARRAY[16])
FROM generate_series(0, 9) AS slot, generate_series(0, 9999) AS name;
ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
