-- Return the tasks and runs that are still blocked: they are in the state in which the database refused their next
-- change.
CREATE OR REPLACE FUNCTION horsies_blocked_v1() RETURNS SETOF horsies_blocked LANGUAGE sql STABLE AS $$
    SELECT blocked.* FROM horsies_blocked AS blocked
    WHERE EXISTS (
        SELECT FROM horsies_tasks AS task
        WHERE blocked.kind = 'task' AND task.id = blocked.id AND task.status = blocked.status
          AND task.generation = blocked.generation)
    OR EXISTS (
        SELECT FROM horsies_workflows AS run
        WHERE blocked.kind = 'run' AND run.id = blocked.id AND run.status = blocked.status)
$$;
