-- The process behind a worker's row. A worker in the same process space (one boot of one kernel, one pid
-- namespace) proves it gone at once: no process has this pid and this start. NULL in rows of workers of the
-- previous release, and where the operating system does not provide it.
ALTER TABLE horsies_workers
    ADD COLUMN process_space    text,
    ADD COLUMN process_started  bigint;
