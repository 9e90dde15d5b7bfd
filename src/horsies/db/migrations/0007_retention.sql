-- Retention finds old tasks by the time in their ids. Ids that are not UUIDv7, which manual inserts and other
-- programs may use, have no time, so their rows have an index of their own. Tasks sent by this library never
-- enter it: their end still writes no index but the primary key.
CREATE INDEX horsies_tasks_untimed_ended ON horsies_tasks (coalesce(completed_at, failed_at, updated_at))
    WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') AND workflow_id IS NULL
      AND substr(id::text, 15, 1) <> '7';
