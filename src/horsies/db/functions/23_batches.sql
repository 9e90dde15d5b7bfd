-- Batches: a child that has received one task of a batched function can take more of its tasks for the same call.
--
-- The claim gives every idle child one task, as always. If that task is batched, the worker uses this function, in
-- another transaction, to claim the tasks behind it in the same lane. So the claim itself is the same as without
-- batches, the lane uses only one turn, and each task is handled separately after the claim. Every limit applies: each
-- task counts under the caps, the rates and the limits of its key.

-- Return how many more tasks of a lane may start now under the caps, the rate of the queue and the limits of the lane.
-- The locks are taken in the same order as in a claim.
CREATE OR REPLACE FUNCTION horsies_batch_room(
    p_queue text, p_lane bigint, p_wanted integer, p_queue_cap integer, p_cluster_cap integer, p_counts_claimed boolean,
    p_rate_seconds float8, p_rate_burst integer, OUT room integer, OUT limits horsies_lanes)
LANGUAGE plpgsql AS $$
DECLARE
    shared horsies_lanes;
BEGIN
    room := p_wanted;
    IF p_queue_cap IS NOT NULL OR p_cluster_cap IS NOT NULL THEN
        PERFORM horsies_lock_caps(ARRAY[p_queue], ARRAY[p_queue_cap], p_cluster_cap);
    END IF;
    IF p_rate_seconds IS NOT NULL THEN
        room := (horsies_metered_limits(ARRAY[p_queue], ARRAY[room], ARRAY[p_rate_seconds], ARRAY[p_rate_burst]))[1];
    END IF;
    IF p_cluster_cap IS NOT NULL THEN
        room := least(room, p_cluster_cap - horsies_in_flight(NULL, true, clock_timestamp()));
    END IF;
    IF p_queue_cap IS NOT NULL THEN
        room := least(room, p_queue_cap - horsies_in_flight(p_queue, p_counts_claimed, clock_timestamp()));
    END IF;
    IF room <= 0 OR EXISTS (
        SELECT FROM horsies_queues AS stored WHERE stored.queue_name = p_queue AND stored.paused_at IS NOT NULL) THEN
        room := 0;
    ELSIF EXISTS (SELECT FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue) THEN
        SELECT * INTO shared FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = 0;
        limits := horsies_lane_limits(p_queue, p_lane, shared);
        room := least(room, (horsies_lane_room(p_queue, p_lane, limits)).room);
    END IF;
END
$$;

-- Lock and return the due tasks with this name behind a given task of their lane, in order. Only the leading run is
-- returned: it ends at the first task with another name, so nothing overtakes that task. The rows behind the run stay
-- locked until the commit, and other claims skip them, so the commit notifies the workers of the queue. Tasks for async
-- children are left out.
CREATE OR REPLACE FUNCTION horsies_due_behind(
    p_queue text, p_lane bigint, p_task_name text, p_wanted integer, p_after_priority integer,
    p_after_at timestamptz, p_after_id uuid, p_refused_ids uuid[], p_refused_by text[]) RETURNS uuid[]
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    look_at timestamptz := clock_timestamp();
    ids uuid[];
    has_others boolean;
BEGIN
    SELECT coalesce(array_agg(line.id ORDER BY line.place) FILTER (WHERE line.is_run), '{}'),
        coalesce(NOT bool_and(line.is_run), false)
    INTO ids, has_others FROM (
        SELECT due.id, row_number() OVER line AS place, bool_and(due.task_name = p_task_name) OVER line AS is_run
        FROM (
            SELECT task.id, task.task_name, task.priority, task.enqueued_at FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = p_queue AND task.lane = p_lane
              AND (task.priority, task.enqueued_at, task.id) > (p_after_priority, p_after_at, p_after_id)
              AND (task.good_until IS NULL OR task.good_until > look_at)
              AND (task.next_retry_at <= task.updated_at) IS NOT FALSE
              AND (task.task_options LIKE '{"async":true%') IS NOT TRUE AND task.id <> ALL(p_refused_ids)
              AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, look_at))
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT p_wanted FOR UPDATE SKIP LOCKED) AS due
        WINDOW line AS (ORDER BY due.priority, due.enqueued_at, due.id)) AS line;
    IF has_others THEN
        PERFORM pg_notify('task_queue_' || p_queue, '@');
    END IF;
    RETURN ids;
END
$$;

-- PENDING -> RUNNING for up to "p_wanted" tasks behind "p_heads". The heads are the tasks, all of one name and lane and
-- in order, that children of this worker have already received; "p_pids" are the process ids of these children. Batches
-- of "p_size" tasks are filled one after another, first with the heads: a head that falls into the batch of an earlier
-- child moves to that child.
CREATE OR REPLACE FUNCTION horsies_claim_batch_v1(
    p_worker_id text, p_hostname text, p_heads uuid[], p_pids integer[], p_size integer, p_queue text, p_lane bigint,
    p_task_name text, p_wanted integer, p_after_priority integer, p_after_at timestamptz, p_queue_cap integer,
    p_cluster_cap integer, p_counts_claimed boolean, p_rate_seconds float8, p_rate_burst integer,
    p_refused_ids uuid[], p_refused_by text[])
RETURNS TABLE (
    id text, generation integer, task_name text, queue_name text, args text, kwargs text, retry_count integer,
    max_retries integer, task_options text, timeout_ms integer, worker_pid integer, workflow_id text,
    workflow_node_index integer, workflow_item_index integer, workflow_inputs text, priority integer,
    enqueued_at timestamptz, details text, burst boolean, lane bigint)
LANGUAGE plpgsql AS $$
DECLARE
    heads integer := cardinality(p_heads);
    free record;
    ids uuid[] := '{}';
BEGIN
    free := horsies_batch_room(
        p_queue, p_lane, p_wanted, p_queue_cap, p_cluster_cap, p_counts_claimed, p_rate_seconds, p_rate_burst);
    IF free.room > 0 THEN
        ids := horsies_due_behind(
            p_queue, p_lane, p_task_name, free.room, p_after_priority, p_after_at, p_heads[heads], p_refused_ids,
            p_refused_by);
    END IF;
    IF heads > 1 THEN
        UPDATE horsies_tasks AS task SET
            (worker_pid, worker_process_name) = (
                SELECT child.pid, 'worker-' || child.pid
                FROM (SELECT p_pids[(array_position(p_heads, task.id) - 1) / p_size + 1] OFFSET 0) AS child (pid)),
            updated_at = clock_timestamp()
        WHERE task.id = ANY(p_heads) AND task.claimed_by_worker_id = p_worker_id
          AND coalesce(task.status, '') = 'RUNNING'
          AND task.worker_pid <> p_pids[(array_position(p_heads, task.id) - 1) / p_size + 1];
    END IF;
    IF ids = '{}' THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH begun AS (
        UPDATE horsies_tasks AS task SET
            (status, started_at, worker_pid, worker_process_name) = (
                SELECT 'RUNNING', clock_timestamp(), child.pid, 'worker-' || child.pid
                FROM (SELECT p_pids[(heads + array_position(ids, task.id) - 1) / p_size + 1] OFFSET 0)
                    AS child (pid)),
            generation = task.generation + 1, claimed_by_worker_id = p_worker_id, claimed_at = clock_timestamp(),
            worker_hostname = p_hostname, updated_at = clock_timestamp()
        WHERE task.id = ANY(ids) RETURNING task.*)
    SELECT begun.id::text, begun.generation, begun.task_name::text, begun.queue_name::text,
        begun.args, begun.kwargs, begun.retry_count, begun.max_retries, begun.task_options,
        begun.timeout_ms, begun.worker_pid, begun.workflow_id::text, begun.workflow_node_index,
        begun.workflow_item_index, begun.workflow_inputs, begun.priority, begun.enqueued_at,
        concat(begun.sent_at, E'\n', begun.enqueued_at, E'\n', begun.good_until, E'\n',
            begun.scheduled_for, E'\n', begun.workflow_item_index, E'\n', begun.workflow_id, E'\n',
            CASE WHEN begun.workflow_id IS NOT NULL THEN (
                SELECT node.node_id FROM horsies_workflow_tasks AS node
                WHERE node.workflow_id = begun.workflow_id AND node.task_index = begun.workflow_node_index) END,
            E'\n', begun.schedule_name),
        begun.burst, begun.lane
    FROM begun ORDER BY array_position(ids, begun.id);
    IF p_rate_seconds IS NOT NULL THEN
        PERFORM horsies_note_starts(
            ARRAY[p_queue], ARRAY[cardinality(ids)], ARRAY[p_rate_seconds], ARRAY[p_rate_burst]);
    END IF;
    IF (free.limits).rate_seconds IS NOT NULL THEN
        PERFORM horsies_note_lane_starts(p_queue, p_lane, free.limits, cardinality(ids), ids, NULL);
    END IF;
END
$$;
