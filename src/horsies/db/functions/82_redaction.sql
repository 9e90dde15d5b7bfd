-- Redaction: ended tasks and runs lose everything that may identify a person. The record that they ran remains.

-- Redact ended tasks: they keep their name, queue, times, status, codes and places in the code, and lose their
-- arguments, result, messages, headers and keys, and the digests of all these. The trigger on changed tasks
-- (horsies_notify_changed_tasks) ignores redacted rows, because these tasks have already ended. Returns the ids of the
-- tasks that were redacted.
CREATE OR REPLACE FUNCTION horsies_redact_tasks_v1(p_ids uuid[]) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    redacted uuid[];
BEGIN
    WITH changed AS (
        UPDATE horsies_tasks AS task SET
            args = NULL, kwargs = NULL, failed_reason = NULL, enqueue_sha = '',
            -- A failed task keeps an error as its result; without one it would look as if it had crashed.
            result = CASE WHEN task.status = 'FAILED' THEN json_build_object('err', json_build_object(
                'error_code', coalesce(task.error_code, 'WORKER_CRASHED'), 'message', 'The task was redacted.',
                'data', NULL, 'exception', NULL))::text END,
            idempotency_key = NULL, idempotency_sha = NULL, unique_key = NULL, unique_while = NULL,
            lane_key = NULL, lane = NULL, task_options = NULL, redacted_at = clock_timestamp()
        WHERE task.id = ANY(p_ids) AND task.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
          AND task.redacted_at IS NULL
        RETURNING task.id)
    SELECT array_agg(changed.id) INTO redacted FROM changed;
    UPDATE horsies_task_attempts AS attempt SET error_message = NULL, failed_reason = NULL, retry_reason = NULL
    WHERE attempt.task_id = ANY(redacted);
    DELETE FROM horsies_task_progress AS report WHERE report.task_id = ANY(redacted);
    DELETE FROM horsies_task_logs AS log WHERE log.task_id = ANY(redacted);
    DELETE FROM horsies_steps AS step WHERE step.task_id = ANY(redacted);
    DELETE FROM horsies_task_signals AS sent WHERE sent.task_id = ANY(redacted);
    DELETE FROM horsies_parked AS parked WHERE parked.task_id = ANY(redacted);
    PERFORM horsies_disown_payloads_v1(redacted);
    RETURN QUERY SELECT unnest(redacted);
END
$$;

-- Redact ended runs, as whole trees: their nodes keep the graph and the names, and their tasks are redacted. The caller
-- has locked the roots, and has checked under that lock that every task in the trees has ended. Returns the ids of the
-- roots and of all runs and tasks below them.
CREATE OR REPLACE FUNCTION horsies_redact_runs_v1(p_roots uuid[]) RETURNS TABLE (id uuid, is_root boolean)
LANGUAGE plpgsql AS $$
DECLARE
    roots uuid[];
    runs uuid[];
BEGIN
    SELECT array_agg(root.id) INTO roots FROM horsies_workflows AS root
    WHERE root.id = ANY(p_roots) AND root.parent_workflow_id IS NULL AND root.redacted_at IS NULL
      AND root.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED');
    runs := roots || ARRAY(
        SELECT run.id FROM horsies_workflows AS run
        WHERE run.root_workflow_id = ANY(roots) AND run.parent_workflow_id IS NOT NULL);
    UPDATE horsies_workflows AS run SET
        error = NULL, fingerprint = '', workflow_key = NULL, redacted_at = clock_timestamp()
    WHERE run.id = ANY(runs);
    UPDATE horsies_workflow_tasks AS node SET
        result = NULL, task_kwargs = '{}', task_options = '{}', lane_key = NULL, sub_workflow_summary = NULL
    WHERE node.workflow_id = ANY(runs);
    DELETE FROM horsies_workflow_signals AS sent WHERE sent.workflow_id = ANY(runs);
    PERFORM horsies_disown_payloads_v1(runs);
    RETURN QUERY SELECT run.id, run.id = ANY(roots) FROM unnest(runs) AS run (id);
    RETURN QUERY SELECT found.id, false FROM horsies_redact_tasks_v1(ARRAY(
        SELECT task.id FROM horsies_tasks AS task WHERE task.workflow_id = ANY(runs))) AS found (id);
END
$$;
