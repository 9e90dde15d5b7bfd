-- Tasks and runs whose next change the database refuses. A worker leaves such a task or run alone, tries again
-- after a growing delay, and writes it down here, once.
--
-- "status" and "generation" are the state in which it is blocked. A row whose task or run has moved on counts
-- no more, whichever process moved it, so nothing has to be deleted at once. There is no foreign key: a row
-- must not keep a task from being changed or deleted.
CREATE TABLE horsies_blocked (
    id           uuid         NOT NULL,
    kind         varchar(8)   NOT NULL CHECK (kind IN ('task', 'run')),
    -- The run that the task belongs to, or the run itself.
    workflow_id  uuid,
    status       varchar(16)  NOT NULL,
    generation   integer      NOT NULL DEFAULT 0,
    action       varchar(16)  NOT NULL,
    -- SQLSTATE and primary message.
    error        text         NOT NULL,
    worker_id    varchar(255),
    since        timestamptz  NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (id, kind)
);
