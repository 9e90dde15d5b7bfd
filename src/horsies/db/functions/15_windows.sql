-- Windows: a child can hold several short tasks at the same time (see the glossary). The send decides whether a task
-- may share a child.

-- Return whether a task with these options may wait in a child behind other tasks. The task must be declared with
-- burst=True, or have a retry policy that lists WORKER_CRASHED: such a task is retried even if it is unknown whether it
-- started. Nearly all options need only the first test, which costs 0.1 us; parsing JSON costs 3 us.
CREATE OR REPLACE FUNCTION horsies_is_burst_v1(p_options text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_options IS NULL OR (p_options NOT LIKE '%"WORKER_CRASHED"%' AND p_options NOT LIKE '%"burst"%') THEN
        RETURN false;
    END IF;
    RETURN coalesce((p_options::jsonb -> 'retry_policy' -> 'auto_retry_for') ? 'WORKER_CRASHED', false)
        OR coalesce(p_options::jsonb -> 'burst' = 'true'::jsonb, false);
END
$$;
