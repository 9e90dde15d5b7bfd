-- The record of changes made by people, including refused changes. The draft of a bulk order (the result of its dry
-- run) is kept here for an hour, or until it is started. The history omits drafts, because they have not changed
-- anything yet.

-- name: record_action
-- Record one change, in the transaction of the change itself.
INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail)
VALUES (%(actor)s, %(source)s, %(verb)s, %(subject)s, %(outcome)s, %(detail)s)

-- name: list_actions
-- The history of changes, newest first, by the primary key or the index for the filter. With two filters, which is
-- rare, the index on subjects is used.
SELECT id, at, actor, source, verb, subject, outcome, detail,
    extract(epoch FROM now() - at)::float8 AS age_seconds, order_id::text
FROM horsies_actions
WHERE id < %(before)s::bigint AND outcome <> 'draft'
  AND (%(subject)s::text IS NULL OR subject = %(subject)s::text)
  AND (%(actor)s::text IS NULL OR actor = %(actor)s::text)
ORDER BY id DESC LIMIT %(limit)s::integer

-- name: last_actions
-- The newest change of this kind that took effect, for each of these subjects; used, for example, to find out who
-- paused them.
SELECT last.id, last.at, last.actor, last.source, last.verb, last.subject, last.outcome, last.detail,
    extract(epoch FROM now() - last.at)::float8 AS age_seconds, last.order_id::text
FROM unnest(%(subjects)s::text[]) AS asked (subject) CROSS JOIN LATERAL (
    SELECT * FROM horsies_actions AS action
    WHERE action.subject = asked.subject AND action.verb = %(verb)s AND action.outcome = 'done'
    ORDER BY action.id DESC LIMIT 1) AS last

-- name: delete_old_actions
-- Delete one batch of rows that are older than the retention. Rows are written in id order, so the scan ends at the
-- first row that is not old enough. Parameters: the maximum age, and how many rows to delete at most.
DELETE FROM horsies_actions WHERE id = ANY(ARRAY(
    SELECT oldest.id FROM (SELECT id, at FROM horsies_actions ORDER BY id LIMIT %(limit)s::integer) AS oldest
    WHERE oldest.at < now() - %(hours)s * interval '1 hour'))
RETURNING id::text

-- name: read_clock
SELECT clock_timestamp() AS at

-- name: judge_resends
-- Count the tasks in this list that an order would refuse to send again, by reason, from the primary key and the index
-- on original tasks.
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
-- Delete an author's outdated drafts, and all current drafts except the newest, by the index on authors, so that
-- frequent dry runs do not fill the table. Retention deletes the drafts of authors who make no more dry runs.
DELETE FROM horsies_actions
WHERE actor = %(actor)s AND outcome = 'draft' AND (at < now() - interval '1 hour' OR id NOT IN (
    SELECT id FROM horsies_actions
    WHERE actor = %(actor)s AND outcome = 'draft' ORDER BY id DESC LIMIT %(kept)s::integer))

-- name: discard_draft
-- draft -> nothing, immediately before the started order, or a new draft of it, is stored.
DELETE FROM horsies_actions WHERE order_id = %(order_id)s::uuid AND outcome = 'draft'

-- name: store_order
-- nothing -> draft or running, after discard_draft. An order has a single row, no matter how often it is started: a
-- stopped order continues where it stopped. An order that has been started does not become a draft again.
INSERT INTO horsies_actions AS known (
    actor, source, verb, subject, outcome, detail, order_id, order_plan, order_progress)
VALUES (%(actor)s, %(source)s, %(verb)s, %(subject)s, %(outcome)s, %(detail)s, %(order_id)s::uuid, %(plan)s,
    %(progress)s)
ON CONFLICT (order_id) DO UPDATE SET outcome = 'running'
WHERE excluded.outcome = 'running' AND known.outcome IN ('stopping', 'stopped')

-- name: stop_order
-- Request an order to stop; the next batch of the order then ends it.
UPDATE horsies_actions SET outcome = 'stopping' WHERE order_id = %(order_id)s::uuid AND outcome = 'running'
RETURNING order_id::text

-- name: lock_orders
-- Take the lock under which only one batch runs at a time across all orders, so that two orders do not resend the same
-- task. The lock key is the word "orders" in hex.
SELECT pg_advisory_xact_lock(122537101324915) IS NULL AS locked

-- name: read_order
-- An order, or a draft that is at most an hour old. An older draft cannot be started, because its counts are outdated.
SELECT id, at, actor, outcome, order_plan AS plan, order_progress AS progress
FROM horsies_actions
WHERE order_id = %(order_id)s::uuid AND (outcome <> 'draft' OR at > now() - interval '1 hour')

-- name: save_order
-- Store the progress of an order, in the transaction of its batch.
UPDATE horsies_actions SET outcome = %(outcome)s, detail = %(detail)s, order_progress = %(progress)s
WHERE order_id = %(order_id)s::uuid
