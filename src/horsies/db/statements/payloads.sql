-- Statements on large payloads, which are stored outside the rows of tasks.

-- name: put_payload
-- Nothing -> an object for a task or run whose row is stored afterwards. Without "body", the object is outside the
-- database.
WITH kept AS (
    INSERT INTO horsies_payloads (id, store, bytes, body)
    VALUES (%(id)s::uuid, %(store)s, %(bytes)s::bigint, %(body)s::bytea)
    RETURNING id)
INSERT INTO horsies_payload_owners (owner_id, payload_id) SELECT %(owner_id)s::uuid, kept.id FROM kept

-- name: read_payload
SELECT body FROM horsies_payloads WHERE id = %(id)s::uuid AND body IS NOT NULL

-- name: sweep_payloads
-- Delete objects that no row needs: see horsies_sweep_payloads_v1.
SELECT horsies_sweep_payloads_v1(%(after)s::uuid, %(seconds)s::float8, %(limit)s::integer)::text AS id

-- name: find_released
-- Released objects outside the database. Objects that have an owner again are omitted: their task was resent while the
-- original task was being deleted.
SELECT kept.id::text FROM horsies_payloads AS kept
WHERE kept.released_at IS NOT NULL AND kept.store = %(store)s
  AND NOT EXISTS (SELECT FROM horsies_payload_owners AS owner WHERE owner.payload_id = kept.id)
ORDER BY kept.id LIMIT %(limit)s::integer

-- name: forget_released
-- Delete the rows of released objects after their store has deleted the objects.
DELETE FROM horsies_payloads AS kept
WHERE kept.id = ANY(%(ids)s::uuid[]) AND kept.released_at IS NOT NULL
  AND NOT EXISTS (SELECT FROM horsies_payload_owners AS owner WHERE owner.payload_id = kept.id)
RETURNING kept.id::text
