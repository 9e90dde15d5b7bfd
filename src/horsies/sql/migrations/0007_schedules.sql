-- Schedules: where each one stands, and which tasks came of it.

ALTER TABLE horsies_schedule_state
    -- What it sends, and which scheduler or program brought it here.
    ADD COLUMN task_name    varchar(255),
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
