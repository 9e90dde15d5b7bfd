-- Several releases of an application on one database: a worker registers the tasks it can run, and the
-- scheduler notes which schedules no release serves any more.

-- {"tasks": {name: fingerprint}, "workflows": {definition key: fingerprint}}; the fingerprint is that of the
-- parameters. NULL for a worker of a release of horsies that did not register its tasks.
ALTER TABLE horsies_workers ADD COLUMN known_tasks jsonb;

-- When a scheduler found that the schedule is switched off: it does not serve the schedule, and a slot is
-- overdue. Any later change of the row ("updated_at") makes it void.
ALTER TABLE horsies_schedule_state ADD COLUMN disabled_at timestamptz;

-- The claim has two more parameters. They have defaults, so that the previous release calls it as before;
-- beside the function without them, its call would be ambiguous.
DROP FUNCTION IF EXISTS horsies_claim_v1(
    text, text, integer[], integer, integer, text[], integer[], integer[], integer, boolean, integer[],
    integer[], timestamptz[], uuid[], boolean);
