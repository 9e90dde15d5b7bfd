-- Trees of runs: new ids, nodes by key, descendants, and the lock of the root.
--
-- Here and in other files, "RETURN expression" marks small functions that the planner inlines: their operators are
-- resolved when the function is created. All other functions set their own search_path, which prevents inlining; see
-- in_schema in db/schema.py.

-- Return a new id that begins with the current time (UUIDv7), like the ids that producers create.
CREATE OR REPLACE FUNCTION horsies_new_id() RETURNS uuid LANGUAGE sql VOLATILE
RETURN encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
    FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid;

-- Return the due time of parked tasks, which wait for an event and not for a time.
CREATE OR REPLACE FUNCTION horsies_never_v1() RETURNS timestamptz LANGUAGE sql IMMUTABLE
RETURN timestamptz '9999-01-01 00:00:00+00';

-- Return nodes by their keys (idioms "few rows" and "one by one"; see 20_claim.sql).
CREATE OR REPLACE FUNCTION horsies_nodes_by_key(p_nodes horsies_nodes) RETURNS SETOF horsies_workflow_tasks
LANGUAGE sql STABLE AS $$
    SELECT found.*
    FROM (SELECT * FROM unnest(p_nodes.runs, p_nodes.indexes) LIMIT cardinality(p_nodes.runs))
        AS key (workflow_id, task_index)
    CROSS JOIN LATERAL (
        SELECT node.* FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = key.workflow_id AND node.task_index = key.task_index OFFSET 0) AS found
$$;

-- Return the child runs of a run, without deeper descendants (idiom "one by one"; see 20_claim.sql).
CREATE OR REPLACE FUNCTION horsies_children(p_run_id uuid) RETURNS SETOF horsies_workflows
LANGUAGE sql STABLE AS $$
    SELECT child.* FROM horsies_workflows AS child WHERE child.parent_workflow_id = p_run_id OFFSET 0
$$;

-- Return a run and all its descendants.
CREATE OR REPLACE FUNCTION horsies_family_v1(p_run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE family AS (
        SELECT p_run_id AS id
        UNION ALL
        SELECT child.id FROM family CROSS JOIN LATERAL horsies_children(family.id) AS child)
    SELECT id FROM family
$$;

-- Return a run and its open descendants. Runs below an expired run are excluded: no parent waits for their results, so
-- they do not pause or resume with the runs above them.
CREATE OR REPLACE FUNCTION horsies_tree(p_run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT p_run_id AS id
        UNION ALL
        SELECT child.id FROM tree CROSS JOIN LATERAL horsies_children(tree.id) AS child
        WHERE child.status IN ('PENDING', 'RUNNING', 'PAUSED'))
    SELECT id FROM tree
$$;

-- Like horsies_tree, but without runs that were paused by their own failure, and without the runs below them: they wait
-- for an operator's decision about the failure.
CREATE OR REPLACE FUNCTION horsies_tree_without_failures(p_run_id uuid) RETURNS SETOF uuid
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT p_run_id AS id
        UNION ALL
        SELECT child.id FROM tree CROSS JOIN LATERAL horsies_children(tree.id) AS child
        WHERE child.status IN ('PENDING', 'RUNNING', 'PAUSED') AND NOT EXISTS (
            SELECT FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = child.id AND node.status = 'FAILED' AND node.pauses
              AND NOT node.propagated))
    SELECT id FROM tree
$$;

-- Lock the root of a run's tree; every change to the tree requires this lock. Returns the run's status, or NULL if the
-- run does not exist.
CREATE OR REPLACE FUNCTION horsies_lock_tree(p_run_id uuid) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    PERFORM root.id FROM horsies_workflows AS root
    WHERE root.id = (SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = p_run_id)
    FOR NO KEY UPDATE;
    RETURN (SELECT status FROM horsies_workflows WHERE id = p_run_id);
END
$$;

-- Nodes are deleted with their run, whether retention, the deletion of a parent or a manual DELETE deletes the run. No
-- node remains without its run, because only the statement that inserts a run inserts its nodes.
CREATE OR REPLACE FUNCTION horsies_delete_nodes() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        -- The TRUNCATE may include the nodes, and PostgreSQL rejects a second TRUNCATE of that table.
        DELETE FROM horsies_workflow_tasks;
    ELSE
        DELETE FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        IF EXISTS (SELECT FROM horsies_payload_owners) THEN  -- of signals
            PERFORM horsies_disown_payloads_v1(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER horsies_workflow_deleted AFTER DELETE ON horsies_workflows
    REFERENCING OLD TABLE AS deleted
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_delete_nodes();

CREATE OR REPLACE TRIGGER horsies_workflows_truncated AFTER TRUNCATE ON horsies_workflows
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_delete_nodes();
