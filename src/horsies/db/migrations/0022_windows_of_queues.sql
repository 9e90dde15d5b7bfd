-- No table changes: horsies_leading_run, which only the claim calls, has other parameters, so that tasks of several
-- queues may wait in children.
DROP FUNCTION IF EXISTS horsies_leading_run(
    text, integer, timestamptz, uuid, timestamptz, integer, integer, text[], boolean, boolean, text[], uuid[],
    text[]);
