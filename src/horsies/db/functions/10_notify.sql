-- Notifications. The triggers on tasks fire once per statement and notify once per queue, regardless of the number of
-- changed rows, because notifying commits wait for each other at a lock of the whole database.
--
-- A payload is only a hint and is never trusted. A statement that inserts one row sends the id of that row; a bulk
-- insert sends an empty payload; "@" means that tasks of the queue have keys (19_keys.sql). A payload is limited to
-- 8000 bytes, so one payload lists the ids of at most 200 ended tasks.

-- Wake-ups. A notification on a queue's channel wakes all of the queue's workers, and each of them tries to claim: a
-- single task took 53 ms of processor time with 40 workers, and 5 ms with 2. So when there are many workers, only a few
-- are woken, each on its own channel with the queue as the payload. A woken worker must either make a claim that leaves
-- no due task, or pass the wake-up on (worker/wakeups.py). If one of two woken workers is dead, the other one claims
-- the task. If all woken workers are dead, an idle worker finds the task at its next poll.

-- Return up to "p_wanted" workers of the queue that wait for tasks. The search starts at a random lock key: these keys
-- are random numbers below 2^62.
CREATE OR REPLACE FUNCTION horsies_waiting_workers(p_queue text, p_wanted integer, p_except text)
RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    start bigint := (random() * 4611686018427387904)::bigint;
    found text[];
BEGIN
    found := ARRAY(
        SELECT worker.worker_id::text FROM horsies_workers AS worker
        WHERE worker.stopped_at IS NULL AND worker.waits AND worker.lock_key >= start AND worker.hears
          AND p_queue = ANY(worker.queues) AND worker.worker_id <> p_except
        ORDER BY worker.lock_key LIMIT p_wanted);
    IF cardinality(found) < p_wanted THEN
        found := found || ARRAY(
            SELECT worker.worker_id::text FROM horsies_workers AS worker
            WHERE worker.stopped_at IS NULL AND worker.waits AND worker.lock_key < start AND worker.hears
              AND p_queue = ANY(worker.queues) AND worker.worker_id <> p_except
            ORDER BY worker.lock_key LIMIT p_wanted - cardinality(found));
    END IF;
    RETURN found;
END
$$;

-- Wake workers for "p_count" due tasks of a queue: all workers if there are few workers or many tasks, otherwise one
-- worker more than there are tasks. If no worker is waiting, two busy workers are notified: a worker may begin to wait
-- before the sender commits, and a notified worker finds the new tasks. In a transaction with an older snapshot, the
-- query may see only workers that have died since, so all workers are woken. The function runs with its owner's
-- privileges, so that a producer needs no right to read the workers table. If another session has locked that table,
-- the send does not wait but wakes all workers.
CREATE OR REPLACE FUNCTION horsies_wake(p_queue text, p_count bigint, p_hint text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    chosen text[];
BEGIN
    BEGIN
        LOCK TABLE horsies_workers IN ACCESS SHARE MODE NOWAIT;
        IF p_count <= 32 AND current_setting('transaction_isolation') = 'read committed' AND (
            SELECT count(*) FROM (SELECT FROM horsies_workers WHERE stopped_at IS NULL LIMIT 5) AS living) = 5
        THEN
            chosen := horsies_waiting_workers(p_queue, p_count::integer + 1, '');
            IF chosen = '{}' THEN
                chosen := ARRAY(
                    SELECT worker.worker_id::text FROM horsies_workers AS worker
                    WHERE worker.stopped_at IS NULL AND p_queue = ANY(worker.queues)
                    ORDER BY random() LIMIT 2);
            END IF;
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        chosen := NULL;
    END;
    IF chosen IS NULL OR chosen = '{}' THEN
        PERFORM pg_notify('task_queue_' || p_queue, p_hint);
    ELSE
        PERFORM pg_notify('horsies_wake_' || worker.id, CASE WHEN p_hint = '@' THEN '@' ELSE '' END || p_queue)
        FROM unnest(chosen) AS worker (id);
    END IF;
END
$$;

-- A worker was woken for these queues but cannot serve them now: for each queue that has a due task, wake two other
-- waiting workers. Returns how many workers were woken. A worker that starts to wait later checks its queues first.
CREATE OR REPLACE FUNCTION horsies_pass_wake_up_v1(p_worker_id text, p_queues text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    queue text;
    chosen text[];
    hint text;
    woken integer := 0;
BEGIN
    UPDATE horsies_workers SET waits = false WHERE worker_id = (
        SELECT worker_id FROM horsies_workers WHERE worker_id = p_worker_id AND waits FOR UPDATE SKIP LOCKED);
    FOREACH queue IN ARRAY p_queues LOOP
        chosen := horsies_waiting_workers(queue, 2, p_worker_id);
        hint := '';
        IF (SELECT due.seconds > 0 FROM horsies_seconds_until_due_v1(ARRAY[queue], NULL) AS due) IS NOT FALSE THEN
            hint := CASE WHEN horsies_has_keys(queue) THEN '@' END;
        END IF;
        CONTINUE WHEN chosen = '{}' OR hint IS NULL;
        PERFORM pg_notify('horsies_wake_' || worker.id, hint || queue) FROM unnest(chosen) AS worker (id);
        woken := woken + cardinality(chosen);
    END LOOP;
    RETURN woken;
END
$$;

-- A delayed task is announced to all workers of its queue, because each of them notes when the task becomes due.
CREATE OR REPLACE FUNCTION horsies_notify_inserted_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('task_new', CASE WHEN hint = '@' THEN '' ELSE hint END),
        CASE WHEN is_later THEN pg_notify('task_queue_' || queue_name, hint)
            ELSE horsies_wake(queue_name, tasks, hint) END
    FROM (SELECT queue_name, count(*) AS tasks, bool_or(enqueued_at > clock_timestamp()) AS is_later,
              CASE WHEN bool_or(lane IS NOT NULL) THEN '@' WHEN count(*) = 1 THEN min(id::text) ELSE '' END AS hint
          FROM inserted WHERE status = 'PENDING' GROUP BY queue_name) AS queues;
    RETURN NULL;
END
$$;

-- Only a redaction changes a terminal row, so any other terminal row in "changed" has just become terminal. If the
-- ended task belongs to a workflow, the trigger advances the run, whichever statement ended the task. A PENDING row was
-- released or will be retried: the workers of its queue are notified, because its due time has changed.
CREATE OR REPLACE FUNCTION horsies_notify_changed_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    finished text[];
    is_plain boolean;
    released text[];
    unsuccessful uuid[];
    failed uuid[];
    has_ended_nodes boolean;
    runs uuid[];
    nodes horsies_nodes;
    tasks uuid[];
    started timestamptz[];
    items uuid[];
    others uuid[];
    has_waiting_runs boolean;
    cancelled uuid[];
BEGIN
    SELECT array_agg(id::text) FILTER (WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')),
        bool_and((lane IS NULL OR claimed_by_worker_id IS NOT NULL) AND (status IN ('CLAIMED', 'RUNNING')
            OR (status = 'COMPLETED' AND workflow_id IS NULL AND wakes_task_id IS NULL)))
    INTO finished, is_plain FROM changed WHERE redacted_at IS NULL;
    FOR position IN 1 .. coalesce(array_length(finished, 1), 0) BY 200 LOOP
        PERFORM pg_notify('task_done', array_to_string(finished[position : position + 199], ','));
    END LOOP;
    -- The statement was a claim, or it recorded successes for which only waiters wait: most statements end here.
    IF is_plain IS NOT FALSE THEN
        RETURN NULL;
    END IF;
    SELECT array_agg(DISTINCT CASE WHEN lane IS NULL THEN '' ELSE '@' END || queue_name) FILTER (
            -- A waiting task that ends may have been the first task of its lane, so the next one may start.
            WHERE status = 'PENDING' OR (lane IS NOT NULL AND claimed_by_worker_id IS NULL)),
        array_agg(id) FILTER (WHERE status IN ('FAILED', 'CANCELLED', 'EXPIRED')),
        bool_or(workflow_id IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')),
        bool_or(wakes_task_id IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))
    INTO released, unsuccessful, has_ended_nodes, has_waiting_runs FROM changed WHERE redacted_at IS NULL;
    IF unsuccessful IS NOT NULL THEN
        SELECT array_agg(id) FILTER (WHERE lane IS NOT NULL AND status = 'FAILED'),
            array_agg(id) FILTER (WHERE cancel_requested_at IS NOT NULL)
        INTO failed, cancelled FROM changed WHERE status IN ('FAILED', 'CANCELLED', 'EXPIRED');
        IF failed IS NOT NULL THEN
            PERFORM horsies_halt_lanes(failed);
        END IF;
        IF EXISTS (SELECT FROM horsies_webhooks) THEN
            PERFORM horsies_announce_tasks(unsuccessful);
        END IF;
    END IF;
    FOR position IN 1 .. coalesce(array_length(released, 1), 0) LOOP
        PERFORM pg_notify('task_queue_' || ltrim(released[position], '@'),
            CASE WHEN starts_with(released[position], '@') THEN '@' ELSE '' END);
    END LOOP;
    IF has_ended_nodes THEN
        SELECT array_agg(workflow_id), array_agg(workflow_id) FILTER (WHERE part = 'success'),
            array_agg(workflow_node_index) FILTER (WHERE part = 'success'),
            array_agg(id) FILTER (WHERE part = 'success'),
            array_agg(started_at) FILTER (WHERE part = 'success'),
            array_agg(id) FILTER (WHERE part = 'item'), array_agg(id) FILTER (WHERE part = 'other')
        INTO runs, nodes.runs, nodes.indexes, tasks, started, items, others FROM (
            SELECT id, workflow_id, workflow_node_index, started_at,
                CASE WHEN workflow_item_index IS NOT NULL THEN 'item'
                     WHEN status = 'COMPLETED' AND task_name <> 'horsies.expand' THEN 'success'
                     ELSE 'other' END AS part
            FROM changed
            WHERE workflow_id IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
        ) AS ended;
        PERFORM horsies_advance(runs, nodes, tasks, started, items, others);
    END IF;
    IF has_waiting_runs THEN
        SELECT array_agg(wakes_task_id), array_agg(id) INTO runs, tasks FROM changed
        WHERE wakes_task_id IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED');
        PERFORM horsies_wake_parents(runs, tasks);
    END IF;
    IF cancelled IS NOT NULL THEN
        PERFORM horsies_cancel_children(cancelled);
    END IF;
    RETURN NULL;
END
$$;

-- Waiters are notified whenever a run ends or pauses, and monitors whenever its status changes. A run that advances
-- without a change of status sends no notification.
CREATE OR REPLACE FUNCTION horsies_notify_workflow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('horsies_workflow_status', NEW.id::text || ' ' || NEW.status);
    IF NEW.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'PAUSED', 'EXPIRED') THEN
        PERFORM pg_notify('workflow_done', NEW.id::text);
        IF NEW.wakes_task_id IS NOT NULL AND NEW.status <> 'PAUSED' THEN
            PERFORM horsies_wake_parents(ARRAY[NEW.wakes_task_id], ARRAY[NEW.id]);
        END IF;
        IF NEW.status <> 'PAUSED' AND NEW.parent_workflow_id IS NULL
            AND EXISTS (SELECT FROM horsies_webhooks WHERE 'run.ended' = ANY(events)) THEN
            PERFORM horsies_announce_run(NEW);
        END IF;
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION horsies_notify_workflows_started() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('horsies_workflow_status',
        CASE WHEN count(*) = 1 THEN min(id::text) || ' RUNNING' ELSE '' END)
    FROM started HAVING count(*) > 0;
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER horsies_task_inserted AFTER INSERT ON horsies_tasks
    REFERENCING NEW TABLE AS inserted
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_notify_inserted_tasks();

CREATE OR REPLACE TRIGGER horsies_task_changed AFTER UPDATE ON horsies_tasks
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_notify_changed_tasks();

CREATE OR REPLACE TRIGGER horsies_workflow_changed AFTER UPDATE OF status ON horsies_workflows
    FOR EACH ROW WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION horsies_notify_workflow();

CREATE OR REPLACE TRIGGER horsies_workflow_started AFTER INSERT ON horsies_workflows
    REFERENCING NEW TABLE AS started
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_notify_workflows_started();
