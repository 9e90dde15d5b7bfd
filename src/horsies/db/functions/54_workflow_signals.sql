-- Signals: a signal node is a single parked task that takes its value from outside the run.

-- Deliver a value to the first signal node that waits for this signal, or store the value until such a node waits.
-- Returns 'delivered' or 'stored'; 'UNKNOWN_SIGNAL' if the run has no node for this signal; the run's status if the run
-- has ended; or NULL if the run does not exist.
CREATE OR REPLACE FUNCTION horsies_signal_v1(p_run_id uuid, p_name text, p_value text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    was_status text := horsies_lock_tree(p_run_id);
BEGIN
    IF was_status IS NULL OR was_status NOT IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        RETURN was_status;
    END IF;
    IF NOT EXISTS (
        SELECT FROM horsies_workflow_tasks
        WHERE workflow_id = p_run_id AND kind = 'signal' AND signal_name = p_name)
    THEN
        RETURN 'UNKNOWN_SIGNAL';
    END IF;
    -- The row is locked when it is chosen, so a task that a worker is claiming because its time limit has passed is
    -- skipped.
    UPDATE horsies_tasks SET
        kwargs = '{"value":' || p_value || '}',
        enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = (
        SELECT task.id
        FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
        WHERE node.workflow_id = p_run_id AND node.kind = 'signal' AND node.signal_name = p_name
          AND node.status = 'ENQUEUED' AND task.status = 'PENDING' AND task.kwargs = '{}'
        ORDER BY node.task_index LIMIT 1 FOR UPDATE OF task);
    IF FOUND THEN
        RETURN 'delivered';
    END IF;
    INSERT INTO horsies_workflow_signals (workflow_id, name, value) VALUES (p_run_id, p_name, p_value);
    RETURN 'stored';
END
$$;

-- Deliver stored signals, oldest first, to the given nodes that wait for them; each signal is delivered to one node.
CREATE OR REPLACE FUNCTION horsies_deliver_signals(p_nodes horsies_workflow_tasks[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    listener record;
    delivered text;
BEGIN
    FOR listener IN
        SELECT node.workflow_id, node.signal_name, node.task_id
        FROM unnest(p_nodes) AS node
        WHERE node.kind = 'signal' AND node.status = 'ENQUEUED' ORDER BY node.workflow_id, node.task_index
    LOOP
        DELETE FROM horsies_workflow_signals WHERE id = (
            SELECT early.id FROM horsies_workflow_signals AS early
            WHERE early.workflow_id = listener.workflow_id AND early.name = listener.signal_name
            ORDER BY early.id LIMIT 1)
        RETURNING value INTO delivered;
        CONTINUE WHEN NOT FOUND;
        UPDATE horsies_tasks SET kwargs = '{"value":' || delivered || '}',
            enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = listener.task_id;
    END LOOP;
END
$$;
