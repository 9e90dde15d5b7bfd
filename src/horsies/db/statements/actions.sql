-- The record of changes made by people. A refused change has a row too. The draft of a bulk order, the result of its
-- dry run, is kept here for an hour until it is started; the history omits it, because nothing has changed yet.

-- name: record_action
-- One row per change, written in the change's own transaction.
INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail)
VALUES (%(actor)s, %(source)s, %(verb)s, %(subject)s, %(outcome)s, %(detail)s)

-- name: list_actions
-- Newest first, by the primary key or the filter's index; two filters are rare and use the subject's index.
SELECT id, at, actor, source, verb, subject, outcome, detail,
    extract(epoch FROM now() - at)::float8 AS age_seconds, order_id::text
FROM horsies_actions
WHERE id < %(before)s::bigint AND outcome <> 'draft'
  AND (%(subject)s::text IS NULL OR subject = %(subject)s::text)
  AND (%(actor)s::text IS NULL OR actor = %(actor)s::text)
ORDER BY id DESC LIMIT %(limit)s::integer

-- name: last_actions
-- The newest change of this kind to each of these subjects that took effect, for example to find who paused them.
SELECT last.id, last.at, last.actor, last.source, last.verb, last.subject, last.outcome, last.detail,
    extract(epoch FROM now() - last.at)::float8 AS age_seconds, last.order_id::text
FROM unnest(%(subjects)s::text[]) AS asked (subject) CROSS JOIN LATERAL (
    SELECT * FROM horsies_actions AS action
    WHERE action.subject = asked.subject AND action.verb = %(verb)s AND action.outcome = 'done'
    ORDER BY action.id DESC LIMIT 1) AS last

-- name: delete_old_actions
-- One batch of rows past the retention. Rows are written in id order, so the scan ends at the first recent one.
-- Parameters: the maximum age, and how many rows to delete at most.
DELETE FROM horsies_actions WHERE id = ANY(ARRAY(
    SELECT oldest.id FROM (SELECT id, at FROM horsies_actions ORDER BY id LIMIT %(limit)s::integer) AS oldest
    WHERE oldest.at < now() - %(hours)s * interval '1 hour'))
RETURNING id::text

-- name: read_clock
SELECT clock_timestamp() AS at

-- name: judge_resends
-- The tasks that an order would refuse to send again, by primary key and the index on origins.
SELECT count(*) FILTER (WHERE workflow_id IS NOT NULL) AS in_workflow,
    count(*) FILTER (WHERE workflow_id IS NULL AND redacted_at IS NOT NULL) AS is_redacted,
    count(*) FILTER (WHERE workflow_id IS NULL AND redacted_at IS NULL AND EXISTS (
        SELECT FROM horsies_tasks AS again WHERE again.retried_from_task_id = task.id)) AS was_resent
FROM horsies_tasks AS task WHERE task.id = ANY(%(ids)s::uuid[])

-- name: read_candidates
-- The tasks that an order names, by primary key.
SELECT id::text, status, created_at, coalesce(completed_at, failed_at) AS finished_at
FROM horsies_tasks WHERE id = ANY(%(ids)s::uuid[])

-- name: delete_drafts
-- An author's outdated drafts, and all but the newest of the others, by the index on authors: a page that is loaded
-- often must not fill the table. Retention deletes the drafts of authors who make no more dry runs.
DELETE FROM horsies_actions
WHERE actor = %(actor)s AND outcome = 'draft' AND (at < now() - interval '1 hour' OR id NOT IN (
    SELECT id FROM horsies_actions
    WHERE actor = %(actor)s AND outcome = 'draft' ORDER BY id DESC LIMIT %(kept)s::integer))

-- name: discard_draft
-- draft -> nothing, right before the order or a new draft of it is stored.
DELETE FROM horsies_actions WHERE order_id = %(order_id)s::uuid AND outcome = 'draft'

-- name: store_order
-- nothing -> draft or running, after discard_draft. There is one row per order, however often it is started: a
-- stopped order continues where it stopped. An order that has been started does not become a draft again.
INSERT INTO horsies_actions AS known (
    actor, source, verb, subject, outcome, detail, order_id, order_plan, order_progress)
VALUES (%(actor)s, %(source)s, %(verb)s, %(subject)s, %(outcome)s, %(detail)s, %(order_id)s::uuid, %(plan)s,
    %(progress)s)
ON CONFLICT (order_id) DO UPDATE SET outcome = 'running'
WHERE excluded.outcome = 'running' AND known.outcome IN ('stopping', 'stopped')

-- name: stop_order
-- The next batch ends the order.
UPDATE horsies_actions SET outcome = 'stopping' WHERE order_id = %(order_id)s::uuid AND outcome = 'running'
RETURNING order_id::text

-- name: lock_orders
-- One batch at a time across all orders, because two orders must not send the same task again. The key is "orders" in
-- hex.
SELECT pg_advisory_xact_lock(122537101324915) IS NULL AS locked

-- name: read_order
-- After an hour, a draft's counts mean little, and it can no longer be started.
SELECT id, at, actor, outcome, order_plan AS plan, order_progress AS progress
FROM horsies_actions
WHERE order_id = %(order_id)s::uuid AND (outcome <> 'draft' OR at > now() - interval '1 hour')

-- name: save_order
-- An order's progress, written in its batch's transaction.
UPDATE horsies_actions SET outcome = %(outcome)s, detail = %(detail)s, order_progress = %(progress)s
WHERE order_id = %(order_id)s::uuid
