-- Every table, domain, type and index: tasks, attempts, workers, queues, workflows, schedules, measures, and changes
-- made by people.
--
-- Numbered files are applied once, in order, and never change after a release. Functions and triggers live in
-- ../functions and are replaced as a whole whenever they change.

-- Tasks -------------------------------------------------------------------------------------------
-- Status columns use domains. PostgreSQL parses a table's CHECK constraints again for every statement that writes to
-- the table (18 us each), but a domain's only once per session.
CREATE DOMAIN horsies_task_status AS varchar(16)
    CHECK (VALUE IN ('PENDING', 'CLAIMED', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'));
CREATE DOMAIN horsies_attempt_outcome AS varchar(32)
    CHECK (VALUE IN ('COMPLETED', 'FAILED', 'WORKER_FAILURE'));

CREATE TABLE horsies_tasks (
    id                    uuid          PRIMARY KEY,
    task_name             varchar(255)  NOT NULL,
    queue_name            varchar(100)  NOT NULL,
    priority              integer       NOT NULL DEFAULT 100,
    args                  text,
    kwargs                text,
    status                horsies_task_status NOT NULL DEFAULT 'PENDING',
    sent_at               timestamptz,
    enqueued_at           timestamptz   NOT NULL DEFAULT now(),
    claimed_at            timestamptz,
    started_at            timestamptz,
    completed_at          timestamptz,
    failed_at             timestamptz,
    result                text,
    failed_reason         text,
    error_code            text,
    -- The code of the final failure; see horsies_task_attempts. NULL for tasks that did not fail.
    fingerprint           varchar(16),
    claimed               boolean       NOT NULL DEFAULT false,
    claimed_by_worker_id  varchar(255),
    claim_expires_at      timestamptz,
    good_until            timestamptz,
    -- How long the row is kept after the task ends; NULL if terminal_record_retention_hours applies.
    retention             interval,
    retry_count           integer       NOT NULL DEFAULT 0,
    max_retries           integer       NOT NULL DEFAULT 0,
    next_retry_at         timestamptz,
    task_options          text,
    worker_pid            integer,
    worker_hostname       varchar(255),
    worker_process_name   varchar(255),
    enqueue_sha           varchar(64)   NOT NULL,
    created_at            timestamptz   NOT NULL DEFAULT now(),
    updated_at            timestamptz   NOT NULL DEFAULT now(),
    -- The fencing token: every claim increments the generation, and every later change of the status requires the
    -- current generation.
    generation            integer       NOT NULL DEFAULT 0,
    -- The claim of plain tasks does not find a held task, although its status is PENDING. The tasks of a paused
    -- workflow are held. A task with a key is always held, because the claim by keys finds it by its lane.
    held                  boolean       NOT NULL DEFAULT false,
    -- The key of the task and its lane, which is the number of that key in this queue (horsies_lane_v1). Both are NULL
    -- for a task without a key; a task whose run is paused keeps its key but has no lane.
    lane_key              text,
    lane                  bigint,
    -- Whether the task may wait in a child behind other tasks, because it is retried after a crash or was declared with
    -- burst=True.
    burst                 boolean       NOT NULL DEFAULT false,
    timeout_ms            integer,
    cancel_requested_at   timestamptz,
    idempotency_key       text,
    idempotency_sha       varchar(64),
    -- An idempotency key that is unique only for a limited time: while the task waits for its first claim ('waiting'),
    -- or until the task has ended ('open').
    unique_key            text,
    unique_while          text,
    retried_from_task_id  uuid,
    workflow_id           uuid,
    workflow_node_index   integer,
    -- The position of a map item in the list of its map node.
    workflow_item_index   integer,
    -- References to other nodes' results that this node takes: {"args": {name: index}, "context": {node: index}}.
    workflow_inputs       text,
    -- The schedule that sent the task, and the slot (NULL for a manual run). These rows are also the list of the
    -- schedule's past runs, and are deleted with the tasks.
    schedule_name         varchar(255),
    scheduled_for         timestamptz,
    -- The run of a durable function that started this task and may wait for its end; NULL for all other tasks.
    wakes_task_id         uuid,
    -- When this ended task was redacted: its arguments, its result and all other values that may identify a person were
    -- removed.
    redacted_at           timestamptz
) WITH (
    fillfactor = 80,
    -- Every task leaves two dead row versions. Vacuum runs early and without pauses, because otherwise the claim
    -- index fills with dead entries.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.05
);

-- The table has few indexes: the primary key, and partial indexes that match the hot predicates exactly. A status
-- update writes only the indexes whose predicate the new row version satisfies: primary key and claim index at insert,
-- primary key and in-flight index at start, and only the primary key when the task ends.
CREATE INDEX horsies_tasks_claim ON horsies_tasks (queue_name, priority, enqueued_at, id)
    WHERE status = 'PENDING' AND NOT held;
-- Tasks of "async def" functions: this index lets a claim for async children find them behind any number of other
-- tasks. The text in the predicate is the beginning of the options that producers store with such a task. Other tasks
-- have no entry here; for them the predicate costs one comparison.
CREATE INDEX horsies_tasks_claim_async ON horsies_tasks (queue_name, priority, enqueued_at, id)
    WHERE status = 'PENDING' AND NOT held AND task_options LIKE '{"async":true%';
-- Due tasks with a key, by lane: one index probe finds the next lane, regardless of the number of tasks in the previous
-- lane. For a plain task, the check of the predicate ends at its first condition. Delayed tasks are in the second index
-- until a worker moves them when they become due (horsies_look_at_keys_v1), so no claim has to skip them. No second
-- index may offer the same order to these queries: the planner would use it, and read all tasks of one lane to find
-- those of another lane.
CREATE INDEX horsies_tasks_lane ON horsies_tasks (queue_name, lane, priority, enqueued_at, id)
    WHERE lane IS NOT NULL AND status = 'PENDING' AND enqueued_at <= updated_at;
-- Due tasks with a key of "async def" functions, so that a claim for async children finds only lanes with such tasks,
-- and skips the other tasks in front of them. A query that repeats this index's predicate reads fewer entries here than
-- in the index above, which contains these tasks too.
CREATE INDEX horsies_tasks_lane_async ON horsies_tasks (queue_name, lane, priority, enqueued_at, id)
    WHERE lane IS NOT NULL AND status = 'PENDING' AND enqueued_at <= updated_at
      AND task_options LIKE '{"async":true%';
CREATE INDEX horsies_tasks_lane_later ON horsies_tasks (queue_name, greatest(enqueued_at, next_retry_at))
    WHERE lane IS NOT NULL AND status = 'PENDING' AND greatest(enqueued_at, next_retry_at) > updated_at;
CREATE INDEX horsies_tasks_lane_in_flight ON horsies_tasks (queue_name, lane)
    WHERE lane IS NOT NULL AND status IN ('CLAIMED', 'RUNNING');
CREATE INDEX horsies_tasks_in_flight ON horsies_tasks (claimed_by_worker_id)
    WHERE status IN ('CLAIMED', 'RUNNING');
CREATE INDEX horsies_tasks_lease ON horsies_tasks (claim_expires_at) WHERE status = 'CLAIMED';
CREATE INDEX horsies_tasks_deadline ON horsies_tasks (good_until)
    WHERE status = 'PENDING' AND good_until IS NOT NULL;
CREATE INDEX horsies_tasks_error_code ON horsies_tasks (error_code) WHERE error_code IS NOT NULL;
CREATE INDEX horsies_tasks_fingerprint ON horsies_tasks (fingerprint, id) WHERE fingerprint IS NOT NULL;
CREATE INDEX horsies_tasks_workflow ON horsies_tasks (workflow_id, workflow_node_index, workflow_item_index)
    WHERE workflow_id IS NOT NULL;
-- Finds a map's next parked item without reading items that have ended.
CREATE INDEX horsies_tasks_items ON horsies_tasks (workflow_id, workflow_node_index, workflow_item_index)
    WHERE status = 'PENDING' AND workflow_item_index IS NOT NULL;
CREATE UNIQUE INDEX horsies_tasks_idempotency ON horsies_tasks (task_name, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
-- A row leaves the index when its first claim increments the generation, or when the task ends. A retry that returns
-- the task to PENDING has a generation above 0, so it cannot collide with a later task that has the same key.
CREATE UNIQUE INDEX horsies_tasks_unique_key ON horsies_tasks (task_name, unique_key)
    WHERE unique_key IS NOT NULL
      AND CASE WHEN unique_while = text 'open' THEN status::text IN (text 'PENDING', text 'CLAIMED', text 'RUNNING')
          ELSE status::text = text 'PENDING' AND generation = 0 AND retry_count = 0 END;
-- Finds the tasks that were sent again as copies of another task.
CREATE INDEX horsies_tasks_retried ON horsies_tasks (retried_from_task_id) WHERE retried_from_task_id IS NOT NULL;
CREATE INDEX horsies_tasks_schedule_runs ON horsies_tasks (schedule_name, sent_at)
    WHERE schedule_name IS NOT NULL;
CREATE INDEX horsies_tasks_schedule_open ON horsies_tasks (schedule_name)
    WHERE schedule_name IS NOT NULL AND status IN ('PENDING', 'CLAIMED', 'RUNNING');
-- Retention finds old tasks by the time in their ids. Ids that are not UUIDv7 contain no time; manual inserts and other
-- programs may use such ids, so this index finds their rows. Tasks sent by this library never enter this index, so when
-- they end, only the primary key is written.
CREATE INDEX horsies_tasks_untimed_ended ON horsies_tasks (coalesce(completed_at, failed_at, updated_at))
    WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') AND workflow_id IS NULL
      AND substr(id::text, 15, 1) <> '7';
-- Retention uses this index to find tasks with their own retention, oldest first. Other tasks have no entry here. The
-- expression has no time zone, because an index requires immutable expressions.
CREATE INDEX horsies_tasks_retention ON horsies_tasks
    ((coalesce(completed_at, failed_at, updated_at) AT TIME ZONE 'UTC' + retention))
    WHERE retention IS NOT NULL AND status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      AND workflow_id IS NULL;

-- The progress that the code of running tasks reports. It has its own table, because a report must not create a new
-- version of the task's row, which is wide and has indexes.
CREATE TABLE horsies_task_progress (
    task_id      uuid              PRIMARY KEY REFERENCES horsies_tasks (id) ON DELETE CASCADE,
    attempt      integer           NOT NULL,
    done         double precision  NOT NULL,
    total        double precision,
    note         text,
    reported_at  timestamptz       NOT NULL
) WITH (fillfactor = 50);

-- Attempts ----------------------------------------------------------------------------------------
-- The trigger horsies_task_deleted deletes the attempts of a deleted task. There is no foreign key: it would be checked
-- for every attempt, although the statement that inserts an attempt has just updated its task.
CREATE TABLE horsies_task_attempts (
    id                   bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id              uuid          NOT NULL,
    attempt              integer       NOT NULL,
    outcome              horsies_attempt_outcome NOT NULL,
    will_retry           boolean       NOT NULL DEFAULT false,
    started_at           timestamptz,
    finished_at          timestamptz   NOT NULL,
    error_code           text,
    error_message        text,
    failed_reason        text,
    -- Which rule decided whether a failed attempt was retried, as text for operators: a code or exception class in the
    -- policy, RetryLater, or the reason why no rule applied. NULL for successes, and for tasks without a retry policy.
    retry_reason         text,
    -- Failures with the same fingerprint have the same task, error code, exception class and place in the code: file
    -- and function of the innermost stack frame that belongs to the application. NULL for successes and cancellations.
    fingerprint          varchar(16),
    exception_type       varchar(255),
    raised_in            varchar(255),
    worker_id            varchar(255),
    worker_hostname      varchar(255),
    worker_pid           integer,
    worker_process_name  varchar(255),
    -- The attempt's span as a W3C traceparent header; NULL without tracing. The span of a retry links to the span of
    -- the previous attempt. The span of the send is stored in the task's options.
    traceparent          varchar(55),
    created_at           timestamptz   NOT NULL DEFAULT now(),
    UNIQUE (task_id, attempt)
);

CREATE INDEX horsies_task_attempts_error_code ON horsies_task_attempts (error_code)
    WHERE error_code IS NOT NULL;
-- Finds the first and the newest failure with a fingerprint.
CREATE INDEX horsies_task_attempts_fingerprint ON horsies_task_attempts (fingerprint, id)
    WHERE fingerprint IS NOT NULL;
-- Attempts are stored in the order in which they finish, so a block-range index finds the newest attempts, and those
-- older than a given time, at a thousandth of a B-tree's write cost.
CREATE INDEX horsies_task_attempts_finished_at ON horsies_task_attempts USING brin (finished_at);

-- The lines that attempts have logged, if the application keeps them (log_capture). There is one row per claim, because
-- a run of a durable function may be claimed several times in one attempt. A row is written in the turn that records
-- the outcome. It is deleted with the task, or earlier by the retention of logs.
CREATE TABLE horsies_task_logs (
    id          bigint       GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id     uuid         NOT NULL,
    generation  integer      NOT NULL,
    attempt     integer      NOT NULL,
    -- One log record per line; the lines of a traceback follow their record, indented.
    body        text         NOT NULL,
    -- How many lines were omitted, and after which line of the body.
    dropped     integer      NOT NULL,
    cut_after   integer      NOT NULL,
    created_at  timestamptz  NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (task_id, generation)
);

CREATE INDEX horsies_task_logs_created_at ON horsies_task_logs USING brin (created_at);

-- Large payload ---------------------------------------------------------------------------------------
-- In an application with a payload store, arguments, results, steps and signals above its size limit are stored as
-- objects, and the rows that would contain them contain a reference with the object's id. An object is written before
-- the row that refers to it. Applications without a store have no rows here.
CREATE TABLE horsies_payloads (
    id           uuid         PRIMARY KEY,
    -- Where the object is stored: 'table' for this table, or the name of a store outside the database.
    store        varchar(31)  NOT NULL,
    bytes        bigint       NOT NULL,
    -- NULL if the object is stored outside the database.
    body         bytea,
    created_at   timestamptz  NOT NULL DEFAULT clock_timestamp(),
    -- When an object outside the database lost its last owner: it is then deleted first from its store and after that
    -- from this table.
    released_at  timestamptz
);
CREATE INDEX horsies_payloads_released ON horsies_payloads (store, id) WHERE released_at IS NOT NULL;

-- The tasks and runs whose rows refer to an object. A task that was sent again shares the objects of the original task.
-- The foreign key locks an object that gets another owner, so that the object is not deleted at the same time.
CREATE TABLE horsies_payload_owners (
    owner_id    uuid  NOT NULL,
    payload_id  uuid  NOT NULL REFERENCES horsies_payloads (id),
    PRIMARY KEY (owner_id, payload_id)
);
CREATE INDEX horsies_payload_owners_payload ON horsies_payload_owners (payload_id);

-- Durable functions -------------------------------------------------------------------------------
-- The recorded steps of durable functions. A row is written once, in the transaction of its step, and never changes.
-- There is no foreign key, because it would be checked for every step; instead, a trigger deletes the steps, signals
-- and waits of a deleted task.
CREATE TABLE horsies_steps (
    task_id     uuid         NOT NULL,
    -- The name of the step; if the name occurs again in the same run, the later names end in #2, #3 and so on.
    name        text COLLATE "C" NOT NULL,
    -- The order in which the run recorded its steps, from 1.
    position    integer      NOT NULL,
    kind        varchar(16)  NOT NULL,
    -- The value as JSON; NULL for a step that failed.
    result      text,
    -- The failure as {"code": text, "message": text, "data": JSON}; NULL for a step that succeeded.
    error       text,
    -- When a sleep or a wait ends.
    due_at      timestamptz,
    attempt     integer      NOT NULL,
    started_at  timestamptz  NOT NULL,
    ended_at    timestamptz  NOT NULL,
    PRIMARY KEY (task_id, name)
) WITH (autovacuum_vacuum_cost_delay = 0);

-- Values sent to runs of durable functions; each is kept until a step takes it.
CREATE TABLE horsies_task_signals (
    id          bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id     uuid          NOT NULL,
    name        varchar(255)  NOT NULL,
    value       text          NOT NULL,
    created_at  timestamptz   NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX horsies_task_signals_waiting ON horsies_task_signals (task_id, name, id);

-- What parked runs of durable functions wait for. A row is valid while its task is PENDING with this generation, so the
-- process that starts or ends the run may leave the row; the next call of the run deletes it.
CREATE TABLE horsies_parked (
    task_id     uuid         PRIMARY KEY,
    generation  integer      NOT NULL,
    since       timestamptz  NOT NULL,
    -- When a sleep, or a wait with a time limit, ends.
    until       timestamptz,
    signals     text[]       NOT NULL,
    children    uuid[]       NOT NULL,
    -- Why the run is held until an operator resumes it; NULL for an ordinary wait.
    problem     text
);

CREATE INDEX horsies_parked_held ON horsies_parked (since) WHERE problem IS NOT NULL;

-- Deadlines of runs of durable functions, counted from their first start. If the run ends in time, its row is deleted
-- after the deadline has passed.
CREATE TABLE horsies_deadlines (
    task_id     uuid         PRIMARY KEY,
    ends_at     timestamptz  NOT NULL,
    -- When a worker cancelled the run because of its deadline.
    reached_at  timestamptz
);

CREATE INDEX horsies_deadlines_next ON horsies_deadlines (ends_at) WHERE reached_at IS NULL;

-- Refused changes and calls -------------------------------------------------------------------------
-- Tasks and runs whose next change the database refuses. A worker skips such a task or run, tries again after a
-- growing delay, and records it here once.
--
-- "status" and "generation" are the state in which the task or run is blocked. The row is valid only while its task or
-- run has this state, so any process may change the state without deleting the row. There is no foreign key, because a
-- row must not keep a task from being changed or deleted.
CREATE TABLE horsies_blocked (
    id           uuid         NOT NULL,
    kind         varchar(8)   NOT NULL CHECK (kind IN ('task', 'run')),
    -- The run that the task belongs to, or the run itself.
    workflow_id  uuid,
    status       varchar(16)  NOT NULL,
    generation   integer      NOT NULL DEFAULT 0,
    action       varchar(16)  NOT NULL,
    -- The SQLSTATE and the primary message of the error.
    error        text         NOT NULL,
    worker_id    varchar(255),
    since        timestamptz  NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (id, kind)
);

-- Calls that do not fit a release's parameters. A worker that cannot call a task returns it to the queue and records
-- the call here, once for all workers with the same parameters. From then on, these workers' claims exclude the task.
-- The task fails only if no other worker has taken it for the grace period. A row is valid while its task is open;
-- retention deletes the rows of ended tasks. There is no foreign key, because a row must not keep a task from being
-- changed or deleted.
CREATE TABLE horsies_refusals (
    task_id      uuid         NOT NULL,
    -- The fingerprint of the parameters, as in horsies_workers.known_tasks; empty for a sub-workflow that the worker
    -- does not have.
    fingerprint  varchar(64)  NOT NULL,
    worker_id    varchar(255),
    message      text         NOT NULL,
    since        timestamptz  NOT NULL DEFAULT clock_timestamp(),
    until        timestamptz  NOT NULL,
    PRIMARY KEY (task_id, fingerprint)
);

-- Defaults of tasks ---------------------------------------------------------------------------------
-- The settings from task decorators, for sends from SQL and for signals from programs without the application. A worker
-- writes its application's rows when it starts, so the worker that started last decides.
CREATE TABLE horsies_task_defaults (
    task_name      varchar(255)  PRIMARY KEY,
    queue_name     varchar(100)  NOT NULL,
    -- The application's queues: {name: {"priority": 1 to 100, "retention_seconds": number or null}}.
    queues         jsonb         NOT NULL,
    -- In the same form as in horsies_tasks.task_options.
    retry_policy   jsonb,
    max_retries    integer       NOT NULL,
    timeout_ms     integer,
    is_async       boolean       NOT NULL,
    burst          boolean       NOT NULL,
    -- The application's payload.reject_bytes; the largest bigint if there is no limit.
    reject_bytes   bigint        NOT NULL,
    updated_at     timestamptz   NOT NULL DEFAULT clock_timestamp(),
    -- The name of the parameter whose value is the key, and whether Python code computes the key; if it does, a send
    -- from SQL has to give the key.
    key_parameter  text,
    computes_key   boolean       NOT NULL DEFAULT false,
    -- The single key that all calls of a task with a rate share.
    fixed_key      text,
    -- Whether the task is a durable function, and the names of the signals that it declares; NULL if it accepts any
    -- signal.
    is_durable     boolean       NOT NULL DEFAULT false,
    signals        text[],
    -- Whether the application encrypts payload.
    encrypts       boolean       NOT NULL DEFAULT false
);

-- Webhooks ----------------------------------------------------------------------------------------
-- Which events each webhook subscribes to, and the options of the tasks that deliver them. A worker writes its
-- application's rows when it starts. Addresses and secrets stay in the configuration of the workers.
CREATE TABLE horsies_webhooks (
    name          varchar(40)   PRIMARY KEY,
    -- The events to which the webhook subscribes: 'task.failed', 'task.cancelled', 'task.expired', 'run.ended',
    -- 'finding.opened', 'finding.closed'.
    events        text[]        NOT NULL,
    -- The names of the tasks whose events are delivered; NULL for all tasks.
    task_names    text[],
    queue_name    varchar(100)  NOT NULL,
    priority      integer       NOT NULL,
    max_retries   integer       NOT NULL,
    task_options  text          NOT NULL,
    timeout_ms    integer,
    retention     interval,
    updated_at    timestamptz   NOT NULL DEFAULT clock_timestamp()
);

-- The open findings that webhooks were notified about; the table is empty unless a webhook subscribes to findings.
CREATE TABLE horsies_findings (
    code       varchar(64)  NOT NULL,
    subject    text         NOT NULL,
    check_id   varchar(64)  NOT NULL,
    level      varchar(16)  NOT NULL,
    -- The finding as it was when it was opened.
    sentence   text         NOT NULL,
    remedy     text,
    opened_at  timestamptz  NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (code, subject)
);

-- Workers -----------------------------------------------------------------------------------------
-- One current row per worker. A live worker holds the session advisory lock "lock_key" on its listening connection. The
-- server releases the lock as soon as the connection ends. So a free lock, together with a few seconds without a
-- heartbeat, proves that a worker is dead, long before any other timeout expires.
CREATE TABLE horsies_workers (
    worker_id        varchar(255)  PRIMARY KEY,
    -- The name that an operator gave the worker (--name), or NULL. Names need not be unique.
    name             text,
    lock_key         bigint        NOT NULL,
    hostname         varchar(255)  NOT NULL,
    pid              integer       NOT NULL,
    -- Identifies this worker's process. Another worker in the same process space (the same boot of the kernel and the
    -- same pid namespace) can prove immediately that the process has ended, because no process has this pid and start
    -- time. NULL if the operating system does not provide these values.
    process_space    text,
    process_started  bigint,
    -- The release of horsies that the worker runs.
    version          varchar(32),
    -- The release of the application (AppConfig.release), or NULL.
    release          varchar(255),
    processes        integer       NOT NULL,
    queues           varchar[]     NOT NULL,
    -- What the worker can run, with fingerprints of the parameters: {"tasks": {name: fingerprint}, "workflows":
    -- {definition key: fingerprint}}. NULL for a worker that did not register its tasks.
    known_tasks      jsonb,
    started_at       timestamptz   NOT NULL DEFAULT clock_timestamp(),
    seen_at          timestamptz   NOT NULL DEFAULT clock_timestamp(),
    -- False while the worker receives no notifications and relies on polling.
    hears            boolean       NOT NULL DEFAULT true,
    -- Whether the worker can immediately start a task from any of its queues; sends wake such workers first. This is
    -- only a hint: it is set when the worker becomes idle, and cleared by a heartbeat or by a wake-up that the worker
    -- cannot serve.
    waits            boolean       NOT NULL DEFAULT false,
    -- The children at the time of the last snapshot: [{"pid", "rss_mb", "done", "since", "task_id"}].
    children         jsonb,
    -- When the worker stopped. Set by a graceful shutdown, or by the worker that found this worker dead and recovered
    -- its tasks.
    stopped_at       timestamptz,
    was_lost         boolean       NOT NULL DEFAULT false
) WITH (fillfactor = 50);

-- These indexes do not contain "seen_at", so that a heartbeat changes no index.
CREATE INDEX horsies_workers_ring ON horsies_workers (worker_id) WHERE stopped_at IS NULL;
CREATE INDEX horsies_workers_waiting ON horsies_workers (lock_key) WHERE stopped_at IS NULL AND waits;
CREATE INDEX horsies_workers_lost ON horsies_workers (stopped_at) WHERE was_lost;
CREATE INDEX horsies_workers_space ON horsies_workers (process_space, worker_id) WHERE stopped_at IS NULL;

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

-- Snapshots of each worker at regular times.
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

-- Queues ------------------------------------------------------------------------------------------
-- A queue gets its row when an operator first pauses or resumes it.
CREATE TABLE horsies_queues (
    queue_name  varchar(100)  PRIMARY KEY,
    paused_at   timestamptz,
    updated_at  timestamptz   NOT NULL DEFAULT clock_timestamp()
);

-- The limits of keys. Lane 0 contains the limits for all keys of a queue, as configured by the worker that started
-- last. Other rows contain the limits that an operator has set for one key; NULL means that the configured limit
-- applies.
CREATE TABLE horsies_lanes (
    queue_name       varchar(100)      NOT NULL,
    lane             bigint            NOT NULL,
    lane_key         text,
    max_concurrency  integer,
    -- The rate: the seconds per start, and how many tasks may start immediately one after another.
    rate_seconds     double precision,
    rate_burst       integer,
    weight           double precision,
    is_fifo          boolean,
    -- Whether a failed task of a fifo lane pauses the lane.
    halts            boolean,
    paused_at        timestamptz,
    pause_reason     text,
    updated_at       timestamptz       NOT NULL DEFAULT clock_timestamp(),
    -- The rate in the decorator of the task whose calls all share this key. A rate set by an operator takes precedence.
    task_rate_seconds  double precision,
    task_rate_burst    integer,
    PRIMARY KEY (queue_name, lane)
);
-- The paused keys, which the overview counts, among the keys with limits, of which there may be very many.
CREATE INDEX horsies_lanes_paused ON horsies_lanes (queue_name, lane) WHERE paused_at IS NOT NULL;

-- Lanes in order, and for each lane a task: a claim searches the lane behind this task.
CREATE TYPE horsies_lane_marks AS (
    lanes bigint[], priorities integer[], moments timestamptz[], ids uuid[]);

-- The meters of queues (lane 0) and of keys with a rate. A row exists once a worker has claimed under that rate.
CREATE TABLE horsies_meters (
    queue_name  varchar(100)      NOT NULL,
    lane        bigint            NOT NULL DEFAULT 0,
    -- The time at which all starts so far are paid for; see functions/18_rates.sql.
    next_at     timestamptz       NOT NULL,
    -- The rate that the most recent claim applied: the seconds per start, and how many tasks may start immediately one
    -- after another.
    seconds     double precision  NOT NULL,
    burst       integer           NOT NULL,
    PRIMARY KEY (queue_name, lane)
) WITH (fillfactor = 50);

-- Workflows ---------------------------------------------------------------------------------------
--
-- When a node starts, it becomes an ordinary task. The node's row in horsies_workflow_tasks describes the task to
-- insert, counts the dependencies that are still open, and later refers to the task with the result. Results are never
-- copied into the nodes that use them.

CREATE DOMAIN horsies_run_status AS varchar(16)
    CHECK (VALUE IN ('PENDING', 'RUNNING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'));
CREATE DOMAIN horsies_node_status AS varchar(16)
    CHECK (VALUE IN ('PENDING', 'READY', 'ENQUEUED', 'RUNNING', 'COMPLETED', 'FAILED', 'SKIPPED'));
CREATE DOMAIN horsies_node_kind AS varchar(8) CHECK (VALUE IN ('task', 'workflow', 'map', 'sleep', 'signal'));
CREATE DOMAIN horsies_join_type AS varchar(8) CHECK (VALUE IN ('all', 'any', 'quorum'));
CREATE DOMAIN horsies_on_error AS varchar(8) CHECK (VALUE IN ('fail', 'pause'));

CREATE TABLE horsies_workflows (
    id                  uuid          PRIMARY KEY,
    name                varchar(255)  NOT NULL,
    status              horsies_run_status NOT NULL DEFAULT 'RUNNING',
    on_error            horsies_on_error NOT NULL,
    output_task_index   integer,
    success_policy      jsonb,
    -- The JSON of a TaskError: the reason for a failure, pause, cancellation or expiry.
    error               text,
    definition_key      varchar(255)  NOT NULL,
    -- A digest of the plan: a second start with the same id must have the same plan.
    fingerprint         varchar(64)   NOT NULL,
    -- The caller's key for the run, unique among open runs.
    workflow_key        text,
    parent_workflow_id  uuid          REFERENCES horsies_workflows (id) ON DELETE CASCADE,
    parent_task_index   integer,
    depth               integer       NOT NULL DEFAULT 0,
    root_workflow_id    uuid          NOT NULL,
    total_nodes         integer       NOT NULL,
    open_nodes          integer       NOT NULL,
    failed_nodes        integer       NOT NULL DEFAULT 0,
    -- The case of the success policy that the run has met.
    matched_case        integer,
    -- The schedule that started the run, and its slot (NULL for a manual run).
    schedule_name       varchar(255),
    scheduled_for       timestamptz,
    -- The run of a durable function that started this run and may wait for its end.
    wakes_task_id       uuid,
    sent_at             timestamptz,
    created_at          timestamptz   NOT NULL DEFAULT clock_timestamp(),
    started_at          timestamptz   NOT NULL DEFAULT clock_timestamp(),
    paused_at           timestamptz,
    completed_at        timestamptz,
    updated_at          timestamptz   NOT NULL DEFAULT clock_timestamp(),
    -- When the values that may identify a person were removed from the whole tree; see horsies_tasks.redacted_at.
    redacted_at         timestamptz
) WITH (fillfactor = 70);

CREATE UNIQUE INDEX horsies_workflows_key ON horsies_workflows (workflow_key)
    WHERE workflow_key IS NOT NULL AND status IN ('PENDING', 'RUNNING', 'PAUSED');
CREATE INDEX horsies_workflows_open ON horsies_workflows (status, created_at)
    WHERE status IN ('PENDING', 'RUNNING', 'PAUSED');
CREATE INDEX horsies_workflows_parent ON horsies_workflows (parent_workflow_id)
    WHERE parent_workflow_id IS NOT NULL;
CREATE INDEX horsies_workflows_root ON horsies_workflows (root_workflow_id)
    WHERE parent_workflow_id IS NOT NULL;
-- For lists of runs, newest first. A caller may choose any id for a run, so ids are not in chronological order.
CREATE INDEX horsies_workflows_created ON horsies_workflows (created_at, id);
CREATE INDEX horsies_workflows_ended ON horsies_workflows (completed_at) WHERE completed_at IS NOT NULL;
CREATE INDEX horsies_workflows_schedule_runs ON horsies_workflows (schedule_name, sent_at)
    WHERE schedule_name IS NOT NULL;
CREATE INDEX horsies_workflows_schedule_open ON horsies_workflows (schedule_name)
    WHERE schedule_name IS NOT NULL AND status IN ('PENDING', 'RUNNING', 'PAUSED');

-- All updates by a run's progress are HOT updates: no index contains a column that progress changes, and more than half
-- of every page stays free for new row versions, which grow a little when a node starts. The primary key is the only
-- index, so every plan finds nodes by key, even a plan made on an empty table. Node ids, which are checked when a
-- workflow is built, are searched within their run.
--
-- The trigger horsies_workflow_deleted deletes the nodes of a deleted run. There is no foreign key: a start would check
-- it for every node, although the same statement inserts the run.
CREATE TABLE horsies_workflow_tasks (
    workflow_id           uuid          NOT NULL,
    task_index            integer       NOT NULL,
    node_id               varchar(128)  NOT NULL,
    kind                  horsies_node_kind NOT NULL,
    -- RUNNING is stored only for sub-workflow and map nodes; any other node counts as running while its task runs.
    status                horsies_node_status NOT NULL,
    -- Whether the counters of the node's dependents and of its run include the end of this node.
    propagated            boolean       NOT NULL DEFAULT false,
    task_id               uuid,
    -- The task that contains the node's result, or the result itself if no single task contains it.
    result_task_id        uuid,
    result                text,
    -- The edges of the node in the graph.
    dependencies          integer[]     NOT NULL,
    dependents            integer[]     NOT NULL,
    context_dependents    integer[]     NOT NULL,
    join_type             horsies_join_type NOT NULL,
    min_success           integer,
    allow_failed_deps     boolean       NOT NULL,
    pauses                boolean       NOT NULL,
    -- Counters of the node's dependencies, maintained while the node is PENDING.
    deps_open             integer       NOT NULL,
    deps_ok               integer       NOT NULL DEFAULT 0,
    deps_bad              integer       NOT NULL DEFAULT 0,
    context_open          integer       NOT NULL DEFAULT 0,
    -- The task to insert when the node starts.
    task_name             varchar(255)  NOT NULL,
    task_kwargs           text          NOT NULL,
    queue_name            varchar(100)  NOT NULL,
    priority              integer       NOT NULL,
    task_options          text          NOT NULL,
    max_retries           integer       NOT NULL,
    timeout_ms            integer,
    good_until            timestamptz,
    expires_in_ms         bigint,
    inputs                text,
    -- The key of the node's tasks: the node's own key, or the key of the run.
    lane_key              text,
    -- Columns for sleep, signal, map and sub-workflow nodes.
    delay_ms              bigint,
    not_before            timestamptz,
    signal_name           varchar(255),
    signal_timeout_ms     bigint,
    map_over              integer,
    map_parameter         varchar(255),
    max_parallel          integer,
    -- The maximum number of items in a map (payload.max_map_items); NULL if there is no limit.
    max_items             integer,
    allow_failed_items    boolean       NOT NULL DEFAULT false,
    items_total           integer,
    items_open            integer,
    items_bad             integer,
    -- The elements of a long list become tasks a thousand at a time. These columns contain how many items have no task
    -- yet, and the index at which the next step continues. NULL for a map whose tasks were all inserted at once.
    items_waiting         integer,
    items_next            integer,
    sub_definition_key    varchar(255),
    sub_workflow_name     varchar(255),
    sub_workflow_id       uuid,
    sub_workflow_summary  text,
    created_at            timestamptz   NOT NULL DEFAULT clock_timestamp(),
    enqueued_at           timestamptz,
    started_at            timestamptz,
    completed_at          timestamptz,
    PRIMARY KEY (workflow_id, task_index)
) WITH (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- The edges of a node with many edges are stored out of line: progress updates the row often but reads its edges only
-- once.
ALTER TABLE horsies_workflow_tasks
    ALTER COLUMN dependencies SET STORAGE EXTERNAL,
    ALTER COLUMN dependents SET STORAGE EXTERNAL,
    ALTER COLUMN context_dependents SET STORAGE EXTERNAL;

-- A set of nodes, by their keys, as workflow functions pass it to each other.
CREATE TYPE horsies_nodes AS (runs uuid[], indexes integer[]);

-- Signals that arrived before a node waited for them.
CREATE TABLE horsies_workflow_signals (
    id           bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    workflow_id  uuid          NOT NULL REFERENCES horsies_workflows (id) ON DELETE CASCADE,
    name         varchar(255)  NOT NULL,
    value        text          NOT NULL,
    created_at   timestamptz   NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX horsies_workflow_signals_waiting ON horsies_workflow_signals (workflow_id, name, id);

-- Schedules ---------------------------------------------------------------------------------------
CREATE TABLE horsies_schedule_state (
    schedule_name   varchar(255)  PRIMARY KEY,
    last_run_at     timestamptz,
    -- The next slot; NULL once the schedule has ended.
    next_run_at     timestamptz,
    last_task_id    uuid,
    run_count       integer       NOT NULL DEFAULT 0,
    config_hash     varchar(64),
    updated_at      timestamptz   NOT NULL DEFAULT now(),
    -- The task that the schedule sends, or the key of the workflow that it starts; and the scheduler or program that
    -- stored the schedule.
    task_name       varchar(255),
    definition_key  varchar(255),
    owner           varchar(255),
    -- The JSON (pattern, time zone, bounds) from which config_hash is computed.
    timing          text,
    -- The whole schedule as JSON, with its arguments, if it was added at run time and is stored only here.
    definition      text,
    -- The timing from the configuration or program, while a person's edit replaces it; a reset returns to this timing.
    original_timing text,
    -- When a person last changed the timing. Slots that were due before this change belong to the old timing.
    edited_at       timestamptz,
    paused_at       timestamptz,
    resumed_at      timestamptz,
    -- When a scheduler found a slot overdue because the schedule is switched off; slots that pass after this time do
    -- not count as missed. Any later change to the row ("updated_at") invalidates this time.
    disabled_at     timestamptz,
    -- The end of the most recent period whose slots did not fire, and the reason.
    skipped_at      timestamptz,
    skip_reason     varchar(16),
    created_at      timestamptz   NOT NULL DEFAULT now()
);

CREATE INDEX horsies_schedule_state_due ON horsies_schedule_state (next_run_at)
    WHERE next_run_at IS NOT NULL AND paused_at IS NULL;

-- Measures ----------------------------------------------------------------------------------------
-- Rates and durations of attempts, counted by workers. A worker adds the counts of its last half minute to the rows for
-- those minutes, one row per queue and task; an idle worker writes nothing. After six hours, rows of single minutes are
-- merged into rows of ten. Updates change no indexed column, and half of each page is left free for them, so all of
-- them are heap-only updates.
CREATE TABLE horsies_measures (
    -- The start of the period that the row counts, and its length in minutes: 1, or 10 after the rows of single minutes
    -- were merged.
    minute      timestamptz   NOT NULL,
    minutes     smallint      NOT NULL,
    queue_name  varchar(100)  NOT NULL,
    -- The empty string for all tasks beyond the first 200 names of a worker.
    task_name   varchar(255)  NOT NULL,
    -- Attempts by outcome: "retried" attempts were followed by another attempt; all other attempts were the last ones
    -- of their tasks.
    done        integer       NOT NULL,
    failed      integer       NOT NULL,
    retried     integer       NOT NULL,
    crashed     integer       NOT NULL,
    stopped     integer       NOT NULL,
    -- Durations, as sums and as counts per bucket (the bounds are in monitor/measures.py): the wait between the due
    -- time and the start of an attempt, and its run time.
    waited_ms   bigint        NOT NULL,
    ran_ms      bigint        NOT NULL,
    waited      integer[]     NOT NULL,
    ran         integer[]     NOT NULL,
    PRIMARY KEY (minute, minutes, queue_name, task_name)
) WITH (fillfactor = 50);

-- Finds the rows of single minutes that have not been merged yet.
CREATE INDEX horsies_measures_minutes ON horsies_measures (minute) WHERE minutes = 1;

-- Actions -----------------------------------------------------------------------------------------
-- Changes made by people: pauses, cancellations, retries, bulk orders. A row is written in the change's own
-- transaction, even for a refused change. Task arguments and results are never recorded.
CREATE TABLE horsies_actions (
    id       bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz   NOT NULL DEFAULT clock_timestamp(),
    actor    varchar(255)  NOT NULL,
    source   varchar(16)   NOT NULL,
    verb     varchar(32)   NOT NULL,
    subject  varchar(255)  NOT NULL,
    outcome  varchar(16)   NOT NULL,
    detail   text,
    -- For a bulk order, its bounds, its filters and its progress. Each order has a single row, which its batches
    -- update.
    order_id        uuid  UNIQUE,
    order_plan      text,
    order_progress  text
);
CREATE INDEX horsies_actions_subject ON horsies_actions (subject, id);
CREATE INDEX horsies_actions_actor ON horsies_actions (actor, id);
