-- Changes made by people: pauses, cancels, retries, bulk orders. A row is written in the transaction of its change,
-- and for a refused change as well. It never holds arguments or results of tasks.
CREATE TABLE horsies_actions (
    id       bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz   NOT NULL DEFAULT clock_timestamp(),
    actor    varchar(255)  NOT NULL,
    source   varchar(16)   NOT NULL,
    verb     varchar(32)   NOT NULL,
    subject  varchar(255)  NOT NULL,
    outcome  varchar(16)   NOT NULL,
    detail   text,
    -- A bulk order: its bounds and filters, and how far it has come. One row per order, updated by its batches.
    order_id        uuid  UNIQUE,
    order_plan      text,
    order_progress  text
);
CREATE INDEX horsies_actions_subject ON horsies_actions (subject, id);
CREATE INDEX horsies_actions_actor ON horsies_actions (actor, id);
-- The tasks that were sent again from a task.
CREATE INDEX horsies_tasks_retried ON horsies_tasks (retried_from_task_id) WHERE retried_from_task_id IS NOT NULL;
