-- Schedules: where each one stands, and which tasks came of it.

ALTER TABLE horsies_schedule_state
    -- What it sends, a task or a workflow by the key of its definition, and which scheduler or program brought it here.
    ADD COLUMN task_name    varchar(255),
    ADD COLUMN definition_key varchar(255),
    ADD COLUMN owner        varchar(255),
    -- The JSON that config_hash is taken of: pattern, time zone, bounds. Enough to tell the next slots.
    ADD COLUMN timing       text,
    -- The whole schedule as JSON, arguments included, when it was added at run time and lives only here.
    ADD COLUMN definition   text,
    ADD COLUMN paused_at    timestamptz,
    ADD COLUMN resumed_at   timestamptz,
    -- The end of the last slots that did not fire, and why.
    ADD COLUMN skipped_at   timestamptz,
    ADD COLUMN skip_reason  varchar(16),
    ADD COLUMN created_at   timestamptz NOT NULL DEFAULT now();

-- No next slot means that none will come: the schedule has ended.
CREATE INDEX horsies_schedule_state_due ON horsies_schedule_state (next_run_at)
    WHERE next_run_at IS NOT NULL AND paused_at IS NULL;

-- A task that a schedule sent names it, and its slot unless somebody ordered the run by hand. These rows are the log of
-- runs; they come and go with the tasks. Tasks sent otherwise are in neither index.
ALTER TABLE horsies_tasks
    ADD COLUMN schedule_name  varchar(255),
    ADD COLUMN scheduled_for  timestamptz;

CREATE INDEX horsies_tasks_schedule_runs ON horsies_tasks (schedule_name, sent_at)
    WHERE schedule_name IS NOT NULL;
CREATE INDEX horsies_tasks_schedule_open ON horsies_tasks (schedule_name)
    WHERE schedule_name IS NOT NULL AND status IN ('PENDING', 'CLAIMED', 'RUNNING');

-- The same for runs of workflows.
CREATE INDEX horsies_workflows_schedule_runs ON horsies_workflows (schedule_name, sent_at)
    WHERE schedule_name IS NOT NULL;
CREATE INDEX horsies_workflows_schedule_open ON horsies_workflows (schedule_name)
    WHERE schedule_name IS NOT NULL AND status IN ('PENDING', 'RUNNING', 'PAUSED');

-- Runs of schedules, a column for each fact: started as any others, then marked with where they come from. Their first
-- tasks wait for the rest of the delay, counted from the slot, and so do deadlines that are counted from the start; a
-- moment somebody named, and what waits for a signal without end, stay. A run that is there already is left alone.
CREATE FUNCTION horsies_start_scheduled_v1(
    ids uuid[], plans text[], names text[], slots timestamptz[], delay_seconds float8[]) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    created uuid[];
BEGIN
    SELECT coalesce(array_agg(run.id::uuid), '{}') INTO created
    FROM horsies_start_v1(('[' || array_to_string(plans, ',') || ']')::json) AS run WHERE run.created;
    UPDATE horsies_workflows AS run SET schedule_name = sent.name, scheduled_for = sent.slot
    FROM unnest(ids, names, slots) AS sent (id, name, slot)
    WHERE run.id = sent.id AND run.id = ANY(created);
    IF 0 < ANY(delay_seconds) THEN
        UPDATE horsies_tasks AS task SET
            enqueued_at = task.enqueued_at + sent.wait,
            good_until = least(node.good_until, task.good_until + sent.wait)
        FROM (
            SELECT id, slot + delay * interval '1 second' - now() AS wait
            FROM unnest(ids, slots, delay_seconds) AS sent (id, slot, delay)) AS sent
        JOIN horsies_workflow_tasks AS node ON node.workflow_id = sent.id
        WHERE sent.wait > interval '0' AND sent.id = ANY(created) AND task.id = node.task_id
          AND node.not_before IS NULL AND task.enqueued_at < horsies_parked_v1();
    END IF;
    RETURN cardinality(created);
END
$$;
