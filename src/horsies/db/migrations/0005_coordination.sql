-- Many workers: who they are, and which queues an operator has paused.

-- One current row per worker. A living worker holds the session advisory lock "lock_key" on its listening
-- connection: the server frees it the moment that connection is gone, so "lock free and not seen for a moment"
-- means dead, long before any threshold.
CREATE TABLE horsies_workers (
    worker_id    varchar(255)  PRIMARY KEY,
    lock_key     bigint        NOT NULL,
    hostname     varchar(255)  NOT NULL,
    pid          integer       NOT NULL,
    processes    integer       NOT NULL,
    queues       varchar[]     NOT NULL,
    started_at   timestamptz   NOT NULL DEFAULT clock_timestamp(),
    seen_at      timestamptz   NOT NULL DEFAULT clock_timestamp(),
    -- False while notifications do not reach the worker, which then lives on polling.
    hears        boolean       NOT NULL DEFAULT true,
    -- Set when the worker said goodbye, or when others found it dead and took over its tasks.
    stopped_at   timestamptz,
    was_lost     boolean       NOT NULL DEFAULT false
) WITH (fillfactor = 50);

CREATE INDEX horsies_workers_living ON horsies_workers (seen_at) WHERE stopped_at IS NULL;

-- A queue is here once an operator has paused or resumed it.
CREATE TABLE horsies_queues (
    queue_name  varchar(100)  PRIMARY KEY,
    paused_at   timestamptz,
    updated_at  timestamptz   NOT NULL DEFAULT clock_timestamp()
);
