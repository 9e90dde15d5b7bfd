-- Calls that do not fit the parameters of a release. A worker that cannot call a task returns it to the queue
-- and writes it down here, once for all workers with the same parameters: their claims leave the task out
-- until then, and it fails only when no other worker has taken it for the grace period.
--
-- A row counts while its task has not ended; retention deletes the others. There is no foreign key: a row must
-- not keep a task from being changed or deleted.
CREATE TABLE horsies_refusals (
    task_id      uuid         NOT NULL,
    -- Of the parameters in horsies_workers.known_tasks; empty for a sub-workflow that the worker does not have.
    fingerprint  varchar(64)  NOT NULL,
    worker_id    varchar(255),
    message      text         NOT NULL,
    since        timestamptz  NOT NULL DEFAULT clock_timestamp(),
    until        timestamptz  NOT NULL,
    PRIMARY KEY (task_id, fingerprint)
);

-- The claim has another parameter, with a default, so that workers of the previous release call it as before;
-- beside the function without it, their call would be ambiguous. Its two helpers are called by it alone.
DROP FUNCTION IF EXISTS horsies_claim_v3(
    text, text, integer[], integer, integer, text[], integer[], integer[], integer, boolean, integer[],
    integer[], timestamptz[], uuid[], boolean, text[], uuid[], integer, text[], boolean);
DROP FUNCTION IF EXISTS horsies_due_of_kind(
    boolean, text, integer, timestamptz, timestamptz, uuid, integer, text[], uuid[]);
DROP FUNCTION IF EXISTS horsies_leading_run(
    text, integer, timestamptz, uuid, timestamptz, integer, integer, text[], boolean);
