-- 3,000 queues, 10,000 task names: waiting, running and ended tasks, and an hour of measures.
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
INSERT INTO horsies_measures
SELECT date_trunc('minute', now()) - slot * interval '1 minute', 1, 'tenant-' || name % 3000, 'shop.task_' || name,
    5, CASE WHEN name % 500 = 0 THEN 1 ELSE 0 END, 0, 0, 0, 100, 100, array_fill(1, ARRAY[16]), array_fill(1, ARRAY[16])
FROM generate_series(0, 9) AS slot, generate_series(0, 9999) AS name;
ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
