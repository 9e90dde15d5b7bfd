-- Counters of runs and waiting nodes, computed from the nodes' statuses, and the decisions that follow from these
-- counters.

-- Return the correct counters of waiting nodes. A dependency that is no longer stored counts as failed.
CREATE OR REPLACE FUNCTION horsies_true_counts(p_runs uuid[])
RETURNS TABLE (
    workflow_id uuid, task_index integer, still_open bigint, ok bigint, bad bigint, unseen bigint)
LANGUAGE sql STABLE AS $$
    SELECT node.workflow_id, node.task_index, counts.still_open, counts.ok,
        cardinality(node.dependencies) - counts.still_open - counts.ok, counts.unseen
    FROM horsies_workflow_tasks AS node CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE NOT other.propagated) AS still_open,
            count(*) FILTER (WHERE other.propagated AND other.status = 'COMPLETED') AS ok,
            count(*) FILTER (WHERE NOT other.propagated AND node.task_index = ANY(other.context_dependents))
                AS unseen
        FROM horsies_workflow_tasks AS other
        WHERE other.workflow_id = node.workflow_id AND other.task_index = ANY(node.dependencies)) AS counts
    WHERE node.workflow_id = ANY(p_runs) AND node.status = 'PENDING'
$$;

-- Set all counters of these runs to the values that follow from their nodes' statuses.
CREATE OR REPLACE FUNCTION horsies_recount(p_runs uuid[]) RETURNS void LANGUAGE sql AS $$
    UPDATE horsies_workflows AS run SET open_nodes = nodes.open, failed_nodes = nodes.failed
    FROM (SELECT workflow_id, count(*) FILTER (WHERE NOT propagated) AS open,
              count(*) FILTER (WHERE status = 'FAILED' AND propagated) AS failed
          FROM horsies_workflow_tasks WHERE workflow_id = ANY(p_runs) GROUP BY workflow_id) AS nodes
    WHERE run.id = nodes.workflow_id
      AND (run.open_nodes, run.failed_nodes) IS DISTINCT FROM (nodes.open, nodes.failed);
    UPDATE horsies_workflow_tasks AS node SET
        deps_open = counts.still_open, deps_ok = counts.ok, deps_bad = counts.bad,
        context_open = counts.unseen
    FROM horsies_true_counts(p_runs) AS counts
    WHERE node.workflow_id = counts.workflow_id AND node.task_index = counts.task_index
      AND (node.deps_open, node.deps_ok, node.deps_bad, node.context_open)
          IS DISTINCT FROM (counts.still_open, counts.ok, counts.bad, counts.unseen);
$$;

-- Apply everything that is outstanding in these runs, if they are RUNNING: nodes that ended are counted without pausing
-- the run again, waiting nodes start or are skipped if their counters allow it, ready nodes become tasks, and runs
-- without open nodes end.
CREATE OR REPLACE FUNCTION horsies_catch_up(p_runs uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    ended horsies_nodes;
BEGIN
    SELECT array_agg(workflow_id), array_agg(task_index) INTO ended.runs, ended.indexes
    FROM horsies_workflow_tasks
    WHERE workflow_id = ANY(p_runs) AND status IN ('COMPLETED', 'FAILED', 'SKIPPED') AND NOT propagated;
    PERFORM horsies_propagate(ended, false);
    PERFORM horsies_propagate(horsies_decide_nodes(p_runs), true);
    PERFORM horsies_propagate(horsies_finish_runs(p_runs), true);
END
$$;

-- Advance the stuck nodes of these runs: PENDING nodes whose counters already allow a decision, and READY nodes
-- without a task. Returns the nodes that ended: skipped nodes, and maps without elements.
CREATE OR REPLACE FUNCTION horsies_decide_nodes(p_runs uuid[]) RETURNS horsies_nodes LANGUAGE plpgsql AS $$
DECLARE
    ready horsies_workflow_tasks[];
    has_signals boolean;
    skipped horsies_nodes;
    at_once horsies_nodes;
BEGIN
    WITH waiting AS MATERIALIZED (
        SELECT node.workflow_id, node.task_index, node.kind, CASE node.status WHEN 'READY' THEN 'READY'
            ELSE horsies_join(node.join_type, node.min_success, node.allow_failed_deps, node.deps_open,
                node.deps_ok, node.deps_bad, node.context_open) END AS decision
        FROM horsies_workflows AS run JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id
        WHERE run.id = ANY(p_runs) AND coalesce(run.status, '') = 'RUNNING'
          AND node.status IN ('PENDING', 'READY')),
    decided AS (
        UPDATE horsies_workflow_tasks AS node SET
            status = horsies_next_status(decision, waiting.kind),
            task_id = CASE WHEN decision = 'READY' AND waiting.kind <> 'map' THEN horsies_new_id() END,
            enqueued_at = CASE decision WHEN 'READY' THEN clock_timestamp() END
        FROM waiting
        WHERE node.workflow_id = waiting.workflow_id AND node.task_index = waiting.task_index
          AND decision <> 'PENDING'
        RETURNING node.workflow_id, node.task_index, node.kind, decision, node)
    SELECT array_agg(node ORDER BY workflow_id, task_index) FILTER (WHERE decision = 'READY'),
        bool_or(kind = 'signal') FILTER (WHERE decision = 'READY'),
        array_agg(workflow_id) FILTER (WHERE decision = 'SKIPPED'),
        array_agg(task_index) FILTER (WHERE decision = 'SKIPPED')
    INTO ready, has_signals, skipped.runs, skipped.indexes FROM decided;
    at_once := horsies_enqueue_nodes(ready, has_signals);
    RETURN (skipped.runs || at_once.runs, skipped.indexes || at_once.indexes);
END
$$;
