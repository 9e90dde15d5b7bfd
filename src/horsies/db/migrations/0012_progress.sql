-- How far running tasks have come, as their code reports it. A table of its own: a report must not make a new
-- version of the task's row, which is wide and has indexes.
CREATE TABLE horsies_task_progress (
    task_id      uuid              PRIMARY KEY REFERENCES horsies_tasks (id) ON DELETE CASCADE,
    attempt      integer           NOT NULL,
    done         double precision  NOT NULL,
    total        double precision,
    note         text,
    reported_at  timestamptz       NOT NULL
) WITH (fillfactor = 50);
