-- Notifications. The triggers on tasks fire once per statement and notify once per queue, however many rows
-- changed, because a notifying commit takes a lock that all notifying commits of the database share.
--
-- A payload is a hint and never trusted. A statement that inserts one row names it; a bulk insert sends an
-- empty payload. Ended tasks are named 200 to a payload, since a payload is limited to 8000 bytes.

CREATE OR REPLACE FUNCTION horsies_notify_inserted_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('task_new', hint), pg_notify('task_queue_' || queue_name, hint)
    FROM (SELECT queue_name, CASE WHEN count(*) = 1 THEN min(id::text) ELSE '' END AS hint
          FROM inserted WHERE status = 'PENDING' GROUP BY queue_name) AS queues;
    RETURN NULL;
END
$$;

-- A terminal row never changes again, so a terminal row in "changed" has just become terminal. If it belongs
-- to a workflow, the trigger advances the run, whichever statement ended the task. A PENDING row was released
-- or will be retried: its queue is notified, because the due time has changed.
CREATE OR REPLACE FUNCTION horsies_notify_changed_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    finished text[];
    released text[];
    has_ended_nodes boolean;
    runs uuid[];
    nodes horsies_nodes;
    tasks uuid[];
    started timestamptz[];
    items uuid[];
    others uuid[];
BEGIN
    SELECT array_agg(id::text) FILTER (WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')),
        array_agg(DISTINCT queue_name::text) FILTER (WHERE status = 'PENDING'),
        bool_or(workflow_id IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))
    INTO finished, released, has_ended_nodes FROM changed;
    FOR position IN 1 .. coalesce(array_length(finished, 1), 0) BY 200 LOOP
        PERFORM pg_notify('task_done', array_to_string(finished[position : position + 199], ','));
    END LOOP;
    FOR position IN 1 .. coalesce(array_length(released, 1), 0) LOOP
        PERFORM pg_notify('task_queue_' || released[position], '');
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
    RETURN NULL;
END
$$;

-- Waiters are notified of every end and pause of a run, monitors of every change of its status. Progress
-- without a change of status sends no notification.
CREATE OR REPLACE FUNCTION horsies_notify_workflow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('horsies_workflow_status', NEW.id::text || ' ' || NEW.status);
    IF NEW.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'PAUSED', 'EXPIRED') THEN
        PERFORM pg_notify('workflow_done', NEW.id::text);
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
