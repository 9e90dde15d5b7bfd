-- Options of a send: how long a task is kept after its end, and for how long its key is unique.

ALTER TABLE horsies_tasks
    -- Counted from the end of the task; NULL where terminal_record_retention_hours decides.
    ADD COLUMN retention interval,
    -- An idempotency key that is unique for a time: while the task is 'waiting' for its first claim, or
    -- while it is 'open'.
    ADD COLUMN unique_key text,
    ADD COLUMN unique_while text;

-- Retention finds tasks with a time of their own here, oldest first. Other tasks never enter it. Sums of
-- timestamps without time zone are immutable, as an index needs it.
CREATE INDEX horsies_tasks_retention ON horsies_tasks
    ((coalesce(completed_at, failed_at, updated_at) AT TIME ZONE 'UTC' + retention))
    WHERE retention IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      AND workflow_id IS NULL;

-- A row leaves the index when its first claim increments the generation, or when it ends. A retry back to
-- PENDING has a generation above 0, so it cannot collide with a later holder of the key.
CREATE UNIQUE INDEX horsies_tasks_unique_key ON horsies_tasks (task_name, unique_key)
    WHERE unique_key IS NOT NULL
      AND CASE WHEN unique_while = text 'open' THEN status::text IN (text 'PENDING', text 'CLAIMED', text 'RUNNING')
          ELSE status::text = text 'PENDING' AND generation = 0 AND retry_count = 0 END;
