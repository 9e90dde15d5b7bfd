-- Rates and durations of attempts, counted by workers. A worker adds the counts of its last half minute to the
-- rows of their minutes, one row per queue and task; an idle worker writes nothing. Minutes become tens of
-- minutes after six hours. Updates touch no indexed column, and half of each page is left free for them, so
-- they are heap-only.
CREATE TABLE horsies_measures (
    -- Start of the slot, and its length: 1, or 10 once compacted.
    minute      timestamptz   NOT NULL,
    minutes     smallint      NOT NULL,
    queue_name  varchar(100)  NOT NULL,
    -- '' for all tasks beyond the first 200 names of a worker.
    task_name   varchar(255)  NOT NULL,
    -- Attempts by their end; "retried" ones have another attempt, the others are final.
    done        integer       NOT NULL,
    failed      integer       NOT NULL,
    retried     integer       NOT NULL,
    crashed     integer       NOT NULL,
    stopped     integer       NOT NULL,
    -- Sums, and counts by the bounds of monitor/measures.py: from due to started, from started to ended.
    waited_ms   bigint        NOT NULL,
    ran_ms      bigint        NOT NULL,
    waited      integer[]     NOT NULL,
    ran         integer[]     NOT NULL,
    PRIMARY KEY (minute, minutes, queue_name, task_name)
) WITH (fillfactor = 50);

-- The rows to compact, without those that have been.
CREATE INDEX horsies_measures_minutes ON horsies_measures (minute) WHERE minutes = 1;

-- The children of a worker at its last snapshot: [{"pid", "rss_mb", "done", "since", "task_id"}].
ALTER TABLE horsies_workers ADD COLUMN children jsonb;
