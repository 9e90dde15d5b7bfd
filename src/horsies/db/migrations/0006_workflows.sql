-- Workflows: runs, their nodes, and the signals nobody has waited for yet.
--
-- A node that may run is an ordinary task row. The row of a node says what to insert then, counts what it still
-- waits for, and afterwards points at the task that holds its result: no result is ever copied into its consumers.

-- Words from fixed lists, as domains: see horsies_task_status.
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
    -- The JSON of a TaskError: why it failed, was paused, cancelled or expired.
    error               text,
    definition_key      varchar(255)  NOT NULL,
    -- Digest of what was submitted: a second start with the same id must be the same run.
    fingerprint         varchar(64)   NOT NULL,
    -- The caller's name for it, unique among runs that have not ended.
    workflow_key        text,
    parent_workflow_id  uuid          REFERENCES horsies_workflows (id) ON DELETE CASCADE,
    parent_task_index   integer,
    depth               integer       NOT NULL DEFAULT 0,
    root_workflow_id    uuid          NOT NULL,
    total_nodes         integer       NOT NULL,
    open_nodes          integer       NOT NULL,
    failed_nodes        integer       NOT NULL DEFAULT 0,
    -- Which case of the success policy was met.
    matched_case        integer,
    -- The schedule it came of, and its slot unless somebody ordered the run by hand.
    schedule_name       varchar(255),
    scheduled_for       timestamptz,
    sent_at             timestamptz,
    created_at          timestamptz   NOT NULL DEFAULT clock_timestamp(),
    started_at          timestamptz   NOT NULL DEFAULT clock_timestamp(),
    paused_at           timestamptz,
    completed_at        timestamptz,
    updated_at          timestamptz   NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 70);

CREATE UNIQUE INDEX horsies_workflows_key ON horsies_workflows (workflow_key)
    WHERE workflow_key IS NOT NULL AND status IN ('PENDING', 'RUNNING', 'PAUSED');
CREATE INDEX horsies_workflows_open ON horsies_workflows (status, created_at)
    WHERE status IN ('PENDING', 'RUNNING', 'PAUSED');
CREATE INDEX horsies_workflows_parent ON horsies_workflows (parent_workflow_id)
    WHERE parent_workflow_id IS NOT NULL;
CREATE INDEX horsies_workflows_root ON horsies_workflows (root_workflow_id)
    WHERE parent_workflow_id IS NOT NULL;
-- Newest first, for operators: a run may have been given any id, so ids do not tell the time.
CREATE INDEX horsies_workflows_created ON horsies_workflows (created_at, id);
CREATE INDEX horsies_workflows_ended ON horsies_workflows (completed_at)
    WHERE completed_at IS NOT NULL;

-- No index mentions a column that progress changes, and more than half of every page is free for new versions of its
-- rows, which grow a little when they begin: progress is HOT updates alone. There is one index and no other to choose,
-- so every plan looks nodes up by their key, however empty the table was when it was made; the ids of nodes, which are
-- checked when a workflow is built, are looked for within their run.
CREATE TABLE horsies_workflow_tasks (
    workflow_id           uuid          NOT NULL REFERENCES horsies_workflows (id) ON DELETE CASCADE,
    task_index            integer       NOT NULL,
    node_id               varchar(128)  NOT NULL,
    kind                  horsies_node_kind NOT NULL,
    -- RUNNING is stored for nodes that are more than one task (sub-workflows, maps) only; for all others the task
    -- row knows whether it runs.
    status                horsies_node_status NOT NULL,
    -- Whether the end of this node has been counted by its dependents and its run.
    propagated            boolean       NOT NULL DEFAULT false,
    task_id               uuid,
    -- Where the result is: in this task's row, or, when it belongs to no single task, here.
    result_task_id        uuid,
    result                text,
    -- The shape of the graph around it.
    dependencies          integer[]     NOT NULL,
    dependents            integer[]     NOT NULL,
    context_dependents    integer[]     NOT NULL,
    join_type             horsies_join_type NOT NULL,
    min_success           integer,
    allow_failed_deps     boolean       NOT NULL,
    pauses                boolean       NOT NULL,
    -- What it waits for, counted down.
    deps_open             integer       NOT NULL,
    deps_ok               integer       NOT NULL DEFAULT 0,
    deps_bad              integer       NOT NULL DEFAULT 0,
    context_open          integer       NOT NULL DEFAULT 0,
    -- The task row to insert.
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
    -- Sleep, signal, map, sub-workflow.
    delay_ms              bigint,
    not_before            timestamptz,
    signal_name           varchar(255),
    signal_timeout_ms     bigint,
    map_over              integer,
    map_parameter         varchar(255),
    max_parallel          integer,
    allow_failed_items    boolean       NOT NULL DEFAULT false,
    items_total           integer,
    items_open            integer,
    items_bad             integer,
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

-- The edges of a wide node lie beside the row: progress writes the row often and reads them once.
ALTER TABLE horsies_workflow_tasks
    ALTER COLUMN dependencies SET STORAGE EXTERNAL,
    ALTER COLUMN dependents SET STORAGE EXTERNAL,
    ALTER COLUMN context_dependents SET STORAGE EXTERNAL;

-- Some nodes, by their keys, as the functions of the engine hand them to each other.
CREATE TYPE horsies_nodes_v1 AS (runs uuid[], indexes integer[]);

-- Signals that arrived before anybody waited for them.
CREATE TABLE horsies_workflow_signals (
    id           bigint        GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    workflow_id  uuid          NOT NULL REFERENCES horsies_workflows (id) ON DELETE CASCADE,
    name         varchar(255)  NOT NULL,
    value        text          NOT NULL,
    created_at   timestamptz   NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX horsies_workflow_signals_waiting ON horsies_workflow_signals (workflow_id, name, id);

-- Waiters hear of every end and pause, monitors of every change of status. Progress without a change of status
-- notifies nobody.
CREATE FUNCTION horsies_notify_workflow_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('horsies_workflow_status', NEW.id::text || ' ' || NEW.status);
    IF NEW.status IN ('COMPLETED', 'FAILED', 'CANCELLED', 'PAUSED', 'EXPIRED') THEN
        PERFORM pg_notify('workflow_done', NEW.id::text);
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION horsies_notify_workflows_started_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('horsies_workflow_status', CASE WHEN count(*) = 1 THEN min(id::text) || ' RUNNING' ELSE '' END)
    FROM started HAVING count(*) > 0;
    RETURN NULL;
END
$$;

CREATE TRIGGER horsies_workflow_changed AFTER UPDATE OF status ON horsies_workflows
    FOR EACH ROW WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION horsies_notify_workflow_v1();

CREATE TRIGGER horsies_workflow_started AFTER INSERT ON horsies_workflows
    REFERENCING NEW TABLE AS started
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_notify_workflows_started_v1();
