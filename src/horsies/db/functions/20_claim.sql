-- The claim. This file also explains the planner idioms that all SQL files use.
--
-- Plans made on an empty table
--
-- A session keeps a plan as long as its connection lives, and the plan may date from a time when the tables contained
-- two rows. Such a plan reads a whole table, or walks a partial index past every task in flight. Five idioms keep the
-- planner from these plans; other files refer to them by name.
--
-- * Opaque status: coalesce(status, '') = 'RUNNING' is a guard that the planner cannot match to a partial index. Rows
--   with a known id should be found through the primary key.
-- * By position: id = ANY(ids) leaves the planner only the primary key to find the rows, and
--   (numbers)[array_position(ids, id)] is the value for that row. A join with unnest(ids, numbers) compares every row
--   with every id instead, which made a turn of 64 tasks half as expensive again. The ids must be unique.
-- * One by one: a LATERAL subquery that ends in OFFSET 0 is not merged into the surrounding query, so each key is
--   looked up separately. Both columns of a node's key must come from the same source: otherwise a plan made when there
--   were few nodes would find nodes by their run alone.
-- * Few rows: a LIMIT whose value the planner does not know makes the planner expect few rows.
-- * Forced step: (SELECT count(*) FROM step) >= 0 is always true. It forces "step" to run, and to run first.

-- Take the locks that protect the caps: one for the whole cluster if it has a cap, otherwise one per queue with a cap,
-- in key order. The locks are held until the commit, so no two turns count the same place.
CREATE OR REPLACE FUNCTION horsies_lock_caps(p_queues text[], p_queue_caps integer[], p_cluster_cap integer)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_cluster_cap IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(1751348595, 0);
    ELSE
        PERFORM pg_advisory_xact_lock(1751348595, lock_key) FROM (
            SELECT DISTINCT hashtext(capped.name) AS lock_key
            FROM unnest(p_queues, p_queue_caps) AS capped (name, cap) WHERE capped.cap IS NOT NULL
            ORDER BY lock_key) AS keys;
    END IF;
END
$$;

-- Count the occupied places under a cap, for one queue or for all. A claimed task whose lease has lapsed occupies no
-- place, and neither does a task whose code has ended but whose outcome the database refuses. The function is volatile,
-- so that it counts changes that other turns committed while this turn waited for the locks.
CREATE OR REPLACE FUNCTION horsies_in_flight(p_queue text, p_counts_claimed boolean, p_now timestamptz)
RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT count(*) FROM horsies_tasks AS task
        WHERE task.status IN ('CLAIMED', 'RUNNING') AND (p_queue IS NULL OR task.queue_name = p_queue)
          AND (task.status = 'RUNNING' OR (p_counts_claimed AND task.claim_expires_at > p_now))
          -- The first NOT EXISTS is cheap: it runs only once, and its table is almost always empty.
          AND (NOT EXISTS (SELECT FROM horsies_blocked) OR NOT EXISTS (
              SELECT FROM horsies_blocked AS blocked
              WHERE blocked.id = task.id AND blocked.kind = 'task' AND blocked.generation = task.generation
                AND blocked.status = task.status AND blocked.action IN ('record', 'recover'))));
END
$$;

-- Return whether workers with these parameters skip a task because its call does not fit their parameters.
CREATE OR REPLACE FUNCTION horsies_is_refused(p_id uuid, p_fingerprints text[], p_now timestamptz)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM horsies_refusals AS refusal
        WHERE refusal.task_id = p_id AND refusal.fingerprint = ANY(p_fingerprints) AND refusal.until > p_now);
END
$$;

-- Lock and return the next due tasks, in order, for a worker with async children: either only "async def" tasks or only
-- other tasks. "async def" tasks have their own index, horsies_tasks_claim_async. Other tasks are found through the
-- claim index, where skipping an "async def" task or an excluded task costs about 1 us.
CREATE OR REPLACE FUNCTION horsies_due_of_kind(
    p_is_async boolean, p_queue text, p_level integer, p_look_at timestamptz, p_after_at timestamptz,
    p_after_id uuid, p_wanted integer, p_unknown_names text[], p_refused_ids uuid[], p_refused_by text[])
RETURNS uuid[] LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM horsies_queues AS stored
        WHERE stored.queue_name = p_queue AND stored.paused_at IS NOT NULL) THEN
        RETURN '{}';
    END IF;
    IF p_is_async THEN
        RETURN ARRAY(
            SELECT task.id FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.task_options LIKE '{"async":true%'
              AND task.queue_name = p_queue AND task.priority = p_level AND task.enqueued_at <= p_look_at
              AND (task.enqueued_at, task.id) > (p_after_at, p_after_id)
              AND (task.good_until IS NULL OR task.good_until > p_look_at)
              AND task.task_name <> ALL(p_unknown_names) AND task.id <> ALL(p_refused_ids)
              AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at))
            ORDER BY task.enqueued_at, task.id LIMIT p_wanted FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN ARRAY(
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = p_queue
          AND task.priority = p_level AND task.enqueued_at <= p_look_at
          AND (task.enqueued_at, task.id) > (p_after_at, p_after_id)
          AND (task.good_until IS NULL OR task.good_until > p_look_at)
          AND (task.task_options LIKE '{"async":true%') IS NOT TRUE
          AND task.task_name <> ALL(p_unknown_names) AND task.id <> ALL(p_refused_ids)
          AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at))
        ORDER BY task.enqueued_at, task.id LIMIT p_wanted FOR UPDATE SKIP LOCKED);
END
$$;

-- Return the next due tasks of one queue and priority, when children that already hold tasks may take more tasks: up to
-- "p_any" tasks of any kind for idle children, followed by the leading run of short tasks that may wait in a child. A
-- queue with a cap has no such run. The run ends at the first task that may not wait in a child, so nothing overtakes
-- that task. The rows behind the run stay locked until the commit, and other workers' claims skip them, so the commit
-- notifies these workers. A worker that receives fewer tasks than it requests then requests fewer.
--
-- "is_open" means that tasks of later priorities and queues may wait in children too, because all due tasks of this
-- queue and priority are short and were taken. It is also true for a queue without due tasks, even if the queue has
-- delayed tasks.
CREATE OR REPLACE FUNCTION horsies_leading_run(
    p_queue text, p_priority integer, p_after_at timestamptz, p_after_id uuid, p_look_at timestamptz,
    p_wanted integer, p_any integer, p_is_capped boolean, p_short_names text[], p_is_async boolean,
    p_leaves_out boolean, p_unknown_names text[], p_refused_ids uuid[], p_refused_by text[], OUT ids uuid[],
    OUT is_open boolean)
LANGUAGE plpgsql AS $$
DECLARE
    locked bigint;
BEGIN
    SELECT coalesce(array_agg(line.id ORDER BY line.place) FILTER (
            WHERE line.place <= p_any OR (line.is_run AND NOT p_is_capped)), '{}'),
        count(*), coalesce(bool_and(line.is_run), true)
    INTO ids, locked, is_open FROM (
        SELECT due.id, row_number() OVER line AS place,
            bool_and(due.burst AND due.task_name = ANY(p_short_names)) OVER line AS is_run
        FROM (
            SELECT task.id, task.burst, task.task_name, task.enqueued_at FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = p_queue
              AND task.priority = p_priority AND task.enqueued_at <= p_look_at
              AND (task.enqueued_at, task.id) > (p_after_at, p_after_id)
              AND (task.good_until IS NULL OR task.good_until > p_look_at)
              AND (p_is_async IS NULL OR (task.task_options LIKE '{"async":true%') IS NOT TRUE)
              AND CASE WHEN p_leaves_out THEN task.task_name <> ALL(p_unknown_names)
                      AND task.id <> ALL(p_refused_ids) AND (p_refused_by = '{}'
                          OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at)) ELSE true END
              AND NOT EXISTS (
                  SELECT FROM horsies_queues AS stored
                  WHERE stored.queue_name = p_queue AND stored.paused_at IS NOT NULL)
            ORDER BY task.enqueued_at, task.id LIMIT p_wanted FOR UPDATE SKIP LOCKED) AS due
        WINDOW line AS (ORDER BY due.enqueued_at, due.id)) AS line;
    IF locked > cardinality(ids) THEN
        is_open := false;
        PERFORM pg_notify('task_queue_' || p_queue, '');
    END IF;
END
$$;

-- Return the columns of a claimed task that only its code may read, one per line.
CREATE OR REPLACE FUNCTION horsies_details_v1(
    p_sent_at timestamptz, p_enqueued_at timestamptz, p_good_until timestamptz, p_scheduled_for timestamptz,
    p_item_index integer, p_workflow_id uuid, p_node_index integer, p_schedule_name text)
RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    node_id text;
BEGIN
    IF p_workflow_id IS NOT NULL THEN
        node_id := (
            SELECT node.node_id FROM horsies_workflow_tasks AS node
            WHERE node.workflow_id = p_workflow_id AND node.task_index = p_node_index);
    END IF;
    RETURN concat(
        p_sent_at, E'\n', p_enqueued_at, E'\n', p_good_until, E'\n', p_scheduled_for, E'\n', p_item_index, E'\n',
        p_workflow_id, E'\n', node_id, E'\n', p_schedule_name);
END
$$;

-- PENDING -> RUNNING or CLAIMED: queues in the given order, priorities in order within a queue, first in first out
-- within a priority, until the idle children or the places under a cap run out. The loop over the queues runs in the
-- database and needs one round trip; a loop in the worker would need one per queue. Compared with a single plain
-- UPDATE, the loop costs 3 to 8 % of a turn. Inside the loop, one statement chooses the rows and updates them: two
-- separate functions cost another 2 to 5 % of a claim.
--
-- * A task for an idle child is claimed and started in one step: status RUNNING, with the child's pid. Tasks
--   claimed ahead ("p_prefetch") stay CLAIMED under a lease.
-- * The rows are chosen in an ARRAY(SELECT ...), which is evaluated exactly once: IN (SELECT ... LIMIT n FOR UPDATE
--   SKIP LOCKED) may be evaluated again and claim more than its limit. The update finds a task's child by position but
--   loses the order of the tasks, so the result is sorted again.
-- * Priorities are scanned one at a time, so that "enqueued_at <= look_at" ends the index scan: a hundred thousand
--   tasks that are due tomorrow cost nothing today. "look_at" is a value, because a volatile function in the WHERE
--   clause would be a filter instead of an index condition.
-- * Claimed tasks leave dead index entries until vacuum removes them, which an open transaction prevents. So a worker
--   keeps one mark per queue: the priority, time and id of the last task that it claimed. The first pass searches
--   behind the marks, which takes one index probe per queue; the second pass, made with "p_looks_everywhere" if places
--   are left, searches the marked queues from the front. Tasks behind a mark are claimed in exact order. The worker
--   decides how often to search without marks, so that a task in front of a mark does not wait long. "p_marked_lanes"
--   and the parameters after it contain the marks of lanes, in the order of the ring.
-- * With several queues and marks, one statement finds the queues that have tasks; in a queue with a mark, only tasks
--   behind the mark count. With this statement, four queues without tasks add 0.03 ms to a claim; with a separate
--   search of each they added 0.08 ms, or 0.36 ms if no child had a window. A claim without marks skips this statement,
--   which would scan dead entries again. A priority whose first task is not due is skipped.
-- * The statement that chooses the rows also checks whether a queue is paused: a separate statement cost 0.02 ms.
-- * A worker that has met tasks it cannot run excludes their names ("p_unknown_names"), the tasks themselves
--   ("p_refused_ids"), or the tasks that its parameters do not fit ("p_refused_by", see horsies_refusals). The CASE
--   keeps the planner from estimating how many tasks remain, and costs workers without exclusions about 10 ns per task.
--   Skipping an excluded task costs about 1 us and skipping a refused call about 3 us; marks start behind such tasks.
-- * "p_freed" is the number of places that this transaction has freed in each queue. If the claim does not use them
--   again, it notifies the workers that a cap may have turned away.
-- * Windows: the first "p_idle" places belong to idle children and are filled with any tasks. The places after them
--   belong to children that hold other tasks: only short tasks may take them (horsies_leading_run), and never from a
--   queue with a cap. The claim goes through the queues and priorities in order, and fills these places until it meets
--   a due task that it could claim but that may not wait in a child. Claimed, delayed and paused tasks do not stop it.
-- * "p_rate_seconds" and "p_rate_bursts" are the rates of the queues; both arrays are empty for a worker whose queues
--   have none. See 18_rates.sql.
-- * "p_cursors" contains a place on the ring of lanes for each queue whose tasks have keys, and is empty if the worker
--   knows of no such queue; see 19_keys.sql. Such a queue is served lane by lane: idle children take tasks of any lane,
--   then windows take short tasks, unless tasks without a key wait for their turn. For such a queue the result includes
--   a row without an id. It contains the lane at which the next claim continues, whether the lanes were drained, and
--   the seconds after which a lane with limits may have more tasks. As "generation", the row contains the microseconds
--   that the longest search from the fronts of the lanes took; NULL if all lanes were searched behind marks. If this
--   search was quick, the worker sends no marks. "p_freed_lanes" are the lanes of the tasks that this transaction has
--   ended.
-- * "p_is_async" restricts the claim to tasks of "async def" functions (true) or to all other tasks (false); NULL means
--   no restriction.
-- * "details" contains the columns that only a task's code may read, one per line in a single text. As separate columns
--   they would cost the worker 0.1 us each, and hardly any task reads them.
CREATE OR REPLACE FUNCTION horsies_claim_v1(
    p_worker_id text, p_hostname text, p_pids integer[], p_prefetch integer, p_lease_ms integer,
    p_queues text[], p_queue_limits integer[], p_queue_caps integer[], p_cluster_cap integer,
    p_counts_claimed boolean, p_freed integer[], p_marked_priorities integer[] DEFAULT '{}',
    p_marked_moments timestamptz[] DEFAULT '{}', p_marked_ids uuid[] DEFAULT '{}',
    p_looks_everywhere boolean DEFAULT true, p_unknown_names text[] DEFAULT '{}',
    p_refused_ids uuid[] DEFAULT '{}', p_idle integer DEFAULT NULL, p_short_names text[] DEFAULT '{}',
    p_is_async boolean DEFAULT NULL, p_refused_by text[] DEFAULT '{}', p_rate_seconds float8[] DEFAULT '{}',
    p_rate_bursts integer[] DEFAULT '{}', p_cursors bigint[] DEFAULT '{}', p_freed_queues text[] DEFAULT '{}',
    p_freed_lanes bigint[] DEFAULT '{}', p_marked_lanes bigint[] DEFAULT '{}',
    p_lane_priorities integer[] DEFAULT '{}', p_lane_moments timestamptz[] DEFAULT '{}',
    p_lane_ids uuid[] DEFAULT '{}')
RETURNS TABLE (
    id text, generation integer, task_name text, queue_name text, args text, kwargs text, retry_count integer,
    max_retries integer, task_options text, timeout_ms integer, worker_pid integer, workflow_id text,
    workflow_node_index integer, workflow_item_index integer, workflow_inputs text, priority integer,
    enqueued_at timestamptz, details text, burst boolean, lane bigint)
LANGUAGE plpgsql AS $$
DECLARE
    places integer := cardinality(p_pids) + p_prefetch;
    idle integer := coalesce(p_idle, places);
    has_run boolean;
    run record;
    run_ids uuid[];
    taken integer := 0;
    taken_here integer[] := array_fill(0, ARRAY[cardinality(p_queues)]);
    queue text;
    wanted integer;
    changed integer;
    is_marked boolean;
    has_tasks boolean[];
    level integer;
    first_at timestamptz;
    after_at timestamptz;
    after_id uuid;
    look_at timestamptz;
    leaves_out boolean := p_unknown_names <> '{}' OR p_refused_ids <> '{}' OR p_refused_by <> '{}';
    cursor bigint;
    is_keyed boolean;
    keyed record;
    marks horsies_lane_marks;
    reserved integer;
    taken_keyed uuid[] := '{}';
    -- How long the searches of one queue's lanes from their fronts took, and when the current one began.
    search_us integer;
    search_began_at timestamptz;
    -- The queues in which this claim has also searched the marked lanes from their fronts.
    searched text[] := '{}';
    -- The queues that this claim has searched and whose keys have no limits, so that no limit has turned away a worker.
    unlimited text[] := '{}';
BEGIN
    IF p_cluster_cap IS NOT NULL OR array_remove(p_queue_caps, NULL) <> '{}' THEN
        PERFORM horsies_lock_caps(p_queues, p_queue_caps, p_cluster_cap);
    END IF;
    IF p_rate_seconds <> '{}' THEN
        p_queue_limits := horsies_metered_limits(p_queues, p_queue_limits, p_rate_seconds, p_rate_bursts);
    END IF;
    look_at := clock_timestamp();
    IF p_cluster_cap IS NOT NULL THEN
        places := least(places, p_cluster_cap - horsies_in_flight(NULL, true, look_at));
    END IF;
    IF cardinality(p_queues) > 1 AND p_marked_ids <> '{}' THEN
        -- LIMIT 1 instead of EXISTS, because the planner may implement EXISTS by a hash table of all pending tasks.
        has_tasks := ARRAY(
            SELECT CASE WHEN p_marked_ids[place] IS NULL THEN (
                SELECT true FROM horsies_tasks AS task
                WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = p_queues[place]
                ORDER BY task.priority LIMIT 1)
            ELSE (
                SELECT true FROM horsies_tasks AS task
                WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = p_queues[place]
                  AND task.priority = p_marked_priorities[place] AND task.enqueued_at <= look_at
                  AND (task.enqueued_at, task.id) > (p_marked_moments[place], p_marked_ids[place])
                ORDER BY task.enqueued_at, task.id LIMIT 1) END
            FROM generate_subscripts(p_queues, 1) AS place ORDER BY place);
    END IF;
    FOR pass IN 1 .. 2 LOOP
        FOR position IN 1 .. cardinality(p_queues) LOOP
            EXIT WHEN taken >= places;
            cursor := CASE WHEN pass = 1 THEN p_cursors[position] END;
            CONTINUE WHEN pass = 1 AND has_tasks[position] IS NULL AND has_tasks IS NOT NULL AND cursor IS NULL;
            reserved := 0;
            search_us := NULL;
            IF cursor IS NOT NULL AND p_marked_lanes <> '{}' THEN
                marks := (p_marked_lanes, p_lane_priorities, p_lane_moments, p_lane_ids);
            END IF;
            is_marked := p_marked_ids[position] IS NOT NULL;
            CONTINUE WHEN pass = 2 AND NOT (is_marked AND p_looks_everywhere);
            is_marked := is_marked AND pass = 1;
            queue := p_queues[position];
            wanted := least(places - taken, p_queue_limits[position] - taken_here[position]);
            IF wanted > 0 AND p_queue_caps[position] IS NOT NULL THEN
                -- One more task than the claim may take is fetched, to find out whether a due task remains that no
                -- other task may overtake.
                wanted := least(wanted,
                    p_queue_caps[position] - horsies_in_flight(queue, p_counts_claimed, look_at),
                    greatest(idle - taken, 0) + (places > idle)::integer);
            END IF;
            level := 0;
            after_at := '-infinity';
            after_id := '00000000-0000-0000-0000-000000000000';
            IF is_marked THEN
                level := p_marked_priorities[position];
                after_at := p_marked_moments[position];
                after_id := p_marked_ids[position];
            END IF;
            WHILE wanted > 0 LOOP
                is_keyed := cursor IS NOT NULL;
                has_run := is_keyed OR places > idle;
                IF is_keyed THEN
                    search_began_at := CASE WHEN marks IS NULL THEN clock_timestamp() END;
                    keyed := horsies_due_by_lane(
                        queue, cursor,
                        CASE WHEN taken < idle THEN least(wanted, idle - taken) ELSE wanted END - reserved, look_at,
                        taken >= idle, p_short_names, p_is_async, p_unknown_names, p_refused_ids, p_refused_by, marks);
                    search_us := greatest(
                        search_us, extract(microseconds FROM clock_timestamp() - search_began_at)::integer);
                    run_ids := keyed.ids;
                    unlimited := CASE WHEN keyed.has_limits THEN unlimited ELSE unlimited || queue END;
                    -- Search again only if tasks were found; otherwise blocked lanes would keep the loop running
                    -- forever.
                    IF taken < idle AND places > idle AND p_queue_caps[position] IS NULL AND run_ids <> '{}'
                        AND NOT (keyed.is_drained OR keyed.has_plain) THEN
                        cursor := keyed.cursor;
                    ELSIF marks IS NOT NULL AND keyed.is_drained AND p_looks_everywhere THEN
                        -- Search the lanes again, from their fronts; a task without a key keeps its place.
                        marks := NULL;
                        searched := searched || queue;
                        reserved := keyed.has_plain::integer;
                        cursor := keyed.cursor;
                    ELSE
                        IF NOT keyed.is_drained THEN
                            places := idle;
                            wanted := least(wanted, greatest(idle - taken, cardinality(run_ids)));
                        END IF;
                        cursor := NULL;
                        id := '';
                        queue_name := queue;
                        details := concat(keyed.is_drained, ' ', keyed.wait_seconds);
                        burst := false;
                        lane := keyed.cursor;
                        generation := search_us;
                        RETURN NEXT;
                    END IF;
                    CONTINUE WHEN run_ids = '{}';
                    taken_keyed := taken_keyed || run_ids;
                ELSIF NOT is_marked THEN
                    SELECT task.priority, task.enqueued_at INTO level, first_at FROM horsies_tasks AS task
                    WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue
                      AND task.priority > level
                    ORDER BY task.priority, task.enqueued_at LIMIT 1;
                    EXIT WHEN NOT FOUND;
                    CONTINUE WHEN first_at > look_at;
                END IF;
                IF has_run AND NOT is_keyed THEN
                    run := horsies_leading_run(
                        queue, level, after_at, after_id, look_at, wanted, idle - taken,
                        p_queue_caps[position] IS NOT NULL, p_short_names, p_is_async, leaves_out,
                        p_unknown_names, p_refused_ids, p_refused_by);
                    run_ids := run.ids;
                    IF NOT run.is_open THEN
                        places := idle;
                        wanted := least(wanted, greatest(idle - taken, cardinality(run_ids)));
                    END IF;
                    EXIT WHEN is_marked AND run_ids = '{}';
                    CONTINUE WHEN run_ids = '{}';
                END IF;
                RETURN QUERY
                WITH due AS MATERIALIZED (
                    SELECT CASE WHEN has_run THEN run_ids
                    WHEN p_is_async IS NOT NULL THEN horsies_due_of_kind(
                        p_is_async, queue, level, look_at, after_at, after_id, wanted, p_unknown_names,
                        p_refused_ids, p_refused_by)
                    ELSE ARRAY(
                        SELECT task.id FROM horsies_tasks AS task
                        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue
                          AND task.priority = level AND task.enqueued_at <= look_at
                          AND (task.enqueued_at, task.id) > (after_at, after_id)
                          AND (task.good_until IS NULL OR task.good_until > look_at)
                          AND CASE WHEN leaves_out THEN task.task_name <> ALL(p_unknown_names)
                                  AND task.id <> ALL(p_refused_ids) AND (p_refused_by = '{}'
                                      OR NOT horsies_is_refused(task.id, p_refused_by, look_at)) ELSE true END
                          AND NOT EXISTS (
                              SELECT FROM horsies_queues AS stored
                              WHERE stored.queue_name = queue AND stored.paused_at IS NOT NULL)
                        ORDER BY task.enqueued_at, task.id LIMIT wanted FOR UPDATE SKIP LOCKED) END AS ids),
                begun AS (
                    UPDATE horsies_tasks AS task SET
                        (status, claimed, claim_expires_at, started_at, worker_pid, worker_process_name) = (
                            SELECT CASE WHEN child.pid IS NULL THEN 'CLAIMED' ELSE 'RUNNING' END,
                                child.pid IS NULL,
                                CASE WHEN child.pid IS NULL
                                    THEN clock_timestamp() + p_lease_ms * interval '1 millisecond' END,
                                CASE WHEN child.pid IS NOT NULL THEN clock_timestamp() END,
                                child.pid, 'worker-' || child.pid
                            FROM (SELECT p_pids[taken + array_position(due.ids, task.id)] OFFSET 0)
                                AS child (pid)),
                        generation = task.generation + 1, claimed_by_worker_id = p_worker_id,
                        claimed_at = clock_timestamp(), worker_hostname = p_hostname,
                        updated_at = clock_timestamp()
                    FROM due WHERE task.id = ANY((SELECT due.ids FROM due)::uuid[])
                    RETURNING task.id, task.generation, task.task_name, task.queue_name, task.args, task.kwargs,
                        task.retry_count, task.max_retries, task.task_options, task.timeout_ms, task.worker_pid,
                        task.workflow_id, task.workflow_node_index, task.workflow_item_index, task.workflow_inputs,
                        task.priority, task.enqueued_at, task.sent_at, task.good_until, task.scheduled_for,
                        task.schedule_name, task.burst, task.lane)
                SELECT begun.id::text, begun.generation, begun.task_name::text, begun.queue_name::text,
                    begun.args, begun.kwargs, begun.retry_count, begun.max_retries, begun.task_options,
                    begun.timeout_ms, begun.worker_pid, begun.workflow_id::text, begun.workflow_node_index,
                    begun.workflow_item_index, begun.workflow_inputs, begun.priority, begun.enqueued_at,
                    CASE WHEN begun.good_until IS NULL AND begun.workflow_id IS NULL AND begun.schedule_name IS NULL
                        THEN concat(begun.sent_at, E'\n', begun.enqueued_at, E'\n\n\n\n\n\n')
                        ELSE horsies_details_v1(
                            begun.sent_at, begun.enqueued_at, begun.good_until, begun.scheduled_for,
                            begun.workflow_item_index, begun.workflow_id, begun.workflow_node_index,
                            begun.schedule_name) END,
                    begun.burst, begun.lane
                FROM begun ORDER BY begun.enqueued_at, begun.id;
                GET DIAGNOSTICS changed = ROW_COUNT;
                taken := taken + changed;
                taken_here[position] := taken_here[position] + changed;
                wanted := wanted - changed;
                EXIT WHEN is_marked AND NOT is_keyed;
            END LOOP;
        END LOOP;
    END LOOP;
    IF p_rate_seconds <> '{}' THEN
        PERFORM horsies_note_starts(p_queues, taken_here, p_rate_seconds, p_rate_bursts);
    END IF;
    IF p_freed_lanes <> '{}' AND NOT p_freed_queues <@ unlimited THEN
        PERFORM horsies_offer_lanes(p_freed_queues, p_freed_lanes, taken_keyed, p_marked_lanes, searched);
    END IF;
    IF p_freed <> '{}' THEN
        PERFORM pg_notify('task_queue_' || p_queues[position], '')
        FROM generate_subscripts(p_queues, 1) AS position
        WHERE p_freed[position] > taken_here[position]
          AND (p_queue_caps[position] IS NOT NULL OR p_cluster_cap IS NOT NULL);
    END IF;
END
$$;

-- Return the seconds until the next task on these queues becomes due or expires (NULL if there is none), and the time
-- of this query. A task that became due since the previous query counts as due now, because it may have become due just
-- after a claim that did not find it. "overdue" means that a deadline of a task or run, or the lease of a claim, has
-- passed. The statements that end such tasks, runs and claims cost three times as much as this function, so an idle
-- worker runs them only if "overdue" is true. This function needs one index probe per queue and priority in use.
CREATE OR REPLACE FUNCTION horsies_seconds_until_due_v1(
    p_queues text[], p_last_look timestamptz, OUT seconds double precision, OUT looked_at timestamptz,
    OUT overdue boolean)
LANGUAGE plpgsql AS $$
DECLARE
    queue text;
    level integer;
    due_at timestamptz;
    earliest timestamptz;
BEGIN
    looked_at := clock_timestamp();
    SELECT task.good_until INTO earliest FROM horsies_tasks AS task
    WHERE task.status = 'PENDING' AND task.good_until IS NOT NULL ORDER BY task.good_until LIMIT 1;
    SELECT task.claim_expires_at INTO due_at FROM horsies_tasks AS task
    WHERE task.status = 'CLAIMED' ORDER BY task.claim_expires_at LIMIT 1;
    earliest := least(earliest, due_at);
    SELECT deadline.ends_at INTO due_at FROM horsies_deadlines AS deadline
    WHERE deadline.reached_at IS NULL ORDER BY deadline.ends_at LIMIT 1;
    earliest := least(earliest, due_at);
    overdue := coalesce(earliest <= looked_at, false);
    FOREACH queue IN ARRAY p_queues LOOP
        level := 0;
        LOOP
            SELECT task.priority INTO level FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue
              AND task.priority > level
            ORDER BY task.priority LIMIT 1;
            EXIT WHEN NOT FOUND;
            SELECT task.enqueued_at INTO due_at FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue
              AND task.priority = level AND task.enqueued_at > coalesce(p_last_look, '-infinity')
            ORDER BY task.enqueued_at LIMIT 1;
            earliest := least(earliest, due_at);
        END LOOP;
    END LOOP;
    IF earliest IS NOT NULL THEN  -- greatest() would turn NULL into 0
        seconds := greatest(extract(epoch FROM earliest - clock_timestamp()), 0);
    END IF;
END
$$;
