-- Workflow progress: when a task ends, the trigger on horsies_tasks calls horsies_advance, so the run advances in the
-- same transaction, whether a worker's turn, a cancellation, an expiry, recovery or a manual update ends the task.
-- There is no second step that a crash could lose.
--
-- * One lock per tree of runs: a transaction locks the root before it changes a run, its nodes or a descendant. A
--   transaction that will end workflow tasks locks the roots before the tasks, in id order (lock_runs), so two such
--   transactions cannot deadlock.
-- * All changes are made to sets of rows: the number of statements depends on how deep skips cascade, not on how many
--   nodes end or become ready. A node's join is decided by counters in its own row, which are maintained while it is
--   PENDING.
-- * Only a RUNNING run advances. A node that ends in a paused run keeps "propagated" = false until the run is
--   resumed.
-- * Nodes that end in the same statement are handled together, level by level: first, failures pause runs; then all
--   ended nodes in running runs are counted; then the nodes that end as a consequence are handled in the same way.
-- * For the idioms "opaque status", "by position", "one by one" and "few rows", see 20_claim.sql.

-- Decide from a waiting node's counters whether the node keeps waiting (PENDING), starts (READY) or never starts
-- (SKIPPED).
CREATE OR REPLACE FUNCTION horsies_join(
    p_join_type text, p_min_success integer, p_allow_failed_deps boolean, p_open bigint, p_ok bigint,
    p_bad bigint, p_context_open bigint) RETURNS text LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN p_join_type = 'all' THEN CASE
        WHEN p_open > 0 THEN 'PENDING'
        WHEN p_bad = 0 OR p_allow_failed_deps THEN 'READY'
        ELSE 'SKIPPED' END
    WHEN p_ok >= coalesce(p_min_success, 1) THEN
        CASE WHEN p_context_open > 0 THEN 'PENDING' ELSE 'READY' END
    WHEN p_ok + p_open < coalesce(p_min_success, 1) THEN 'SKIPPED'
    ELSE 'PENDING'
END;

-- Return the status that follows from a decision. A node that may start becomes ENQUEUED in the same update, because
-- its task is inserted in the same transaction. A map has no task besides its items, so it stays READY until its items
-- exist.
CREATE OR REPLACE FUNCTION horsies_next_status(p_decision text, p_kind text) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE WHEN p_decision = 'READY' AND p_kind <> 'map' THEN 'ENQUEUED' ELSE p_decision END;

-- Return whether a RUNNING run completes successfully when "p_ended" nodes have ended and "p_failed" of them have
-- failed. This is never true for a run with a success policy or a parent, for which more has to be done (see
-- horsies_finish_runs). Any other run is updated only once, when its last nodes are counted.
CREATE OR REPLACE FUNCTION horsies_succeeds(p_run horsies_workflows, p_ended bigint, p_failed bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN p_run.open_nodes = p_ended AND p_run.failed_nodes + p_failed = 0 AND p_run.error IS NULL
    AND p_run.success_policy IS NULL AND p_run.parent_workflow_id IS NULL;

-- Record that tasks of these runs have just ended, and the consequences. "p_nodes" are nodes whose single task
-- succeeded. They cannot pause a run, and the statement that counts them also records their end. "p_items" are tasks of
-- maps; "p_others" are failed tasks and expansions of sub-workflows.
CREATE OR REPLACE FUNCTION horsies_advance(
    p_runs uuid[], p_nodes horsies_nodes, p_tasks uuid[], p_started timestamptz[], p_items uuid[],
    p_others uuid[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    others horsies_nodes;
    not_started horsies_nodes;
    maps horsies_nodes;
BEGIN
    PERFORM root.id FROM horsies_workflows AS root
    WHERE root.id = ANY(ARRAY(
        SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = ANY(p_runs)))
    ORDER BY root.id FOR NO KEY UPDATE;
    IF p_others IS NOT NULL THEN
        others := horsies_end_nodes(p_others);
        not_started := horsies_start_children(p_others);
    END IF;
    IF p_items IS NOT NULL THEN
        maps := horsies_end_items(p_items);
    END IF;
    PERFORM horsies_propagate(
        (p_nodes.runs || others.runs || not_started.runs || maps.runs,
         p_nodes.indexes || others.indexes || not_started.indexes || maps.indexes),
        p_others IS NOT NULL OR maps.runs IS NOT NULL, p_tasks, p_started);
END
$$;

-- ENQUEUED -> COMPLETED or FAILED for the nodes of these tasks, except nodes whose expansion succeeded, because their
-- sub-workflows start. Returns the nodes that ended.
CREATE OR REPLACE FUNCTION horsies_end_nodes(p_tasks uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    nodes horsies_nodes;
BEGIN
    WITH finished AS (
        SELECT task.id, task.status, task.started_at, found.place
        FROM (SELECT * FROM horsies_tasks WHERE id = ANY(p_tasks) LIMIT cardinality(p_tasks)) AS task
        CROSS JOIN LATERAL (
            SELECT node.ctid AS place FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index
              AND node.task_id = task.id AND node.status = 'ENQUEUED'
              AND NOT (node.kind = 'workflow' AND task.status = 'COMPLETED') OFFSET 0) AS found),
    ended AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE finished.status WHEN 'COMPLETED' THEN 'COMPLETED' ELSE 'FAILED' END,
            completed_at = clock_timestamp(), started_at = finished.started_at, result_task_id = finished.id
        FROM finished WHERE node.ctid = finished.place
        RETURNING node.workflow_id, node.task_index)
    SELECT array_agg(workflow_id), array_agg(task_index) INTO nodes.runs, nodes.indexes FROM ended;
    RETURN nodes;
END
$$;

-- Apply the consequences of the end of these nodes, in RUNNING runs: the counters of dependents change and may decide
-- whether they start, ready nodes become tasks, skipped nodes are counted in the next round, and runs without open
-- nodes end, along with the nodes of their parents. "p_may_pause" means that failures among these nodes are new; after
-- a resume, the same failures do not pause the run again. "p_tasks" and "p_started" belong to the first nodes, whose
-- tasks succeeded. These nodes end in this function, so that one update both ends and counts them; two updates would
-- write their rows twice.
CREATE OR REPLACE FUNCTION horsies_propagate(
    p_ended horsies_nodes, p_may_pause boolean, p_tasks uuid[] DEFAULT '{}',
    p_started timestamptz[] DEFAULT '{}')
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    batch horsies_nodes := p_ended;
    may_pause boolean := p_may_pause;
    tasks uuid[] := p_tasks;
    started timestamptz[] := p_started;
    ready horsies_workflow_tasks[];
    has_signals boolean;
    skipped horsies_nodes;
    at_once horsies_nodes;
    parents horsies_nodes;
    drained_runs uuid[];
    no_limit bigint := 1000000000;  -- few rows
BEGIN
    WHILE cardinality(batch.runs) > 0 LOOP
        IF may_pause THEN
            PERFORM horsies_pause_on_failure(batch);
        END IF;
        -- This is a single statement, because every additional statement has its own start-up cost. No row is updated
        -- twice: a node that ends is not PENDING, and only PENDING nodes have counters to update. Rows are looked up by
        -- key and then updated by ctid; only the holder of the root's lock can change these rows.
        WITH found_nodes AS (
            SELECT key.*, found.*, key.workflow_id = ANY(ARRAY(
                SELECT run.id FROM horsies_workflows AS run
                WHERE run.id = ANY(batch.runs) AND coalesce(run.status, '') = 'RUNNING')) AS counts
            FROM (SELECT * FROM unnest(batch.runs, batch.indexes, tasks, started)
                  LIMIT cardinality(batch.runs)) AS key (workflow_id, task_index, task_id, started_at)
            CROSS JOIN LATERAL (
                SELECT node.ctid AS place, node.status, node.task_id AS current_task_id
                FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = key.workflow_id AND node.task_index = key.task_index
                OFFSET 0) AS found),
        ended AS (
            UPDATE horsies_workflow_tasks AS node SET
                propagated = found.counts,
                status = CASE WHEN found.task_id IS NULL THEN node.status ELSE 'COMPLETED' END,
                completed_at = CASE WHEN found.status <> 'SKIPPED'
                    THEN coalesce(node.completed_at, clock_timestamp()) END,
                started_at = coalesce(found.started_at, node.started_at),
                result_task_id = coalesce(found.task_id, node.result_task_id)
            FROM found_nodes AS found
            WHERE node.ctid = found.place AND (CASE WHEN found.task_id IS NULL THEN found.counts
                ELSE found.current_task_id = found.task_id AND found.status = 'ENQUEUED' END)
            RETURNING node.workflow_id, node.status, node.propagated, node.dependents,
                node.context_dependents),
        ends AS MATERIALIZED (
            SELECT array_agg(workflow_id) AS runs, array_agg(total) AS totals, array_agg(failed) AS failures
            FROM (SELECT workflow_id, count(*) AS total, count(*) FILTER (WHERE status = 'FAILED') AS failed
                  FROM ended WHERE propagated GROUP BY workflow_id) AS of_run),
        counted_runs AS (
            UPDATE horsies_workflows AS run SET
                open_nodes = run.open_nodes - ends.totals[array_position(ends.runs, run.id)],
                failed_nodes = run.failed_nodes + ends.failures[array_position(ends.runs, run.id)],
                error = CASE WHEN ends.failures[array_position(ends.runs, run.id)] > 0 AND run.error IS NULL
                    THEN horsies_first_error(run.id) ELSE run.error END,
                status = CASE WHEN horsies_succeeds(run, ends.totals[array_position(ends.runs, run.id)],
                        ends.failures[array_position(ends.runs, run.id)])
                    THEN 'COMPLETED' ELSE run.status END,
                completed_at = CASE WHEN horsies_succeeds(run, ends.totals[array_position(ends.runs, run.id)],
                        ends.failures[array_position(ends.runs, run.id)])
                    THEN clock_timestamp() END,
                updated_at = clock_timestamp()
            FROM ends WHERE run.id = ANY((SELECT ends.runs FROM ends)::uuid[])
            RETURNING run.id, run.open_nodes, run.status),
        dependents AS (
            SELECT workflow_id, task_index, sum(ok) AS ok, sum(bad) AS bad, sum(seen) AS seen
            FROM (SELECT workflow_id, unnest(dependents) AS task_index, (status = 'COMPLETED')::integer AS ok,
                         (status <> 'COMPLETED')::integer AS bad, 0 AS seen FROM ended WHERE propagated
                  UNION ALL
                  SELECT workflow_id, unnest(context_dependents), 0, 0, 1 FROM ended WHERE propagated) AS edge
            GROUP BY workflow_id, task_index LIMIT no_limit),
        decisions AS (
            SELECT found.place, found.kind, deps_open - ok - bad AS deps_open, deps_ok + ok AS deps_ok,
                deps_bad + bad AS deps_bad, context_open - seen AS context_open,
                horsies_join(join_type, min_success, allow_failed_deps, deps_open - ok - bad, deps_ok + ok,
                    deps_bad + bad, context_open - seen) AS decision
            FROM dependents CROSS JOIN LATERAL (
                SELECT node.ctid AS place, node.kind, node.join_type, node.min_success,
                    node.allow_failed_deps, node.deps_open, node.deps_ok, node.deps_bad, node.context_open
                FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = dependents.workflow_id AND node.task_index = dependents.task_index
                  AND node.status = 'PENDING' OFFSET 0) AS found
            OFFSET 0),
        decided AS (
            UPDATE horsies_workflow_tasks AS node SET
                deps_open = decisions.deps_open, deps_ok = decisions.deps_ok, deps_bad = decisions.deps_bad,
                context_open = decisions.context_open,
                status = horsies_next_status(decision, decisions.kind),
                task_id = CASE WHEN decision = 'READY' AND decisions.kind <> 'map' THEN horsies_new_id() END,
                enqueued_at = CASE decision WHEN 'READY' THEN clock_timestamp() END
            FROM decisions WHERE node.ctid = decisions.place
            RETURNING node.workflow_id, node.task_index, node.kind, decision, node)
        SELECT array_agg(node ORDER BY workflow_id, task_index) FILTER (WHERE decision = 'READY'),
            bool_or(kind = 'signal') FILTER (WHERE decision = 'READY'),
            array_agg(workflow_id) FILTER (WHERE decision = 'SKIPPED'),
            array_agg(task_index) FILTER (WHERE decision = 'SKIPPED'),
            (SELECT array_agg(id) FROM counted_runs WHERE open_nodes = 0 AND status = 'RUNNING')
        INTO ready, has_signals, skipped.runs, skipped.indexes, drained_runs FROM decided;
        at_once := CASE WHEN ready IS NOT NULL THEN horsies_enqueue_nodes(ready, has_signals) END;
        parents := CASE WHEN drained_runs IS NOT NULL THEN horsies_finish_runs(drained_runs) END;
        batch.runs := skipped.runs || at_once.runs || parents.runs;
        batch.indexes := skipped.indexes || at_once.indexes || parents.indexes;
        may_pause := true;
        tasks := '{}';
        started := '{}';
    END LOOP;
    RETURN true;
END
$$;

-- Pause the runs of failed nodes whose failure pauses the run, and the open runs below them, with the error of the
-- failed node with the lowest index.
CREATE OR REPLACE FUNCTION horsies_pause_on_failure(p_ended horsies_nodes) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    failure record;
BEGIN
    FOR failure IN
        SELECT DISTINCT ON (node.workflow_id) node.workflow_id, horsies_node_error(node) AS reason
        FROM horsies_nodes_by_key(p_ended) AS node
        WHERE node.pauses AND node.status = 'FAILED' AND node.workflow_id = ANY(ARRAY(
            SELECT run.id FROM horsies_workflows AS run
            WHERE run.id = ANY(p_ended.runs) AND coalesce(run.status, '') = 'RUNNING'))
        ORDER BY node.workflow_id, node.task_index
    LOOP
        UPDATE horsies_workflows SET error = failure.reason WHERE id = failure.workflow_id;
        PERFORM horsies_pause_runs(ARRAY(SELECT horsies_tree(failure.workflow_id)));
    END LOOP;
END
$$;

-- Insert the tasks of nodes that have just become ENQUEUED, and start maps that have become READY. Sibling tasks become
-- due in array order, one microsecond apart, none of them in the future. Returns nodes that ended.
CREATE OR REPLACE FUNCTION horsies_enqueue_nodes(p_ready horsies_workflow_tasks[], p_has_signals boolean)
RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    begun_at timestamptz := clock_timestamp();
    inserted integer;
BEGIN
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_inputs, burst, lane_key, lane,
        held, updated_at)
    SELECT node.task_id, node.task_name, node.queue_name, node.priority, '[]', node.task_kwargs, begun_at,
        CASE node.kind
            WHEN 'sleep' THEN
                coalesce(node.not_before, begun_at + node.delay_ms * interval '1 millisecond')
            WHEN 'signal' THEN
                coalesce(begun_at + node.signal_timeout_ms * interval '1 millisecond', horsies_never_v1())
            ELSE begun_at - interval '1 microsecond' * (cardinality(p_ready) - node.ordinality)
        END,
        least(node.good_until, begun_at + node.expires_in_ms * interval '1 millisecond'),
        node.max_retries, node.task_options, node.timeout_ms, '', node.workflow_id, node.task_index,
        node.inputs, node.kind = 'task' AND node.inputs IS NULL AND horsies_is_burst_v1(node.task_options),
        node.lane_key, CASE WHEN node.lane_key IS NOT NULL THEN horsies_lane_v1(node.queue_name, node.lane_key) END,
        node.lane_key IS NOT NULL, begun_at
    FROM unnest(p_ready) WITH ORDINALITY AS node WHERE node.kind <> 'map';
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF p_has_signals THEN
        PERFORM horsies_deliver_signals(p_ready);
    END IF;
    RETURN CASE WHEN inserted < cardinality(p_ready) THEN horsies_expand_maps(p_ready) END;
END
$$;

-- RUNNING -> COMPLETED or FAILED for the given runs without open nodes. Returns the nodes of their parent runs that end
-- as a consequence.
CREATE OR REPLACE FUNCTION horsies_finish_runs(p_runs uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    run horsies_workflows;
    cases jsonb;
    matched integer;
    succeeded boolean;
    ended horsies_nodes;
BEGIN
    FOR run IN
        SELECT * FROM horsies_workflows
        WHERE id = ANY(p_runs) AND coalesce(status, '') = 'RUNNING' AND open_nodes = 0 ORDER BY id
    LOOP
        cases := run.success_policy -> 'cases';
        matched := NULL;
        succeeded := run.failed_nodes = 0;
        IF cases IS NOT NULL THEN
            SELECT min(option.place) - 1 INTO matched
            FROM jsonb_array_elements(cases) WITH ORDINALITY AS option (wanted, place)
            WHERE NOT EXISTS (
                SELECT FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = run.id AND node.status <> 'COMPLETED'
                  AND option.wanted -> 'required_indices' @> to_jsonb(node.task_index));
            succeeded := matched IS NOT NULL;
        END IF;
        UPDATE horsies_workflows SET
            status = CASE WHEN succeeded THEN 'COMPLETED' ELSE 'FAILED' END,
            error = CASE WHEN NOT succeeded THEN coalesce(horsies_first_error(run.id, cases),
                horsies_task_error('WORKFLOW_SUCCESS_CASE_NOT_MET',
                    'No case of the success policy of workflow ' || run.name || ' was met.')) END,
            matched_case = matched, completed_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = run.id RETURNING * INTO run;
        IF run.parent_workflow_id IS NOT NULL AND horsies_finish_parent_node(run) THEN
            ended.runs := ended.runs || run.parent_workflow_id;
            ended.indexes := ended.indexes || run.parent_task_index;
        END IF;
    END LOOP;
    RETURN ended;
END
$$;
