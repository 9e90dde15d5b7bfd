-- Progress of workflows, on the server: a task that ends moves its run on in the transaction that records its end,
-- whoever records it (a worker's turn, a cancel, an expiry, the reaper, a person at a prompt), because the trigger
-- on horsies_tasks calls horsies_advance. There is no second step that could be lost.
--
-- * One lock per tree of runs: whoever changes a run, its nodes or a descendant locks the row of the root first.
--   Transactions that will end tasks of workflows lock the roots before the tasks, in the order of their ids
--   (lock_runs), so no two of them ever wait for each other.
-- * Everything is set-based: the number of statements depends on how deep skips cascade, not on how many nodes end
--   or become ready. A node's join is decided by counters in its own row, kept for as long as it waits.
-- * Only a RUNNING run moves. What ends in a paused one is recorded with "propagated" false, and counts on resume.
-- * "coalesce(run.status, '') = ..." is a status guard the planner cannot match to the index of open runs: the primary
--   key is the right way to known runs, also for a plan that was made when there were few.
-- * Nodes are looked up by both columns of their key, which therefore come from one source: if the run came from one
--   and the index from another, a plan made while there were few nodes would use the run alone, for ever after.
-- * Ends recorded together count together, level by level: failures pause first, then everything that goes on is
--   counted, then what follows from it.

-- What its counters mean for a node that waits: it goes on waiting, may begin, or never will.
CREATE OR REPLACE FUNCTION horsies_join(
    join_type text, min_success integer, allow_failed_deps boolean, open_count bigint, ok_count bigint,
    bad_count bigint, context_open bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN join_type = 'all' THEN CASE
            WHEN open_count > 0 THEN 'PENDING'
            WHEN bad_count = 0 OR allow_failed_deps THEN 'READY'
            ELSE 'SKIPPED' END
        WHEN ok_count >= coalesce(min_success, 1) THEN CASE WHEN context_open > 0 THEN 'PENDING' ELSE 'READY' END
        WHEN ok_count + open_count < coalesce(min_success, 1) THEN 'SKIPPED'
        ELSE 'PENDING'
    END
$$;

-- The status that follows from a decision. A node that may begin is ENQUEUED in the same update, because its task
-- follows in the same transaction; a map has no task but its items, and is READY until it has them.
CREATE OR REPLACE FUNCTION horsies_next_status(decision text, kind text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN decision = 'READY' AND kind <> 'map' THEN 'ENQUEUED' ELSE decision END
$$;

-- Tasks of workflows have just ended, these of these nodes; everything that follows from it. When they are "plain",
-- every one the whole of a node and a success, nothing can pause and their ends count at once.
CREATE OR REPLACE FUNCTION horsies_advance(
    runs uuid[], indexes integer[], tasks uuid[], started timestamptz[], are_plain boolean) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ended horsies_nodes := (runs, indexes);
    parts horsies_nodes;
BEGIN
    PERFORM root.id FROM horsies_workflows AS root
    WHERE root.id = ANY(ARRAY(
        SELECT run.root_workflow_id FROM horsies_workflows AS run WHERE run.id = ANY(runs)))
    ORDER BY root.id FOR NO KEY UPDATE;
    IF are_plain THEN
        RETURN horsies_propagate(ended, false, tasks, started);
    END IF;
    WITH finished AS (
        SELECT task.id, task.status, task.started_at, found.place
        FROM (SELECT * FROM horsies_tasks WHERE id = ANY(tasks) LIMIT cardinality(tasks)) AS task
        CROSS JOIN LATERAL (
            SELECT node.ctid AS place FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index
              AND node.task_id = task.id AND node.status = 'ENQUEUED'
              AND NOT (node.kind = 'workflow' AND task.status = 'COMPLETED') OFFSET 0) AS found),
    over AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = CASE finished.status WHEN 'COMPLETED' THEN 'COMPLETED' ELSE 'FAILED' END,
            completed_at = clock_timestamp(), started_at = finished.started_at, result_task_id = finished.id
        FROM finished WHERE node.ctid = finished.place
        RETURNING node.workflow_id, node.task_index)
    SELECT array_agg(workflow_id), array_agg(task_index) INTO ended.runs, ended.indexes FROM over;
    parts := horsies_end_parts(tasks);
    ended.runs := ended.runs || parts.runs;
    ended.indexes := ended.indexes || parts.indexes;
    RETURN horsies_propagate(ended, true);
END
$$;

-- Everything that follows from the end of these nodes, in RUNNING runs: dependents count and decide, ready ones
-- become tasks, skipped ones are the next to count, runs without open nodes end and so do the nodes they stand for.
-- "may_pause" says that a failure among them is new; after a resume the same failures do not pause the run again.
-- "tasks" and "started" belong to nodes whose tasks succeeded and which end here: the same update lets them end and
-- count, because a second one would not only write them twice but check the foreign key of every row that this
-- transaction has written already.
CREATE OR REPLACE FUNCTION horsies_propagate(
    ended horsies_nodes, may_pause boolean, tasks uuid[] DEFAULT '{}', started timestamptz[] DEFAULT '{}')
RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    ready horsies_nodes;
    skipped horsies_nodes;
    at_once horsies_nodes;
    parents horsies_nodes;
    through uuid[];
    plenty bigint := 1000000000;  -- no limit, but a number that the planner does not know: it expects few
BEGIN
    WHILE cardinality(ended.runs) > 0 LOOP
        IF may_pause THEN
            PERFORM horsies_pause_on_failure(ended);
        END IF;
        -- One statement for all of it, or each of its parts would cost a start of its own. No row is updated twice:
        -- what ends is not PENDING, and only what is PENDING still counts. Rows are looked up as horsies_nodes_by_key does
        -- and then updated where they lie, which nobody can change who does not hold the root.
        WITH chosen AS (
            SELECT key.*, found.*, key.workflow_id = ANY(ARRAY(
                SELECT run.id FROM horsies_workflows AS run
                WHERE run.id = ANY(ended.runs) AND coalesce(run.status, '') = 'RUNNING')) AS counts
            FROM (SELECT * FROM unnest(ended.runs, ended.indexes, tasks, started) LIMIT cardinality(ended.runs))
                AS key (workflow_id, task_index, task_id, started_at)
            CROSS JOIN LATERAL (
                SELECT node.ctid AS place, node.status, node.task_id AS current_task_id
                FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = key.workflow_id AND node.task_index = key.task_index OFFSET 0) AS found),
        over AS (
            UPDATE horsies_workflow_tasks AS node SET
                propagated = chosen.counts,
                status = CASE WHEN chosen.task_id IS NULL THEN node.status ELSE 'COMPLETED' END,
                completed_at = coalesce(node.completed_at, clock_timestamp()),
                started_at = coalesce(chosen.started_at, node.started_at),
                result_task_id = coalesce(chosen.task_id, node.result_task_id)
            FROM chosen
            WHERE node.ctid = chosen.place AND (CASE WHEN chosen.task_id IS NULL THEN chosen.counts
                ELSE chosen.current_task_id = chosen.task_id AND chosen.status = 'ENQUEUED' END)
            RETURNING node.workflow_id, node.status, node.propagated, node.dependents, node.context_dependents),
        counted AS (
            UPDATE horsies_workflows AS run SET
                open_nodes = run.open_nodes - ends.total, failed_nodes = run.failed_nodes + ends.failed,
                error = CASE WHEN ends.failed > 0 AND run.error IS NULL THEN horsies_first_error(run.id)
                    ELSE run.error END,
                updated_at = clock_timestamp()
            FROM (SELECT workflow_id, count(*) AS total, count(*) FILTER (WHERE status = 'FAILED') AS failed
                  FROM over WHERE propagated GROUP BY workflow_id) AS ends
            WHERE run.id = ends.workflow_id AND run.id = ANY(ended.runs)
            RETURNING run.id, run.open_nodes),
        dependent AS (
            SELECT workflow_id, task_index, sum(ok) AS ok, sum(bad) AS bad, sum(seen) AS seen
            FROM (SELECT workflow_id, unnest(dependents) AS task_index, (status = 'COMPLETED')::integer AS ok,
                         (status <> 'COMPLETED')::integer AS bad, 0 AS seen FROM over WHERE propagated
                  UNION ALL
                  SELECT workflow_id, unnest(context_dependents), 0, 0, 1 FROM over WHERE propagated) AS edge
            GROUP BY workflow_id, task_index LIMIT plenty),
        weighed AS (
            SELECT found.place, found.kind, deps_open - ok - bad AS deps_open, deps_ok + ok AS deps_ok,
                deps_bad + bad AS deps_bad, context_open - seen AS context_open,
                horsies_join(join_type, min_success, allow_failed_deps, deps_open - ok - bad, deps_ok + ok,
                    deps_bad + bad, context_open - seen) AS decision
            FROM dependent CROSS JOIN LATERAL (
                SELECT node.ctid AS place, node.kind, node.join_type, node.min_success, node.allow_failed_deps,
                    node.deps_open, node.deps_ok, node.deps_bad, node.context_open
                FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = dependent.workflow_id AND node.task_index = dependent.task_index
                  AND node.status = 'PENDING' OFFSET 0) AS found
            OFFSET 0),
        decided AS (
            UPDATE horsies_workflow_tasks AS node SET
                deps_open = weighed.deps_open, deps_ok = weighed.deps_ok, deps_bad = weighed.deps_bad,
                context_open = weighed.context_open, status = horsies_next_status(weighed.decision, weighed.kind),
                task_id = CASE WHEN weighed.decision = 'READY' AND weighed.kind <> 'map' THEN horsies_new_id() END,
                enqueued_at = CASE weighed.decision WHEN 'READY' THEN clock_timestamp() END,
                completed_at = CASE weighed.decision WHEN 'SKIPPED' THEN clock_timestamp() END
            FROM weighed WHERE node.ctid = weighed.place
            RETURNING node.workflow_id, node.task_index, weighed.decision)
        SELECT array_agg(workflow_id) FILTER (WHERE decision = 'READY'),
            array_agg(task_index) FILTER (WHERE decision = 'READY'),
            array_agg(workflow_id) FILTER (WHERE decision = 'SKIPPED'),
            array_agg(task_index) FILTER (WHERE decision = 'SKIPPED'),
            (SELECT array_agg(id) FROM counted WHERE open_nodes = 0)
        INTO ready.runs, ready.indexes, skipped.runs, skipped.indexes, through FROM decided;
        at_once := CASE WHEN ready.runs IS NOT NULL THEN horsies_enqueue_nodes(ready) END;
        parents := CASE WHEN through IS NOT NULL THEN horsies_finish_runs(through) END;
        ended.runs := skipped.runs || at_once.runs || parents.runs;
        ended.indexes := skipped.indexes || at_once.indexes || parents.indexes;
        may_pause := true;
        tasks := '{}';
        started := '{}';
    END LOOP;
    RETURN true;
END
$$;

-- A failure that pauses: of these nodes, just ended, those that failed where a failure pauses the run. The run and
-- what runs below it are put on hold with the error of the first by index.
CREATE OR REPLACE FUNCTION horsies_pause_on_failure(ended horsies_nodes) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    failure record;
BEGIN
    FOR failure IN
        SELECT DISTINCT ON (node.workflow_id) node.workflow_id, horsies_node_error(node) AS reason
        FROM horsies_nodes_by_key(ended) AS node
        JOIN horsies_workflows AS run ON run.id = node.workflow_id AND run.id = ANY(ended.runs)
        WHERE node.pauses AND node.status = 'FAILED' AND coalesce(run.status, '') = 'RUNNING'
        ORDER BY node.workflow_id, node.task_index
    LOOP
        UPDATE horsies_workflows SET error = failure.reason WHERE id = failure.workflow_id;
        PERFORM horsies_pause_runs(ARRAY(SELECT horsies_tree(failure.workflow_id)));
    END LOOP;
END
$$;

-- The task rows of nodes that have just become ENQUEUED, and the beginning of maps that have become READY. Siblings
-- are due in the order of their indexes, a microsecond apart and none in the future. Returns the nodes that ended at
-- once.
CREATE OR REPLACE FUNCTION horsies_enqueue_nodes(ready horsies_nodes) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := clock_timestamp();
    has_maps boolean;
    has_signals boolean;
BEGIN
    WITH inserted AS (
        INSERT INTO horsies_tasks (
            id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
            task_options, timeout_ms, enqueue_sha, workflow_id, workflow_node_index, workflow_inputs)
        SELECT node.task_id, node.task_name, node.queue_name, node.priority, '[]', node.task_kwargs, moment,
            CASE node.kind
                WHEN 'sleep' THEN coalesce(node.not_before, moment + node.delay_ms * interval '1 millisecond')
                WHEN 'signal' THEN coalesce(moment + node.signal_timeout_ms * interval '1 millisecond', horsies_never_v1())
                ELSE moment - (cardinality(ready.indexes) - row_number() OVER (ORDER BY node.workflow_id, node.task_index))
                    * interval '1 microsecond'
            END,
            least(node.good_until, moment + node.expires_in_ms * interval '1 millisecond'), node.max_retries,
            node.task_options, node.timeout_ms, '', node.workflow_id, node.task_index, node.inputs
        FROM horsies_nodes_by_key(ready) AS node WHERE node.kind <> 'map'
        RETURNING task_name)
    SELECT count(*) < cardinality(ready.indexes), bool_or(task_name = 'horsies.signal') INTO has_maps, has_signals
    FROM inserted;
    IF has_signals THEN
        PERFORM horsies_deliver_signals(ready);
    END IF;
    RETURN CASE WHEN has_maps THEN horsies_expand_maps(ready) END;
END
$$;

-- RUNNING -> COMPLETED or FAILED for those of these runs that have no open node. Returns the nodes of parents that
-- ended with them.
CREATE OR REPLACE FUNCTION horsies_finish_runs(runs uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    run horsies_workflows;
    cases jsonb;
    matched integer;
    succeeded boolean;
    ended horsies_nodes;
BEGIN
    FOR run IN
        SELECT * FROM horsies_workflows
        WHERE id = ANY(runs) AND coalesce(status, '') = 'RUNNING' AND open_nodes = 0 ORDER BY id
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
            error = CASE WHEN NOT succeeded THEN coalesce(horsies_first_error(run.id, cases), horsies_task_error(
                'WORKFLOW_SUCCESS_CASE_NOT_MET', 'No case of the success policy of workflow ' || run.name || ' was met.'))
            END,
            matched_case = matched, completed_at = clock_timestamp(), updated_at = clock_timestamp()
        WHERE id = run.id RETURNING * INTO run;
        IF run.parent_workflow_id IS NOT NULL AND horsies_end_sub_node(run) THEN
            ended.runs := ended.runs || run.parent_workflow_id;
            ended.indexes := ended.indexes || run.parent_task_index;
        END IF;
    END LOOP;
    RETURN ended;
END
$$;

-- Tasks that ended and are only a part of a node's work. Returns the nodes that ended with them.
CREATE OR REPLACE FUNCTION horsies_end_parts(task_ids uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    not_started horsies_nodes := horsies_start_children(task_ids);
    maps horsies_nodes := horsies_end_items(task_ids);
BEGIN
    RETURN (not_started.runs || maps.runs, not_started.indexes || maps.indexes);
END
$$;
