-- Large payloads, which are stored as objects outside the rows of tasks: which tasks and runs own an object, and when
-- it is deleted.

-- Delete the objects that no task or run owns. An object outside the database is only marked here: the sweep first
-- deletes it from its store and then deletes its row. The rows are locked first, so that owners added by a concurrent
-- transaction are seen.
CREATE OR REPLACE FUNCTION horsies_release_payloads_v1(p_ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM horsies_payloads AS kept WHERE kept.id = ANY(p_ids) ORDER BY kept.id FOR UPDATE;
    DELETE FROM horsies_payloads AS kept
    WHERE kept.id = ANY(p_ids) AND kept.store = 'table' AND NOT EXISTS (
        SELECT FROM horsies_payload_owners AS owner WHERE owner.payload_id = kept.id);
    UPDATE horsies_payloads AS kept SET released_at = clock_timestamp()
    WHERE kept.id = ANY(p_ids) AND kept.store <> 'table' AND kept.released_at IS NULL AND NOT EXISTS (
        SELECT FROM horsies_payload_owners AS owner WHERE owner.payload_id = kept.id);
END
$$;

-- Remove the ownership of tasks and runs that are deleted or redacted, and release the objects without another owner.
CREATE OR REPLACE FUNCTION horsies_disown_payloads_v1(p_owners uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    disowned uuid[];
BEGIN
    WITH gone AS (
        DELETE FROM horsies_payload_owners AS owner WHERE owner.owner_id = ANY(p_owners) RETURNING owner.payload_id)
    SELECT array_agg(DISTINCT gone.payload_id) INTO disowned FROM gone;
    IF disowned IS NOT NULL THEN
        PERFORM horsies_release_payloads_v1(disowned);
    END IF;
END
$$;

-- Return whether a task or run may still need an object: the task or run is open, or one of its rows contains the
-- reference. Redacted rows contain no references.
CREATE OR REPLACE FUNCTION horsies_needs_payload_v1(p_owner uuid, p_payload uuid) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
            SELECT FROM horsies_tasks AS task
            WHERE task.id = p_owner AND task.redacted_at IS NULL AND (
                task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
                OR strpos(task.args, p_payload::text) > 0 OR strpos(task.kwargs, p_payload::text) > 0
                OR strpos(task.result, p_payload::text) > 0))
        OR EXISTS (
            SELECT FROM horsies_steps AS step WHERE step.task_id = p_owner
              AND (strpos(step.result, p_payload::text) > 0 OR strpos(step.error, p_payload::text) > 0))
        OR EXISTS (
            SELECT FROM horsies_task_signals AS sent
            WHERE sent.task_id = p_owner AND strpos(sent.value, p_payload::text) > 0)
        OR EXISTS (
            SELECT FROM horsies_workflows AS run WHERE run.id = p_owner AND run.redacted_at IS NULL)
$$;

-- Check one page of objects, in the order of their ids, and delete those that no row needs: the send was rolled back or
-- refused, or the attempt that stored a result was killed. Objects younger than "p_seconds" are skipped, because the
-- transaction of their send may still be open. Returns the last id of a full page, after which the next page starts;
-- NULL when no page follows.
CREATE OR REPLACE FUNCTION horsies_sweep_payloads_v1(p_after uuid, p_seconds float8, p_limit integer) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    page uuid[] := ARRAY(
        SELECT kept.id FROM horsies_payloads AS kept WHERE kept.id > p_after ORDER BY kept.id LIMIT p_limit);
    aged uuid[] := ARRAY(
        SELECT kept.id FROM horsies_payloads AS kept
        WHERE kept.id = ANY(page) AND kept.created_at < clock_timestamp() - p_seconds * interval '1 second');
BEGIN
    DELETE FROM horsies_payload_owners AS owner
    WHERE owner.payload_id = ANY(aged) AND NOT horsies_needs_payload_v1(owner.owner_id, owner.payload_id);
    PERFORM horsies_release_payloads_v1(ARRAY(
        SELECT kept.id FROM horsies_payloads AS kept WHERE kept.id = ANY(aged) AND kept.released_at IS NULL
          AND NOT EXISTS (SELECT FROM horsies_payload_owners AS owner WHERE owner.payload_id = kept.id)));
    RETURN page[p_limit];
END
$$;
