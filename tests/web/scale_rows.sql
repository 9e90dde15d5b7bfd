-- The rows of the scale test. The placeholders are the finished and the waiting tasks, the workers and the runs.
ALTER TABLE horsies_tasks DISABLE TRIGGER USER;
ALTER TABLE horsies_workflow_tasks DISABLE TRIGGER USER;

-- An id of version 7 whose time is this many milliseconds ago.
CREATE FUNCTION public.id_before(ago bigint, salt text) RETURNS uuid LANGUAGE sql AS $$
    SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - ago), 12, '0') || '7'
            || substr(md5(ago || salt), 1, 3) || '8' || substr(md5(ago || salt), 4, 15))::uuid $$;

-- Finished: one each 400 ms, 40 names, 12 queues, one of twenty failed, arguments of 200 bytes to 20 KB.
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, sent_at, enqueued_at, started_at,
    completed_at, failed_at, kwargs, result, error_code, fingerprint, retry_count, max_retries, created_at)
SELECT public.id_before(n * 400::bigint, 'done'), 'task_' || n % 40, 'queue_' || n % 12,
    CASE WHEN n % 20 = 0 THEN 'FAILED' ELSE 'COMPLETED' END, 'sha', moment, moment, moment,
    CASE WHEN n % 20 <> 0 THEN moment END, CASE WHEN n % 20 = 0 THEN moment END,
    '{{"order_id":' || n || ',"note":"' || repeat('x', CASE WHEN n % 100 = 0 THEN 20000 ELSE 160 END) || '"}}',
    CASE WHEN n % 20 = 0 THEN '{{"err":{{"error_code":"BROKE","message":"it broke"}}}}' ELSE '{{"ok":1}}' END,
    CASE WHEN n % 20 = 0 THEN 'BROKE_' || n % 7 END,
    CASE WHEN n % 20 = 0 THEN substr(md5('BROKE_' || n % 280), 1, 12) END,
    CASE WHEN n % 20 = 1 THEN 1 ELSE 0 END, 3, moment
FROM generate_series(1, {finished}) AS n, LATERAL (SELECT now() - n * interval '400 ms' AS moment) AS at;

INSERT INTO horsies_task_attempts (task_id, attempt, outcome, will_retry, started_at, finished_at, error_code,
    error_message, worker_hostname, worker_pid, fingerprint, exception_type, raised_in)
SELECT public.id_before(n * 400::bigint, 'done'), attempt, CASE WHEN n % 20 = 0 OR attempt < most THEN 'FAILED'
    ELSE 'COMPLETED' END, attempt < most, moment, moment,
    CASE WHEN n % 20 = 0 OR attempt < most THEN 'BROKE_' || n % 7 END, 'it broke', 'host-' || n % 50, n % 30000,
    CASE WHEN n % 20 = 0 OR attempt < most THEN substr(md5('BROKE_' || n % 280), 1, 12) END,
    CASE WHEN n % 20 = 0 OR attempt < most THEN 'shop.Broken' END,
    CASE WHEN n % 20 = 0 OR attempt < most THEN 'shop/tasks.py:work_' || n % 280 END
FROM generate_series({finished}, 1, -1) AS n,
    LATERAL (SELECT now() - n * interval '400 ms' AS moment, CASE WHEN n % 20 = 1 THEN 2 ELSE 1 END AS most) AS at,
    LATERAL generate_series(1, most) AS attempt;

INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, kwargs, sent_at, enqueued_at)
SELECT public.id_before(n, 'wait'), 'task_' || n % 40, 'queue_' || n % 3, 'sha', '{{"order_id":1}}', now(),
    now() - n * interval '1 ms' FROM generate_series(1, {waiting}) AS n;

INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, seen_at, started_at)
SELECT 'worker-' || n, n, 'host-' || n % 50, n, 4, '{{queue_0,queue_1,queue_2,queue_3}}', now(),
    now() - interval '1 day' FROM generate_series(1, {workers}) AS n;
INSERT INTO horsies_worker_states (worker_id, snapshot_at, hostname, pid, processes, queues, tasks_running,
    tasks_claimed, max_claim_batch, max_claim_per_worker, worker_started_at)
SELECT 'worker-' || 1 + n % {workers}, now() - n * interval '1 second', 'host', n, 4, '{{queue_0}}', 1, 1, 0, 0,
    now() - interval '1 day' FROM generate_series(1, {workers} * 100) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, claimed_by_worker_id, started_at,
    claimed_at, sent_at, kwargs)
SELECT public.id_before(n * 7, 'run'), 'task_1', 'queue_1', 'RUNNING', 'sha', 'worker-' || 1 + n % {workers},
    now(), now(), now(), '{{}}' FROM generate_series(1, 60) AS n;

INSERT INTO horsies_workflows (id, root_workflow_id, name, status, on_error, definition_key, fingerprint,
    total_nodes, open_nodes, created_at, started_at, completed_at)
SELECT id, id, 'run_' || n % 9, CASE WHEN n < 40 THEN 'RUNNING' ELSE 'COMPLETED' END, 'fail', 'run', 'f', 3,
    CASE WHEN n < 40 THEN 1 ELSE 0 END, now() - n * interval '1 minute', now() - n * interval '1 minute',
    CASE WHEN n >= 40 THEN now() END
FROM generate_series(1, {runs}) AS n, LATERAL (SELECT public.id_before(n * 60000::bigint, 'flow') AS id) AS made;

-- One run of 300 nodes, one of 5,000, each node after one of ten layers before it; a map of 10,000 items.
INSERT INTO horsies_workflows (id, root_workflow_id, name, status, on_error, definition_key, fingerprint,
    total_nodes, open_nodes)
SELECT id, id, name, 'RUNNING', 'fail', name, 'f', nodes, nodes / 2 FROM (VALUES
    ('00000000-0000-7000-8000-000000000300'::uuid, 'three hundred', 300),
    ('00000000-0000-7000-8000-000000005000'::uuid, 'five thousand', 5000)) AS run (id, name, nodes);
INSERT INTO horsies_workflow_tasks (workflow_id, task_index, node_id, kind, status, propagated, dependencies,
    dependents, context_dependents, join_type, allow_failed_deps, pauses, deps_open, task_name, task_kwargs,
    queue_name, priority, task_options, max_retries, items_total, items_open, enqueued_at, started_at,
    completed_at)
SELECT run.id, n, 'node_' || n, CASE WHEN n = 1 THEN 'map' ELSE 'task' END,
    CASE WHEN n < run.nodes / 2 THEN 'COMPLETED' ELSE 'PENDING' END, n < run.nodes / 2,
    CASE WHEN n < width THEN '{{}}'::integer[] ELSE ARRAY[n - width] END,
    CASE WHEN n + width < run.nodes THEN ARRAY[n + width] ELSE '{{}}'::integer[] END, '{{}}', 'all', false, false,
    CASE WHEN n < width THEN 0 ELSE 1 END, 'task_' || n % 5, '{{}}', 'queue_1', 100, '{{}}', 0,
    CASE WHEN n = 1 THEN 10000 END, CASE WHEN n = 1 THEN 0 END, now(), now(),
    CASE WHEN n < run.nodes / 2 THEN now() END
FROM (VALUES ('00000000-0000-7000-8000-000000000300'::uuid, 300, 30),
             ('00000000-0000-7000-8000-000000005000'::uuid, 5000, 500)) AS run (id, nodes, width),
    LATERAL generate_series(0, run.nodes - 1) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, workflow_id, workflow_node_index,
    workflow_item_index, completed_at, result)
SELECT public.id_before(n, 'item'), 'task_1', 'queue_1', 'COMPLETED', 'sha', '00000000-0000-7000-8000-000000000300',
    1, n, now(), '{{"ok":1}}' FROM generate_series(0, 9999) AS n;

INSERT INTO horsies_schedule_state (schedule_name, next_run_at, task_name)
SELECT 'schedule_' || n, now() + n * interval '12 minutes', 'task_1' FROM generate_series(1, 300) AS n;
INSERT INTO horsies_measures
SELECT date_bin('10 minutes', now(), 'epoch') - slot * interval '10 minutes', 10, 'queue_' || name % 12,
    'task_' || name, 5, 1, 0, 0, 0, 100, 100, array_fill(1, ARRAY[16]), array_fill(1, ARRAY[16])
FROM generate_series(36, 2016) AS slot, generate_series(0, 39) AS name;
INSERT INTO horsies_measures
SELECT date_trunc('minute', now()) - slot * interval '1 minute', 1, 'queue_' || name % 12, 'task_' || name,
    50, 1, 0, 0, 0, 100, 100, array_fill(1, ARRAY[16]), array_fill(1, ARRAY[16])
FROM generate_series(0, 359) AS slot, generate_series(0, 39) AS name;

ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
ALTER TABLE horsies_workflow_tasks ENABLE TRIGGER USER;
