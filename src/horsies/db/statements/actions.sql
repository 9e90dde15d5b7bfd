-- The record of changes made by people. A refused change has a row too.

-- name: record_action
-- A row of its own for every change. It belongs to the transaction of the change.
INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail)
VALUES (%(actor)s, %(source)s, %(verb)s, %(subject)s, %(outcome)s, %(detail)s)

-- name: list_actions
-- Newest first, by the primary key or the index of the filter; two filters are rare and share the subject's.
SELECT id, at, actor, source, verb, subject, outcome, detail,
    extract(epoch FROM now() - at)::float8 AS age_seconds
FROM horsies_actions
WHERE id < %(before)s::bigint
  AND (%(subject)s::text IS NULL OR subject = %(subject)s::text)
  AND (%(actor)s::text IS NULL OR actor = %(actor)s::text)
ORDER BY id DESC LIMIT %(limit)s::integer

-- name: last_action
-- The newest change of this kind to a subject that took effect: the author of a pause.
SELECT id, at, actor, source, verb, subject, outcome, detail,
    extract(epoch FROM now() - at)::float8 AS age_seconds
FROM horsies_actions
WHERE subject = %(subject)s AND verb = %(verb)s AND outcome = 'done' ORDER BY id DESC LIMIT 1

-- name: delete_old_actions
-- One batch past the retention. Rows are written in the order of their ids, so the scan ends at the first young one.
DELETE FROM horsies_actions WHERE id = ANY(ARRAY(
    SELECT oldest.id FROM (SELECT id, at FROM horsies_actions ORDER BY id LIMIT %(limit)s::integer) AS oldest
    WHERE oldest.at < now() - %(hours)s * interval '1 hour'))
RETURNING id::text
