-- Webhooks. When a task or run ends, the delivery of that event is a new task, inserted in the transaction that records
-- the end. The triggers on tasks and runs call these functions, so every statement that ends a task or run is covered.
-- Without webhooks the triggers never call them. The end of a delivery is not an event itself; otherwise a receiver
-- that is down would cause endless deliveries.
--
-- One built-in task checks for findings on behalf of all workers. The findings of each check are compared with those of
-- the previous check.
--
-- An event contains names, ids, times and codes. Arguments, results and messages stay in the database.

CREATE OR REPLACE FUNCTION horsies_event_time(p_at timestamptz) RETURNS text LANGUAGE sql STABLE
RETURN to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');

-- Nothing -> PENDING for one delivery per array element: the webhook's name, the type of the event, and its data. The
-- id of an event is the id of its first delivery; retries and repeated deliveries send the same id.
CREATE OR REPLACE FUNCTION horsies_send_events(p_webhooks text[], p_types text[], p_data json[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    now_at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at, max_retries,
        task_options, timeout_ms, retention, enqueue_sha)
    SELECT event.id, 'horsies.webhook.' || hook.name, hook.queue_name, hook.priority, '[]',
        json_build_object('event', json_build_object(
            'id', event.id, 'type', event.type, 'timestamp', horsies_event_time(now_at), 'data', event.data))::text,
        now_at, now_at, now_at, now_at, hook.max_retries, hook.task_options, hook.timeout_ms, hook.retention,
        encode(sha256(convert_to(event.id::text, 'UTF8')), 'hex')
    FROM (SELECT horsies_new_id() AS id, sent.webhook, sent.type, sent.data
          FROM unnest(p_webhooks, p_types, p_data) AS sent (webhook, type, data) OFFSET 0) AS event
    JOIN horsies_webhooks AS hook ON hook.name = event.webhook
    ORDER BY event.id;
END
$$;

-- Announce tasks that have just failed, expired or been cancelled.
CREATE OR REPLACE FUNCTION horsies_announce_tasks(p_ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    webhooks text[];
    types text[];
    data json[];
BEGIN
    SELECT array_agg(hook.name), array_agg(task.event), array_agg(json_build_object(
            'task_id', task.id, 'task_name', task.task_name, 'queue_name', task.queue_name, 'status', task.status,
            'error_code', task.error_code, 'retries', task.retry_count, 'fingerprint', task.fingerprint,
            'sent_at', horsies_event_time(task.sent_at), 'started_at', horsies_event_time(task.started_at),
            'ended_at', horsies_event_time(coalesce(task.failed_at, task.updated_at)),
            'run_id', task.workflow_id, 'schedule_name', task.schedule_name))
    INTO webhooks, types, data
    FROM (SELECT ended.*, 'task.' || lower(ended.status::text) AS event FROM horsies_tasks AS ended
          WHERE ended.id = ANY(p_ids) AND NOT starts_with(ended.task_name, 'horsies.webhook.')
            AND ended.task_name <> 'horsies.findings') AS task
    JOIN horsies_webhooks AS hook
        ON task.event = ANY(hook.events) AND (hook.task_names IS NULL OR task.task_name = ANY(hook.task_names));
    IF webhooks IS NOT NULL THEN
        PERFORM horsies_send_events(webhooks, types, data);
    END IF;
END
$$;

-- Announce a run without a parent that has just ended.
CREATE OR REPLACE FUNCTION horsies_announce_run(p_run horsies_workflows) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    webhooks text[] := ARRAY(SELECT hook.name::text FROM horsies_webhooks AS hook WHERE 'run.ended' = ANY(hook.events));
    data json := json_build_object(
        'run_id', p_run.id, 'name', p_run.name, 'definition_key', p_run.definition_key, 'status', p_run.status,
        'error_code', coalesce(p_run.error::json #>> '{error_code,__builtin_task_code__}',
            p_run.error::json ->> 'error_code'),
        'nodes', p_run.total_nodes, 'failed_nodes', p_run.failed_nodes,
        'sent_at', horsies_event_time(p_run.sent_at), 'started_at', horsies_event_time(p_run.started_at),
        'ended_at', horsies_event_time(coalesce(p_run.completed_at, p_run.updated_at)),
        'schedule_name', p_run.schedule_name);
BEGIN
    PERFORM horsies_send_events(
        webhooks, array_fill('run.ended'::text, ARRAY[cardinality(webhooks)]),
        array_fill(data, ARRAY[cardinality(webhooks)]));
END
$$;

-- Nothing -> open for the new findings in "p_found"; open -> nothing for stored findings that the checks in "p_checks"
-- no longer report. The findings of a check that could not read its facts, and so is not in "p_checks", stay open.
-- Returns how many events were stored.
CREATE OR REPLACE FUNCTION horsies_record_findings_v1(p_found jsonb, p_checks text[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    webhooks text[];
    types text[];
    data json[];
BEGIN
    WITH found AS MATERIALIZED (
        SELECT DISTINCT ON (one.code, one.subject) one.* FROM jsonb_to_recordset(p_found) AS one (
            code text, subject text, check_id text, level text, sentence text, remedy text)),
    opened AS (
        INSERT INTO horsies_findings (code, subject, check_id, level, sentence, remedy)
        SELECT found.code, found.subject, found.check_id, found.level, found.sentence, found.remedy FROM found
        ORDER BY found.code, found.subject
        ON CONFLICT (code, subject) DO NOTHING RETURNING horsies_findings.*),
    closed AS (
        DELETE FROM horsies_findings AS stored
        WHERE stored.check_id = ANY(p_checks) AND NOT EXISTS (
            SELECT FROM found WHERE found.code = stored.code AND found.subject = stored.subject)
        RETURNING stored.*),
    changed AS (
        SELECT 'finding.opened' AS event, opened.*, NULL::timestamptz AS closed_at FROM opened
        UNION ALL SELECT 'finding.closed', closed.*, clock_timestamp() FROM closed)
    SELECT array_agg(hook.name), array_agg(changed.event), array_agg(json_build_object(
            'code', changed.code, 'subject', changed.subject, 'level', changed.level, 'sentence', changed.sentence,
            'remedy', changed.remedy, 'opened_at', horsies_event_time(changed.opened_at),
            'closed_at', horsies_event_time(changed.closed_at)))
    INTO webhooks, types, data
    FROM changed JOIN horsies_webhooks AS hook ON changed.event = ANY(hook.events);
    IF webhooks IS NOT NULL THEN
        PERFORM horsies_send_events(webhooks, types, data);
    END IF;
    RETURN coalesce(cardinality(webhooks), 0);
END
$$;
