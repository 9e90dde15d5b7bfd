-- Signals: a node that is one task and takes a value from outside.

-- A value for a signal node: to the first that waits for this name, else kept for the first that will. Returns
-- 'delivered', 'stored', 'UNKNOWN_SIGNAL' when the run has no node of this name, or the terminal status of a run that
-- listens no more; NULL when there is no such run.
CREATE OR REPLACE FUNCTION horsies_signal_v1(run_id uuid, signal text, signal_value text) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    was_status text;
BEGIN
    PERFORM horsies_lock_tree(run_id);
    SELECT status INTO was_status FROM horsies_workflows WHERE id = run_id;
    IF was_status IS NULL OR was_status NOT IN ('PENDING', 'RUNNING', 'PAUSED') THEN
        RETURN was_status;
    END IF;
    IF NOT EXISTS (
        SELECT FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = run_id AND node.kind = 'signal' AND node.signal_name = signal)
    THEN
        RETURN 'UNKNOWN_SIGNAL';
    END IF;
    -- Locked as it is chosen: one that a worker takes at this moment, because its time is up, is passed over.
    UPDATE horsies_tasks SET
        kwargs = '{"value":' || signal_value || '}', enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE id = (
        SELECT task.id FROM horsies_workflow_tasks AS node JOIN horsies_tasks AS task ON task.id = node.task_id
        WHERE node.workflow_id = run_id AND node.kind = 'signal' AND node.signal_name = signal
          AND node.status = 'ENQUEUED' AND task.status = 'PENDING' AND task.kwargs = '{}'
        ORDER BY node.task_index LIMIT 1 FOR UPDATE OF task);
    IF FOUND THEN
        RETURN 'delivered';
    END IF;
    INSERT INTO horsies_workflow_signals (workflow_id, name, value) VALUES (run_id, signal, signal_value);
    RETURN 'stored';
END
$$;

-- Signals that came early, to the nodes among these that wait for them; the oldest first, each to one node only.
CREATE OR REPLACE FUNCTION horsies_deliver_signals(waiting horsies_nodes) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    listener record;
    signal_value text;
BEGIN
    FOR listener IN
        SELECT node.workflow_id, node.signal_name, node.task_id
        FROM horsies_nodes_by_key(waiting) AS node
        WHERE node.kind = 'signal' AND node.status = 'ENQUEUED' ORDER BY node.workflow_id, node.task_index
    LOOP
        DELETE FROM horsies_workflow_signals WHERE id = (
            SELECT early.id FROM horsies_workflow_signals AS early
            WHERE early.workflow_id = listener.workflow_id AND early.name = listener.signal_name ORDER BY early.id LIMIT 1)
        RETURNING value INTO signal_value;
        CONTINUE WHEN NOT FOUND;
        UPDATE horsies_tasks SET
            kwargs = '{"value":' || signal_value || '}', enqueued_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = listener.task_id;
    END LOOP;
END
$$;
