-- Trees of runs: ids, look-ups by key, descendants, and the lock of the root.

-- A new id that begins with its time, as the producers make them.
CREATE OR REPLACE FUNCTION horsies_new_id() RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
$$;

-- Far enough: when a task waits for something else than the clock.
CREATE OR REPLACE FUNCTION horsies_never_v1() RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
    SELECT timestamptz '9999-01-01 00:00:00+00'
$$;

-- These nodes, each looked up by its key. A plan lives as long as its connection, and one that was made while there were
-- hardly any nodes must not read them all when there are many: the limit tells the planner that the keys are few, and
-- OFFSET 0 that each of them is looked up on its own.
CREATE OR REPLACE FUNCTION horsies_nodes_by_key(nodes horsies_nodes) RETURNS SETOF horsies_workflow_tasks LANGUAGE sql STABLE AS $$
    SELECT found.*
    FROM (SELECT * FROM unnest(nodes.runs, nodes.indexes) LIMIT cardinality(nodes.runs)) AS key (workflow_id, task_index)
    CROSS JOIN LATERAL (
        SELECT node.* FROM horsies_workflow_tasks AS node
        WHERE node.workflow_id = key.workflow_id AND node.task_index = key.task_index OFFSET 0) AS found
$$;

-- The runs right below one, looked up by their key whatever the planner believes (see horsies_nodes_by_key).
CREATE OR REPLACE FUNCTION horsies_children(run_id uuid) RETURNS SETOF horsies_workflows LANGUAGE sql STABLE AS $$
    SELECT child.* FROM horsies_workflows AS child WHERE child.parent_workflow_id = run_id OFFSET 0
$$;

-- A run and everything below it.
CREATE OR REPLACE FUNCTION horsies_family_v1(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE family AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM family CROSS JOIN LATERAL horsies_children(family.id) AS child)
    SELECT id FROM family
$$;

-- A run and what is open below it. Not what an expired run has left behind: nobody takes its result any more, so it
-- neither rests nor goes on with those above.
CREATE OR REPLACE FUNCTION horsies_tree(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM tree CROSS JOIN LATERAL horsies_children(tree.id) AS child
        WHERE child.status IN ('PENDING', 'RUNNING', 'PAUSED'))
    SELECT id FROM tree
$$;

-- A run and what is open below it, but for runs that a failure of their own has paused, and what is below those: they
-- wait for somebody to decide about that failure.
CREATE OR REPLACE FUNCTION horsies_tree_without_failures(run_id uuid) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT run_id AS id
        UNION ALL
        SELECT child.id FROM tree CROSS JOIN LATERAL horsies_children(tree.id) AS child
        WHERE child.status IN ('PENDING', 'RUNNING', 'PAUSED') AND NOT EXISTS (
            SELECT FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = child.id AND node.status = 'FAILED' AND node.pauses AND NOT node.propagated))
    SELECT id FROM tree
$$;

-- The root's lock, which all changes of a tree are made under. Returns whether there is such a run.
CREATE OR REPLACE FUNCTION horsies_lock_tree(run_id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM root.id FROM horsies_workflows AS root
    WHERE root.id = (SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = run_id)
    FOR NO KEY UPDATE;
    RETURN FOUND;
END
$$;
