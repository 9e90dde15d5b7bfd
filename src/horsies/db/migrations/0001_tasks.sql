-- Tasks and their attempts.
--
-- Index diet: the primary key, and partial indexes that match the hot predicates exactly. An update that
-- changes status touches only the indexes whose predicate the new version satisfies, so a task costs
-- primary key + claim index at insert, primary key + in-flight index at start, primary key alone at its end.

-- What a status may be, as a domain: PostgreSQL reads the text of a table's CHECK constraints anew for every
-- statement that writes to it (18 us each), a domain's only once per session.
CREATE DOMAIN horsies_task_status AS varchar(16)
    CHECK (VALUE IN ('PENDING', 'CLAIMED', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'));
CREATE DOMAIN horsies_attempt_outcome AS varchar(32) CHECK (VALUE IN ('COMPLETED', 'FAILED', 'WORKER_FAILURE'));

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
    claimed               boolean       NOT NULL DEFAULT false,
    claimed_by_worker_id  varchar(255),
    claim_expires_at      timestamptz,
    good_until            timestamptz,
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
    -- The fence: incremented by every claim, required by every later transition.
    generation            integer       NOT NULL DEFAULT 0,
    -- A held row is PENDING but never claimed: how a paused workflow keeps its tasks.
    held                  boolean       NOT NULL DEFAULT false,
    timeout_ms            integer,
    cancel_requested_at   timestamptz,
    idempotency_key       text,
    idempotency_sha       varchar(64),
    retried_from_task_id  uuid,
    workflow_id           uuid,
    workflow_node_index   integer,
    -- Which element of a map node's list.
    workflow_item_index   integer,
    -- Which results of other nodes this one takes, by reference: {"args": {name: index}, "context": {node: index}}.
    workflow_inputs       text
) WITH (
    fillfactor = 80,
    -- Every task leaves two dead versions behind; vacuum early and without pauses, or the claim index
    -- fills with entries that lead nowhere.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.05
);

CREATE INDEX horsies_tasks_claim ON horsies_tasks (queue_name, priority, enqueued_at, id)
    WHERE status = 'PENDING' AND NOT held;
CREATE INDEX horsies_tasks_in_flight ON horsies_tasks (claimed_by_worker_id)
    WHERE status IN ('CLAIMED', 'RUNNING');
CREATE INDEX horsies_tasks_lease ON horsies_tasks (claim_expires_at)
    WHERE status = 'CLAIMED';
CREATE INDEX horsies_tasks_deadline ON horsies_tasks (good_until)
    WHERE status = 'PENDING' AND good_until IS NOT NULL;
CREATE INDEX horsies_tasks_error_code ON horsies_tasks (error_code)
    WHERE error_code IS NOT NULL;
CREATE INDEX horsies_tasks_workflow ON horsies_tasks (workflow_id, workflow_node_index, workflow_item_index)
    WHERE workflow_id IS NOT NULL;
-- Where the next parked item of a map is found without passing those that have ended.
CREATE INDEX horsies_tasks_items ON horsies_tasks (workflow_id, workflow_node_index, workflow_item_index)
    WHERE status = 'PENDING' AND workflow_item_index IS NOT NULL;
CREATE UNIQUE INDEX horsies_tasks_idempotency ON horsies_tasks (task_name, idempotency_key)
    WHERE idempotency_key IS NOT NULL;

CREATE TABLE horsies_task_attempts (
    id                   bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id              uuid          NOT NULL REFERENCES horsies_tasks (id) ON DELETE CASCADE,
    attempt              integer       NOT NULL,
    outcome              horsies_attempt_outcome NOT NULL,
    will_retry           boolean       NOT NULL DEFAULT false,
    started_at           timestamptz,
    finished_at          timestamptz   NOT NULL,
    error_code           text,
    error_message        text,
    failed_reason        text,
    worker_id            varchar(255),
    worker_hostname      varchar(255),
    worker_pid           integer,
    worker_process_name  varchar(255),
    created_at           timestamptz   NOT NULL DEFAULT now(),
    UNIQUE (task_id, attempt)
);

CREATE INDEX horsies_task_attempts_error_code ON horsies_task_attempts (error_code)
    WHERE error_code IS NOT NULL;
-- Attempts arrive in the order they finish, so a block-range index answers "newest" and "older than" for a
-- thousandth of the write cost of a tree.
CREATE INDEX horsies_task_attempts_finished_at ON horsies_task_attempts USING brin (finished_at);
