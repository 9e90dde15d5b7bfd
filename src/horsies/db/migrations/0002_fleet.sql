-- The workers' own records: heartbeats, snapshots, and where each schedule stands.

CREATE TABLE horsies_heartbeats (
    id         bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id    uuid          NOT NULL,
    sender_id  varchar(255)  NOT NULL,
    role       varchar(20)   NOT NULL CHECK (role IN ('claimer', 'runner')),
    sent_at    timestamptz   NOT NULL DEFAULT now(),
    hostname   varchar(255),
    pid        integer
);

CREATE INDEX horsies_heartbeats_latest ON horsies_heartbeats (task_id, role, sent_at DESC);

CREATE TABLE horsies_worker_states (
    id                     bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker_id              varchar(255)     NOT NULL,
    snapshot_at            timestamptz      NOT NULL DEFAULT now(),
    hostname               varchar(255)     NOT NULL,
    pid                    integer          NOT NULL,
    processes              integer          NOT NULL,
    queues                 varchar[]        NOT NULL,
    tasks_running          integer          NOT NULL,
    tasks_claimed          integer          NOT NULL,
    memory_usage_mb        double precision,
    cpu_percent            double precision,
    memory_percent         double precision,
    children_memory_mb     double precision,
    max_claim_batch        integer          NOT NULL,
    max_claim_per_worker   integer          NOT NULL,
    cluster_wide_cap       integer,
    queue_priorities       jsonb,
    queue_max_concurrency  jsonb,
    recovery_config        jsonb,
    hears                  boolean          NOT NULL DEFAULT true,
    worker_started_at      timestamptz      NOT NULL
);

CREATE INDEX horsies_worker_states_latest ON horsies_worker_states (worker_id, snapshot_at DESC);
CREATE INDEX horsies_worker_states_age ON horsies_worker_states USING brin (snapshot_at);

CREATE TABLE horsies_schedule_state (
    schedule_name  varchar(255)  PRIMARY KEY,
    last_run_at    timestamptz,
    next_run_at    timestamptz,
    last_task_id   uuid,
    run_count      integer       NOT NULL DEFAULT 0,
    config_hash    varchar(64),
    updated_at     timestamptz   NOT NULL DEFAULT now()
);
