-- Keys: workers take the tasks of a queue from each key in turn, and each key can have its own limits.
--
-- A lane is one key in one queue. Tasks with a key are held, so that the claim of plain tasks never finds them. A queue
-- without keys uses nothing from this file. Lanes are numbers, so they form a ring. A claim starts at the place where
-- the worker's previous claim stopped ("cursor"), takes one task from each lane in turn, and goes around again while
-- children are free. One index probe finds the next lane, so a million tasks of one key do not delay the next key. Lane
-- 0 stands for all tasks of the queue without a key.
--
-- Claimed tasks leave dead index entries at the front of their lane, and an open transaction keeps vacuum from removing
-- them. So for each lane from which a worker has taken many tasks, it sends its last position in that lane ("p_marks",
-- see 20_claim.sql), and the claim starts behind that position. A fifo lane is always searched from its front, because
-- no task may overtake the first.
--
-- The number of tasks in flight is counted for each claim and never stored: a claim counts the tasks in flight of a
-- lane with limits under an advisory lock of that lane, in the same transaction that starts more of them. No turn waits
-- for such a lock: a turn that cannot get the lock skips the lane and tries again soon. Order of locks: caps, meters of
-- queues, then lanes (tried only), then tasks (SKIP LOCKED) and the meters of lanes, which only the holder of the
-- lane's lock changes.

-- Return the number of a key in a queue. It is never 0, which stands for the tasks without a key, and never the
-- smallest bigint, at which the ring starts.
CREATE OR REPLACE FUNCTION horsies_lane_v1(p_queue text, p_key text) RETURNS bigint LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    number bigint := ('x' || encode(substr(sha256(convert_to(p_queue || U&'\001F' || p_key, 'UTF8')), 1, 8), 'hex')
        )::bit(64)::bigint;
BEGIN
    RETURN CASE WHEN number IN (0, -9223372036854775808) THEN 1 ELSE number END;
END
$$;

-- Return the first lane with due "async def" tasks in a part of the ring, and the first of these tasks. The function
-- reads the index on "async def" tasks, because a lane can have any number of other tasks before them. In the lane
-- "p_marked", only tasks behind the mark count, and the search ends there. Only horsies_walk_lanes calls this function.
CREATE OR REPLACE FUNCTION horsies_next_async_lane(
    p_queue text, p_after bigint, p_until bigint, p_marked bigint, p_priority integer, p_moment timestamptz, p_id uuid,
    OUT next_lane bigint, OUT head uuid)
LANGUAGE plpgsql AS $$
BEGIN
    IF p_marked <= p_until THEN
        SELECT found.lane, found.id INTO next_lane, head FROM (
            (SELECT task.lane, task.id FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
               AND task.task_options LIKE '{"async":true%'
               AND task.queue_name = p_queue AND task.lane > p_after AND task.lane < p_marked
             ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT 1)
            UNION ALL
            (SELECT task.lane, task.id FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
               AND task.task_options LIKE '{"async":true%'
               AND task.queue_name = p_queue AND task.lane = p_marked
               AND (task.priority, task.enqueued_at, task.id) > (p_priority, p_moment, p_id)
             ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1)) AS found LIMIT 1;
    ELSE
        SELECT task.lane, task.id INTO next_lane, head FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.task_options LIKE '{"async":true%'
          AND task.queue_name = p_queue AND task.lane > p_after AND task.lane <= p_until
        ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT 1;
    END IF;
END
$$;

-- Return the next lanes with due tasks behind a place of the ring, in order, and the first task of each; marked lanes
-- are searched behind their marks. The walk ends at "p_begin", the place where the claim's walk started. Lane 0 is
-- always included when the walk passes it, without a task. It counts towards "p_count" only if "p_plain_at" is given
-- and a task without a key is due ("has_plain"). "is_past" is true once the walk has passed the end of the ring and
-- continued from its beginning, and "is_over" once it has passed all lanes. With "p_is_async", only lanes with "async
-- def" tasks are found, and the first of those tasks. A single query finds either a lane before the next mark or the
-- marked lane itself. This takes 0.016 ms for a lane without a mark; two queries, in a function called per lane, took
-- 0.045 ms.
CREATE OR REPLACE FUNCTION horsies_walk_lanes(
    p_queue text, p_begin bigint, p_after bigint, p_count integer, p_is_past boolean DEFAULT false,
    p_marks horsies_lane_marks DEFAULT NULL, p_is_async boolean DEFAULT NULL, p_plain_at timestamptz DEFAULT NULL,
    OUT lanes bigint[], OUT heads uuid[], OUT is_past boolean, OUT has_plain boolean, OUT is_over boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    before bigint := p_after;
    until bigint := CASE WHEN p_is_past THEN p_begin ELSE 9223372036854775807 END;
    -- The marks, and the index of the first mark behind "before".
    marked bigint[] := p_marks.lanes;
    priorities integer[] := p_marks.priorities;
    moments timestamptz[] := p_marks.moments;
    ids uuid[] := p_marks.ids;
    mark integer := 1;
    -- The marked lane, if it has no task behind its mark.
    empty bigint;
    next_lane bigint;
    head uuid;
    count integer := 0;
BEGIN
    lanes := '{}';
    heads := '{}';
    is_past := p_is_past;
    WHILE count < p_count LOOP
        WHILE marked[mark] <= before LOOP
            mark := mark + 1;
        END LOOP;
        IF p_is_async THEN
            SELECT found.next_lane, found.head INTO next_lane, head FROM horsies_next_async_lane(
                p_queue, before, until, marked[mark], priorities[mark], moments[mark], ids[mark]) AS found;
        ELSIF marked[mark] <= until THEN
            SELECT found.lane, found.id INTO next_lane, head FROM (
                (SELECT task.lane, task.id FROM horsies_tasks AS task
                 WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
                   AND task.queue_name = p_queue AND task.lane > before AND task.lane < marked[mark]
                 ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT 1)
                UNION ALL
                (SELECT task.lane, task.id FROM horsies_tasks AS task
                 WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
                   AND task.queue_name = p_queue AND task.lane = marked[mark]
                   AND (task.priority, task.enqueued_at, task.id) > (priorities[mark], moments[mark], ids[mark])
                 ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1)) AS found LIMIT 1;
        ELSE
            SELECT task.lane, task.id INTO next_lane, head FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = p_queue AND task.lane > before AND task.lane <= until
            ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT 1;
        END IF;
        empty := CASE WHEN next_lane IS NULL AND marked[mark] <= until THEN marked[mark] END;
        IF before < 0 AND until >= 0 AND coalesce(next_lane, empty, 1) > 0 THEN
            lanes := lanes || 0::bigint;
            heads := heads || NULL::uuid;
            before := 0;
            IF p_plain_at IS NOT NULL THEN
                has_plain := horsies_has_plain_due(p_queue, p_plain_at);
                count := count + has_plain::integer;
                CONTINUE;
            END IF;
        END IF;
        IF next_lane IS NOT NULL THEN
            lanes := lanes || next_lane;
            heads := heads || head;
            before := next_lane;
            count := count + 1;
        ELSIF empty IS NOT NULL THEN
            before := empty;
        ELSIF is_past THEN
            EXIT;
        ELSE
            is_past := true;
            before := -9223372036854775808;
            until := p_begin;
            mark := 1;
        END IF;
    END LOOP;
    is_over := count < p_count;
END
$$;

-- Return whether a queue has open tasks with keys.
CREATE OR REPLACE FUNCTION horsies_has_keys(p_queue text) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    RETURN coalesce(
        (SELECT true FROM horsies_tasks AS task
         WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
           AND task.queue_name = p_queue ORDER BY task.lane LIMIT 1),
        (SELECT true FROM horsies_tasks AS task
         WHERE task.lane IS NOT NULL AND task.status IN ('CLAIMED', 'RUNNING') AND task.queue_name = p_queue
         ORDER BY task.lane LIMIT 1),
        (SELECT true FROM horsies_tasks AS task
         WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
           AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at AND task.queue_name = p_queue
         ORDER BY greatest(task.enqueued_at, task.next_retry_at) LIMIT 1), false);
END
$$;

CREATE OR REPLACE FUNCTION horsies_keyed_queues(p_queues text[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(SELECT queue.name FROM unnest(p_queues) AS queue (name) WHERE horsies_has_keys(queue.name));
END
$$;

-- Count the due and the delayed tasks with keys in each of these queues, or in all queues, up to "p_most" of each kind,
-- and return the due time of the oldest due task. One index probe per queue finds the queues. A delayed task counts as
-- due once its time has come, even if no worker has moved it to its lane yet. The first task of a fifo lane keeps its
-- place while it waits for its retry.
CREATE OR REPLACE FUNCTION horsies_count_keyed_v1(p_queues text[], p_most integer)
RETURNS TABLE (queue_name text, due bigint, delayed bigint, first_due_at timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    name text := '';
    now_at timestamptz := clock_timestamp();
BEGIN
    LOOP
        SELECT least(
            (SELECT task.queue_name FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
               AND task.queue_name > name ORDER BY task.queue_name LIMIT 1),
            (SELECT task.queue_name FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
               AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at
               AND task.queue_name > name ORDER BY task.queue_name LIMIT 1)) INTO name;
        EXIT WHEN name IS NULL;
        queue_name := name;
        CONTINUE WHEN name <> ALL(p_queues);
        SELECT count(*), min(found.enqueued_at) INTO due, first_due_at FROM (
            (SELECT task.enqueued_at FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
               AND task.queue_name = name AND (task.next_retry_at <= now_at) IS NOT FALSE
             ORDER BY task.lane LIMIT p_most)
            UNION ALL
            (SELECT task.enqueued_at FROM horsies_tasks AS task
             WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
               AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at
               AND task.queue_name = name AND greatest(task.enqueued_at, task.next_retry_at) <= now_at
               AND task.enqueued_at > task.updated_at
             ORDER BY greatest(task.enqueued_at, task.next_retry_at) LIMIT p_most)
            LIMIT p_most) AS found;
        SELECT count(*) INTO delayed FROM (
            SELECT FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
              AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at
              AND task.queue_name = name AND greatest(task.enqueued_at, task.next_retry_at) > now_at
            ORDER BY greatest(task.enqueued_at, task.next_retry_at) LIMIT p_most) AS found;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Return waiting tasks with keys, for commands and pages that list them.
CREATE OR REPLACE FUNCTION horsies_keyed_tasks_v1(p_queues text[]) RETURNS TABLE (
    id uuid, task_name text, error_code text, claimed_by_worker_id text, worker_hostname text, retry_count integer)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    keyed record;
BEGIN
    FOR keyed IN SELECT counted.queue_name FROM horsies_count_keyed_v1(p_queues, 1) AS counted LOOP
        RETURN QUERY
        SELECT task.id, task.task_name::text, task.error_code, task.claimed_by_worker_id::text,
            task.worker_hostname::text, task.retry_count
        FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.queue_name = keyed.queue_name
        ORDER BY task.lane;
        RETURN QUERY
        SELECT task.id, task.task_name::text, task.error_code, task.claimed_by_worker_id::text,
            task.worker_hostname::text, task.retry_count
        FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
          AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at
          AND task.queue_name = keyed.queue_name AND task.enqueued_at > task.updated_at
        ORDER BY greatest(task.enqueued_at, task.next_retry_at);
    END LOOP;
END
$$;

-- Return whether a queue has a due task without a key, by one index probe per priority in use.
CREATE OR REPLACE FUNCTION horsies_has_plain_due(p_queue text, p_look_at timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    level integer := 0;
    first_at timestamptz;
BEGIN
    LOOP
        SELECT task.priority, task.enqueued_at INTO level, first_at FROM horsies_tasks AS task
        WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = p_queue AND task.priority > level
        ORDER BY task.priority, task.enqueued_at LIMIT 1;
        IF NOT FOUND OR first_at <= p_look_at THEN
            RETURN FOUND;
        END IF;
    END LOOP;
END
$$;

-- horsies_lane_heads for "async def" tasks only, by their own index. These tasks never wait in a child behind others.
CREATE OR REPLACE FUNCTION horsies_async_lane_heads(
    p_queue text, p_lanes bigint[], p_quotas integer[], p_taken uuid[], p_look_at timestamptz,
    p_unknown_names text[], p_refused_ids uuid[], p_refused_by text[], p_marks horsies_lane_marks,
    OUT ids uuid[], OUT counts integer[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    head record;
BEGIN
    ids := '{}';
    counts := array_fill(0, ARRAY[cardinality(p_lanes)]);
    FOR head IN
        SELECT found.id, asked.place FROM unnest(p_lanes, p_quotas) WITH ORDINALITY AS asked (lane, quota, place)
        CROSS JOIN LATERAL (
            SELECT coalesce(p_marks.priorities[mark.place], -1) AS priority,
                coalesce(p_marks.moments[mark.place], '-infinity') AS moment,
                coalesce(p_marks.ids[mark.place], '00000000-0000-0000-0000-000000000000') AS id
            FROM (SELECT array_position(p_marks.lanes, asked.lane) OFFSET 0) AS mark (place) OFFSET 0) AS mark
        CROSS JOIN LATERAL (
            SELECT task.id, task.priority, task.enqueued_at FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.task_options LIKE '{"async":true%'
              AND task.queue_name = p_queue AND task.lane = asked.lane
              AND (task.priority, task.enqueued_at, task.id) > (mark.priority, mark.moment, mark.id)
              AND (task.good_until IS NULL OR task.good_until > p_look_at)
              AND task.task_name <> ALL(p_unknown_names) AND task.id <> ALL(p_refused_ids)
              AND task.id <> ALL(p_taken) AND (task.next_retry_at <= task.updated_at) IS NOT FALSE
              AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at))
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT asked.quota FOR UPDATE SKIP LOCKED) AS found
        WHERE asked.lane <> 0
        ORDER BY row_number() OVER (
            PARTITION BY asked.place ORDER BY found.priority, found.enqueued_at, found.id), asked.place
    LOOP
        ids := ids || head.id;
        counts[head.place] := counts[head.place] + 1;
    END LOOP;
END
$$;

-- Lock and return the first due tasks of these lanes, up to the given number per lane, in order: the first task of each
-- lane, then the second of each, and so on. For lane 0 it returns nothing. A retry that kept its place because its lane
-- was fifo is skipped until it is due and a worker has moved it (horsies_look_at_keys_v1). "p_only_short" restricts the
-- search to tasks that may wait in a child behind others. A task that was locked but not taken is not offered again in
-- this claim.
CREATE OR REPLACE FUNCTION horsies_lane_heads(
    p_queue text, p_lanes bigint[], p_quotas integer[], p_taken uuid[], p_look_at timestamptz, p_only_short boolean,
    p_short_names text[], p_is_async boolean, p_unknown_names text[], p_refused_ids uuid[], p_refused_by text[],
    p_marks horsies_lane_marks, OUT ids uuid[], OUT counts integer[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    head record;
    is_left boolean := false;
BEGIN
    IF p_is_async THEN
        SELECT heads.* INTO ids, counts FROM horsies_async_lane_heads(
            p_queue, p_lanes, p_quotas, p_taken, p_look_at, p_unknown_names, p_refused_ids, p_refused_by, p_marks)
            AS heads;
        RETURN;
    END IF;
    ids := '{}';
    counts := array_fill(0, ARRAY[cardinality(p_lanes)]);
    FOR head IN
        SELECT found.id, asked.place, found.is_short FROM unnest(p_lanes, p_quotas) WITH ORDINALITY
            AS asked (lane, quota, place)
        CROSS JOIN LATERAL (
            SELECT coalesce(p_marks.priorities[mark.place], -1) AS priority,
                coalesce(p_marks.moments[mark.place], '-infinity') AS moment,
                coalesce(p_marks.ids[mark.place], '00000000-0000-0000-0000-000000000000') AS id
            FROM (SELECT array_position(p_marks.lanes, asked.lane) OFFSET 0) AS mark (place) OFFSET 0) AS mark
        CROSS JOIN LATERAL (
            SELECT task.id, task.priority, task.enqueued_at, task.burst AND task.task_name = ANY(p_short_names) AS is_short
            FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = p_queue AND task.lane = asked.lane
              AND (task.priority, task.enqueued_at, task.id) > (mark.priority, mark.moment, mark.id)
              AND (task.good_until IS NULL OR task.good_until > p_look_at)
              AND (p_is_async IS NULL OR coalesce(task.task_options LIKE '{"async":true%', false) = p_is_async)
              AND task.task_name <> ALL(p_unknown_names) AND task.id <> ALL(p_refused_ids)
              AND task.id <> ALL(p_taken) AND (task.next_retry_at <= task.updated_at) IS NOT FALSE
              AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at))
            ORDER BY task.priority, task.enqueued_at, task.id LIMIT asked.quota FOR UPDATE SKIP LOCKED) AS found
        WHERE asked.lane <> 0
        ORDER BY row_number() OVER (
            PARTITION BY asked.place ORDER BY found.priority, found.enqueued_at, found.id), asked.place
    LOOP
        IF p_only_short AND NOT head.is_short THEN
            is_left := true;
            CONTINUE;
        END IF;
        ids := ids || head.id;
        counts[head.place] := counts[head.place] + 1;
    END LOOP;
    IF is_left THEN
        -- Other claims skip the locked rows until this commit, so the commit notifies their workers.
        PERFORM pg_notify('task_queue_' || p_queue, '@');
    END IF;
END
$$;

-- Count the tasks of a lane that are in flight. Other caps ignore a task whose lease has lapsed; here the task counts
-- until it is released. Its worker may start it in a transaction that began earlier, and a claim that cannot see that
-- start would exceed the cap. As under every cap, a task whose code has ended but whose outcome the database refuses
-- does not count. In a fifo lane such a task does count, because the second task may not pass the first.
CREATE OR REPLACE FUNCTION horsies_lane_in_flight(p_queue text, p_lane bigint, p_is_fifo boolean) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    RETURN (
        SELECT count(*) FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status IN ('CLAIMED', 'RUNNING') AND task.queue_name = p_queue
          AND task.lane = p_lane
          AND (p_is_fifo OR NOT EXISTS (SELECT FROM horsies_blocked) OR NOT EXISTS (
              SELECT FROM horsies_blocked AS blocked
              WHERE blocked.id = task.id AND blocked.kind = 'task' AND blocked.generation = task.generation
                AND blocked.status = task.status AND blocked.action IN ('record', 'recover'))));
END
$$;

-- Return the limits of a lane: the key's own limits, otherwise the rate of the task that shares this key, otherwise the
-- limits of the queue.
CREATE OR REPLACE FUNCTION horsies_lane_limits(p_queue text, p_lane bigint, p_shared horsies_lanes)
RETURNS horsies_lanes LANGUAGE plpgsql AS $$
DECLARE
    own horsies_lanes;
BEGIN
    IF p_lane = 0 THEN
        own := p_shared;
    ELSE
        SELECT * INTO own FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = p_lane;
    END IF;
    own.is_fifo := coalesce(own.is_fifo, p_shared.is_fifo, false);
    own.max_concurrency := coalesce(own.max_concurrency, p_shared.max_concurrency);
    IF own.is_fifo THEN
        own.max_concurrency := least(own.max_concurrency, 1);
    END IF;
    own.halts := coalesce(own.halts, p_shared.halts, false);
    own.weight := coalesce(own.weight, p_shared.weight, 1);
    IF own.rate_seconds IS NULL AND own.task_rate_seconds IS NOT NULL THEN
        own.rate_seconds := own.task_rate_seconds;
        own.rate_burst := own.task_rate_burst;
    ELSIF own.rate_seconds IS NULL THEN
        own.rate_seconds := p_shared.rate_seconds;
        own.rate_burst := p_shared.rate_burst;
    END IF;
    RETURN own;
END
$$;

-- Return how many tasks of a lane may start now. The tasks of a lane with a cap or a rate are counted under the lane's
-- lock. A first count without the lock saves claims from locking a full lane; a claim that has just found no task of
-- the lane in flight ("p_is_idle") skips this count. "wait_seconds" is the time until the rate allows the next start,
-- or a short random wait if another claim holds the lane's lock. It is NULL for a full lane, because the turn that ends
-- one of its tasks claims the next task itself or notifies other workers.
CREATE OR REPLACE FUNCTION horsies_lane_room(
    p_queue text, p_lane bigint, p_limits horsies_lanes, p_is_idle boolean DEFAULT NULL, OUT room integer,
    OUT wait_seconds double precision)
LANGUAGE plpgsql AS $$
DECLARE
    cap integer := p_limits.max_concurrency;
    seconds double precision := p_limits.rate_seconds;
    meter horsies_meters;
    ahead_seconds double precision;
BEGIN
    room := 2147483647;
    IF p_limits.paused_at IS NOT NULL THEN
        room := 0;
    ELSIF cap IS NULL AND seconds IS NULL THEN
        RETURN;
    ELSIF (CASE WHEN cap IS NOT NULL AND (cap <= 0 OR p_is_idle IS NOT TRUE)
        THEN horsies_lane_in_flight(p_queue, p_lane, p_limits.is_fifo) >= cap END) THEN
        room := 0;
    ELSIF NOT pg_try_advisory_xact_lock(1751348597, hashint8(p_lane)) THEN
        room := 0;
        wait_seconds := 0.002 + 0.004 * random();
    ELSE
        IF cap IS NOT NULL THEN
            room := greatest(0, cap - horsies_lane_in_flight(p_queue, p_lane, p_limits.is_fifo));
        END IF;
        IF seconds IS NOT NULL THEN
            SELECT * INTO meter FROM horsies_meters AS stored WHERE stored.queue_name = p_queue AND stored.lane = p_lane;
            IF meter.seconds <> seconds OR meter.burst <> p_limits.rate_burst THEN
                meter.next_at := horsies_change_rate(meter, seconds, p_limits.rate_burst);
            END IF;
            ahead_seconds := coalesce(greatest(0, extract(epoch FROM meter.next_at - clock_timestamp())), 0);
            room := least(room, greatest(0, floor(p_limits.rate_burst + 1e-6 - ahead_seconds / seconds)));
            wait_seconds := CASE WHEN room = 0 THEN greatest(0, ahead_seconds - (p_limits.rate_burst - 1) * seconds) END;
        END IF;
        -- A failure may have paused the lane since its limits were read. The pause commits together with the end of the
        -- failed task, so a query after the count sees the pause.
        IF p_limits.is_fifo AND p_limits.halts AND EXISTS (
            SELECT FROM horsies_lanes AS stored
            WHERE stored.queue_name = p_queue AND stored.lane = p_lane AND stored.paused_at IS NOT NULL) THEN
            room := 0;
            wait_seconds := NULL;
        END IF;
    END IF;
END
$$;

-- Record that "p_count" tasks of a lane with a rate were claimed, under the lane's lock. Returns the seconds until the
-- rate allows the next start; NULL if the rate allows a start now, or if the lane has no due task besides those in
-- "p_taken".
CREATE OR REPLACE FUNCTION horsies_note_lane_starts(
    p_queue text, p_lane bigint, p_limits horsies_lanes, p_count integer, p_taken uuid[], p_marks horsies_lane_marks)
RETURNS double precision LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    wait_seconds double precision;
    mark integer := array_position(p_marks.lanes, p_lane);
BEGIN
    INSERT INTO horsies_meters AS meter (queue_name, lane, next_at, seconds, burst)
    VALUES (p_queue, p_lane, clock_timestamp() + p_count * p_limits.rate_seconds * interval '1 second',
        p_limits.rate_seconds, p_limits.rate_burst)
    ON CONFLICT (queue_name, lane) DO UPDATE SET
        next_at = greatest(meter.next_at, clock_timestamp()) + p_count * p_limits.rate_seconds * interval '1 second',
        seconds = EXCLUDED.seconds, burst = EXCLUDED.burst
    RETURNING extract(epoch FROM meter.next_at - clock_timestamp()) - (meter.burst - 1) * meter.seconds INTO wait_seconds;
    IF wait_seconds > 0 AND (
        SELECT true FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.queue_name = p_queue AND task.lane = p_lane AND task.id <> ALL(p_taken)
          AND (task.priority, task.enqueued_at, task.id) > (
              coalesce(p_marks.priorities[mark], -1), coalesce(p_marks.moments[mark], '-infinity'),
              coalesce(p_marks.ids[mark], '00000000-0000-0000-0000-000000000000'))
        ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1) THEN
        RETURN wait_seconds;
    END IF;
    RETURN NULL;
END
$$;

-- Lock and return the first task of a fifo lane, if it may start now. The task is chosen before it is locked, so that
-- the second task cannot pass a first task that another transaction has locked. A first task that waits for its retry,
-- or that this worker excludes, blocks the lane.
CREATE OR REPLACE FUNCTION horsies_fifo_head(
    p_queue text, p_lane bigint, p_look_at timestamptz, p_is_async boolean, p_unknown_names text[],
    p_refused_ids uuid[], p_refused_by text[], OUT ids uuid[], OUT wait_seconds double precision)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    head record;
BEGIN
    ids := '{}';
    SELECT task.id, task.next_retry_at, task.task_name, task.task_options, task.good_until INTO head
    FROM horsies_tasks AS task
    WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
      AND task.queue_name = p_queue AND task.lane = p_lane
    ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1;
    IF NOT FOUND OR head.next_retry_at > clock_timestamp() OR head.good_until <= p_look_at
        OR coalesce(head.task_options LIKE '{"async":true%', false) <> p_is_async
        OR head.task_name = ANY(p_unknown_names) OR head.id = ANY(p_refused_ids)
        OR (p_refused_by <> '{}' AND horsies_is_refused(head.id, p_refused_by, p_look_at)) THEN
        RETURN;
    END IF;
    ids := ARRAY(
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.id = head.id AND coalesce(task.status, '') = 'PENDING' AND task.lane = p_lane FOR UPDATE SKIP LOCKED);
    wait_seconds := CASE WHEN ids = '{}' THEN 0.01 END;
END
$$;

-- Return how many tasks a lane gets in one turn: a random number whose average is the lane's weight, so that claims
-- need no shared state. A turn that is cut short for lack of places continues in the next claim as a new turn.
CREATE OR REPLACE FUNCTION horsies_turns(p_weight double precision) RETURNS integer LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN p_weight > 1 THEN greatest(1, ceil(ln(1 - random()) / ln(1 - 1 / p_weight)))::integer
        ELSE (random() < p_weight)::integer END
$$;

-- Distribute places among lanes by their weights, up to the number of tasks that each lane may start. The shares are
-- exact on average, because the distribution starts at a random point.
CREATE OR REPLACE FUNCTION horsies_shares_by_weight(p_places integer, p_weights double precision[], p_rooms integer[])
RETURNS integer[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    start double precision := random();
BEGIN
    RETURN ARRAY(
        SELECT least(dealt.upto - lag(dealt.upto, 1, 0) OVER (ORDER BY dealt.place), p_rooms[dealt.place]) FROM (
            SELECT given.place, least(p_places, floor(start + p_places * sum(given.weight) OVER (ORDER BY given.place)
                / sum(given.weight) OVER ())::integer) AS upto
            FROM unnest(p_weights) WITH ORDINALITY AS given (weight, place)) AS dealt ORDER BY dealt.place);
END
$$;

-- Lock and return the tasks in "p_heads" that this claim may still take. They were chosen without a lock, so another
-- claim may have taken some of them.
CREATE OR REPLACE FUNCTION horsies_lock_heads(
    p_queue text, p_heads uuid[], p_look_at timestamptz, p_only_short boolean, p_short_names text[],
    p_is_async boolean, p_unknown_names text[], p_refused_ids uuid[], p_refused_by text[]) RETURNS uuid[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.id = ANY(p_heads) AND coalesce(task.status, '') = 'PENDING' AND task.queue_name = p_queue
          AND task.lane IS NOT NULL AND task.enqueued_at <= task.updated_at
          AND (task.next_retry_at <= task.updated_at) IS NOT FALSE
          AND (task.good_until IS NULL OR task.good_until > p_look_at)
          AND (NOT p_only_short OR (task.burst AND task.task_name = ANY(p_short_names)))
          AND (p_is_async IS NULL OR coalesce(task.task_options LIKE '{"async":true%', false) = p_is_async)
          AND task.task_name <> ALL(p_unknown_names) AND task.id <> ALL(p_refused_ids)
          AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at))
        FOR UPDATE SKIP LOCKED);
END
$$;

-- Walk the lanes for a claim that is not the usual one (horsies_due_by_lane), has no marks and is not for async children
-- only, like horsies_walk_lanes, but in one recursive statement, which is cheaper if it finds many lanes. With "p_locks", the same statement locks the
-- first task of each lane, if this claim may take the task ("locked"), and finds out whether lane 0 has a due task.
-- Without "p_locks", the claim checks the limits of a lane before it locks a task; "idle" tells for each lane whether
-- none of its tasks is in flight. Each row of "ring" is one step: a lane, lane 0, or the end of the ring (lane NULL).
-- The tasks are locked by the place of their row, which saves a search by id. If a row has changed since the statement
-- began, its task may be missing in "locked", and the claim searches that lane again.
CREATE OR REPLACE FUNCTION horsies_lock_next_lanes(
    p_queue text, p_begin bigint, p_after bigint, p_count integer, p_is_past boolean, p_locks boolean,
    p_look_at timestamptz, p_only_short boolean, p_short_names text[], p_is_async boolean, p_unknown_names text[],
    p_refused_ids uuid[], p_refused_by text[], OUT lanes bigint[], OUT heads uuid[], OUT is_past boolean,
    OUT has_plain boolean, OUT is_over boolean, OUT idle boolean[], OUT locked uuid[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    WITH RECURSIVE ring (lane, place, head, version, takes, taken, is_past, is_idle) AS (
        SELECT NULL::bigint, p_after, NULL::uuid, NULL::tid, 0, 0, p_is_past, NULL::boolean
        UNION ALL
        SELECT step.lane, coalesce(step.lane, -9223372036854775808),
            CASE WHEN step.lane <> 0 THEN ahead.id END, CASE WHEN step.lane <> 0 THEN ahead.version END,
            CASE WHEN step.lane <> 0 THEN 1
                WHEN step.lane = 0 AND p_locks THEN horsies_has_plain_due(p_queue, p_look_at)::integer
                ELSE 0 END,
            ring.taken + ring.takes, ring.is_past OR step.lane IS NULL,
            CASE WHEN NOT p_locks THEN (
                SELECT true FROM horsies_tasks AS task
                WHERE task.lane IS NOT NULL AND task.status IN ('CLAIMED', 'RUNNING')
                  AND task.queue_name = p_queue AND task.lane = step.lane LIMIT 1) IS NULL END
        FROM ring
        LEFT JOIN LATERAL (
            SELECT task.lane, task.id, task.ctid AS version FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = p_queue AND task.lane > ring.place
              AND task.lane <= CASE WHEN ring.is_past THEN p_begin ELSE 9223372036854775807 END
            ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT 1) AS ahead ON true
        CROSS JOIN LATERAL (
            SELECT CASE WHEN ring.place < 0 AND coalesce(ahead.lane, 1) > 0
                AND NOT (ring.is_past AND p_begin < 0) THEN 0 ELSE ahead.lane END) AS step (lane)
        WHERE ring.taken + ring.takes < p_count AND NOT (ring.is_past AND step.lane IS NULL))
    SELECT coalesce(array_agg(ring.lane) FILTER (WHERE ring.lane IS NOT NULL), '{}'),
        array_agg(ring.head) FILTER (WHERE ring.lane IS NOT NULL),
        bool_or(ring.is_past), bool_or(ring.lane = 0 AND ring.takes = 1), sum(ring.takes) < p_count,
        array_agg(ring.is_idle) FILTER (WHERE ring.lane IS NOT NULL),
        ARRAY(
            SELECT task.id FROM horsies_tasks AS task
            WHERE p_locks AND task.ctid = ANY(ARRAY(SELECT ring.version FROM ring))
              AND coalesce(task.status, '') = 'PENDING' AND task.queue_name = p_queue
              AND task.lane IS NOT NULL AND task.enqueued_at <= task.updated_at
              AND (task.next_retry_at <= task.updated_at) IS NOT FALSE
              AND (task.good_until IS NULL OR task.good_until > p_look_at)
              AND (NOT p_only_short OR (task.burst AND task.task_name = ANY(p_short_names)))
              AND (p_is_async IS NULL OR coalesce(task.task_options LIKE '{"async":true%', false) = p_is_async)
              AND task.task_name <> ALL(p_unknown_names) AND task.id <> ALL(p_refused_ids)
              AND (p_refused_by = '{}' OR NOT horsies_is_refused(task.id, p_refused_by, p_look_at))
            FOR UPDATE SKIP LOCKED)
    INTO lanes, heads, is_past, has_plain, is_over, idle, locked FROM ring;
END
$$;

-- Claim by the lanes of one queue: lock and return up to "p_wanted" due tasks, one from each lane behind the cursor,
-- and more from these lanes if there are fewer lanes than places. Lane 0 has its turn like the other lanes: its places
-- stay free for tasks without a key. "is_drained" means that no lane has more tasks for this worker now. "wait_seconds"
-- is the time after which a lane with limits may have more. "has_limits" means that the queue has limits for its keys.
--
-- The usual claim has no marks and excludes no tasks, and the queue's keys have no limits. For this claim a single
-- recursive statement finds each lane and locks its first task: for four tasks it takes 713,000 instructions, compared
-- with 910,000 for a statement per lane; for ten tasks 1.2 million, compared with 1.6 million if the tasks are locked by
-- a second step. The ring has three parts: from the cursor to lane 0 or to the end of the ring, the half without the
-- cursor, and the rest up to the cursor. No step searches beyond its part, so none locks a task that the claim does not
-- take, and lane 0 has its turn between two parts. If the first task of a lane has expired or waits for its retry, the
-- usual search ends (part 5) and the general search begins; it finds the tasks that are already locked again.
CREATE OR REPLACE FUNCTION horsies_due_by_lane(
    p_queue text, p_cursor bigint, p_wanted integer, p_look_at timestamptz, p_only_short boolean, p_short_names text[],
    p_is_async boolean, p_unknown_names text[], p_refused_ids uuid[], p_refused_by text[], p_marks horsies_lane_marks,
    OUT ids uuid[], OUT cursor bigint, OUT is_drained boolean, OUT has_plain boolean,
    OUT wait_seconds double precision, OUT has_limits boolean)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    places integer := p_wanted;
    -- How many lanes one claim visits; the next claim continues behind them.
    looks integer := 256;
    asked integer;
    walk record;
    is_past boolean := false;
    lanes bigint[];
    missed bigint[];
    heads record;
    taken uuid[];
    visit record;
    limits horsies_lanes;
    shared horsies_lanes;
    is_paused boolean;
    -- Whether any key has its own limits.
    has_own boolean;
    turns integer;
    -- Lanes that had their turn in this claim and may have more tasks, and how many more tasks of each may start.
    generous bigint[];
    rooms integer[];
    weights double precision[];
    quotas integer[];
    -- Whether the lanes in "generous" have different weights.
    is_weighted boolean;
    -- The index in "generous" of the lane that gets the last place of a round.
    last integer;
    rounds integer := 0;
    rated bigint[];
    -- Whether the first part of the ring ends at lane 0, and the part at which the usual search has ended.
    is_low boolean := p_cursor < 0;
    part integer;
    filled integer;
BEGIN
    SELECT EXISTS (
            SELECT FROM horsies_queues AS stored WHERE stored.queue_name = p_queue AND stored.paused_at IS NOT NULL),
        EXISTS (SELECT FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue)
    INTO is_paused, has_limits;
    IF NOT (is_paused OR has_limits) AND p_marks IS NULL AND p_is_async IS NULL AND NOT p_only_short
        AND p_unknown_names = '{}' AND p_refused_ids = '{}' AND p_refused_by = '{}' THEN
        WITH RECURSIVE ring (lane, head, place, part, filled) AS (
            SELECT NULL::bigint, NULL::uuid, p_cursor, 1, 0
            UNION ALL
            SELECT coalesce(ahead.lane, step.lane), ahead.id, coalesce(ahead.lane, step.lane, -9223372036854775808),
                CASE WHEN ahead.is_free THEN ring.part WHEN ahead.lane IS NULL THEN ring.part + 1 ELSE 5 END,
                ring.filled + CASE WHEN ahead.lane IS NOT NULL THEN 1
                    WHEN step.lane = 0 THEN horsies_has_plain_due(p_queue, p_look_at)::integer ELSE 0 END
            FROM ring
            CROSS JOIN LATERAL (
                SELECT CASE WHEN ring.part < 3 AND is_low = (ring.part = 1) THEN 0::bigint END) AS step (lane)
            LEFT JOIN LATERAL (
                SELECT task.lane, task.id, (task.next_retry_at <= task.updated_at) IS NOT FALSE
                    AND (task.good_until IS NULL OR task.good_until > p_look_at) AS is_free
                FROM horsies_tasks AS task
                WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
                  AND task.queue_name = p_queue AND task.lane > ring.place
                  AND task.lane <= CASE WHEN ring.part = 3 THEN p_cursor
                      WHEN is_low = (ring.part = 1) THEN -1 ELSE 9223372036854775807 END
                ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT 1 FOR UPDATE SKIP LOCKED)
                AS ahead ON true
            WHERE ring.filled < p_wanted AND ring.part <= 3)
        SELECT array_agg(ring.lane) FILTER (WHERE ring.lane IS NOT NULL),
            array_agg(ring.head) FILTER (WHERE ring.head IS NOT NULL), max(ring.part), max(ring.filled)
        INTO generous, ids, part, filled FROM ring;
        IF part < 5 THEN
            ids := coalesce(ids, '{}');
            cursor := coalesce(generous[cardinality(generous)], p_cursor);
            places := p_wanted - filled;
            has_plain := filled > cardinality(ids);
            is_drained := places > 0;
            IF NOT is_drained THEN
                RETURN;
            END IF;
            generous := CASE WHEN has_plain THEN generous ELSE array_remove(coalesce(generous, '{}'), 0) END;
            looks := 0;  -- all lanes had their turn
        END IF;
    END IF;
    IF looks > 0 THEN
        ids := '{}';
        generous := '{}';
        rooms := '{}';
        weights := '{}';
        rated := '{}';
        cursor := p_cursor;
        has_plain := false;
        is_drained := true;
    END IF;
    IF is_paused THEN
        RETURN;
    ELSIF has_limits THEN
        has_own := EXISTS (SELECT FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane <> 0);
        SELECT * INTO shared FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = 0;
        limits := horsies_lane_limits(p_queue, 0, shared);
    END IF;
    WHILE looks > 0 LOOP
        is_drained := false;
        asked := least(places, looks);
        EXIT WHEN asked <= 0;
        IF p_marks IS NULL AND p_is_async IS NOT TRUE AND (has_limits OR asked > 8) THEN
            walk := horsies_lock_next_lanes(
                p_queue, p_cursor, cursor, asked, is_past, NOT has_limits, p_look_at, p_only_short, p_short_names,
                p_is_async, p_unknown_names, p_refused_ids, p_refused_by);
        ELSE
            SELECT walked.*, CASE WHEN has_limits THEN '{}' ELSE horsies_lock_heads(
                p_queue, walked.heads, p_look_at, p_only_short, p_short_names, p_is_async, p_unknown_names,
                p_refused_ids, p_refused_by) END AS locked, NULL::boolean[] AS idle
            INTO walk FROM horsies_walk_lanes(
                p_queue, p_cursor, cursor, asked, is_past, p_marks, p_is_async,
                CASE WHEN NOT has_limits THEN p_look_at END) AS walked;
        END IF;
        is_past := walk.is_past;
        lanes := walk.lanes;
        looks := looks - cardinality(lanes);
        is_drained := walk.is_over;
        IF has_limits THEN
            FOR place IN 1 .. cardinality(lanes) LOOP
                EXIT WHEN places <= 0;
                cursor := lanes[place];
                IF cursor = 0 THEN
                    has_plain := horsies_has_plain_due(p_queue, p_look_at);
                    IF has_plain THEN
                        places := places - 1;
                        generous := generous || cursor;
                        rooms := rooms || NULL::integer;
                        weights := weights || 1::double precision;
                    END IF;
                    CONTINUE;
                END IF;
                IF has_own THEN
                    limits := horsies_lane_limits(p_queue, cursor, shared);
                END IF;
                CONTINUE WHEN p_only_short AND (limits.max_concurrency IS NOT NULL OR limits.rate_seconds IS NOT NULL);
                visit := horsies_lane_room(p_queue, cursor, limits, walk.idle[place]);
                wait_seconds := least(wait_seconds, visit.wait_seconds);
                CONTINUE WHEN visit.room <= 0;
                turns := CASE WHEN limits.weight = 1 THEN 1 ELSE horsies_turns(limits.weight) END;
                IF limits.is_fifo THEN
                    heads := horsies_fifo_head(
                        p_queue, cursor, p_look_at, p_is_async, p_unknown_names, p_refused_ids, p_refused_by);
                    wait_seconds := least(wait_seconds, heads.wait_seconds);
                    taken := heads.ids;
                ELSE
                    -- The first task of the lane is usually free; locking it by its id is cheaper than a search.
                    taken := CASE WHEN turns <> 1 THEN '{}' ELSE horsies_lock_heads(
                        p_queue, walk.heads[place : place], p_look_at, p_only_short, p_short_names, p_is_async,
                        p_unknown_names, p_refused_ids, p_refused_by) END;
                    IF taken = '{}' THEN
                        heads := horsies_lane_heads(
                            p_queue, ARRAY[cursor], ARRAY[least(turns, places, visit.room)], ids, p_look_at,
                            p_only_short, p_short_names, p_is_async, p_unknown_names, p_refused_ids, p_refused_by,
                            p_marks);
                        taken := heads.ids;
                    END IF;
                END IF;
                ids := ids || taken;
                places := places - cardinality(taken);
                IF NOT limits.is_fifo AND visit.room > cardinality(taken)
                    AND cardinality(taken) = least(turns, places + cardinality(taken)) THEN
                    generous := generous || cursor;
                    rooms := rooms || visit.room - cardinality(taken);
                    weights := weights || limits.weight;
                END IF;
                IF limits.rate_seconds IS NOT NULL THEN
                    wait_seconds := least(wait_seconds, horsies_note_lane_starts(
                        p_queue, cursor, limits, cardinality(taken), ids, p_marks));
                    rated := rated || cursor;
                END IF;
                IF places <= 0 AND turns > cardinality(taken) THEN
                    cursor := cursor - 1;
                END IF;
            END LOOP;
            EXIT WHEN is_drained;
            CONTINUE;
        END IF;
        EXIT WHEN lanes = '{}';
        cursor := lanes[cardinality(lanes)];
        IF 0 = ANY(lanes) THEN
            has_plain := walk.has_plain;
            places := places - has_plain::integer;
            IF NOT has_plain THEN
                walk.heads := array_remove(walk.heads, NULL);
                lanes := array_remove(lanes, 0);
            END IF;
        END IF;
        ids := ids || walk.locked;
        places := places - cardinality(walk.locked);
        IF cardinality(walk.locked) < cardinality(lanes) - (0 = ANY(lanes))::integer THEN
            missed := ARRAY(
                SELECT lanes[place] FROM generate_subscripts(lanes, 1) AS place
                WHERE lanes[place] <> 0 AND walk.heads[place] <> ALL(walk.locked) ORDER BY place);
            heads := horsies_lane_heads(
                p_queue, missed, array_fill(1, ARRAY[cardinality(missed)]), ids, p_look_at, p_only_short,
                p_short_names, p_is_async, p_unknown_names, p_refused_ids, p_refused_by, p_marks);
            ids := ids || heads.ids;
            places := places - cardinality(heads.ids);
            lanes := ARRAY(
                SELECT lane FROM unnest(lanes) WITH ORDINALITY AS met (lane, place)
                WHERE coalesce(heads.counts[array_position(missed, lane)], 1) > 0 ORDER BY place);
        END IF;
        generous := generous || lanes;
        EXIT WHEN is_drained;
    END LOOP;
    -- Every lane has had its turn, so the lanes share the remaining places within their limits, by weight if they have
    -- weights. If a lane returns fewer tasks than requested, it is empty, and the other lanes share its places,
    -- starting behind the lane that got the last place. A few rounds suffice for one claim. Lane 0 takes part and never
    -- counts as empty.
    is_weighted := has_limits AND array_remove(weights, 1) <> '{}';
    WHILE places > 0 AND is_drained AND array_remove(generous, 0) <> '{}' LOOP
        rounds := rounds + 1;
        is_drained := rounds <= 8;
        EXIT WHEN NOT is_drained;
        last := CASE WHEN is_weighted THEN cardinality(generous) ELSE (places - 1) % cardinality(generous) + 1 END;
        quotas := CASE WHEN is_weighted THEN horsies_shares_by_weight(places, weights, rooms) ELSE ARRAY(
            SELECT least((places - place + cardinality(generous)) / cardinality(generous), rooms[place])
            FROM generate_subscripts(generous, 1) AS place ORDER BY place) END;
        heads := horsies_lane_heads(
            p_queue, generous, quotas, ids, p_look_at, p_only_short, p_short_names, p_is_async, p_unknown_names,
            p_refused_ids, p_refused_by, p_marks);
        ids := ids || heads.ids;
        IF has_plain THEN
            heads.counts[array_position(generous, 0)] := quotas[array_position(generous, 0)];
        END IF;
        FOR place IN 1 .. cardinality(generous) LOOP
            places := places - heads.counts[place];
            IF heads.counts[place] > 0 AND generous[place] = ANY(rated) THEN
                limits := horsies_lane_limits(p_queue, generous[place], shared);
                wait_seconds := least(wait_seconds, horsies_note_lane_starts(
                    p_queue, generous[place], limits, heads.counts[place], ids, p_marks));
            END IF;
        END LOOP;
        IF NOT is_weighted THEN
            cursor := generous[last];
        END IF;
        SELECT coalesce(array_agg(generous[place] ORDER BY place <= last, place), '{}'),
            coalesce(array_agg(rooms[place] - heads.counts[place] ORDER BY place <= last, place), '{}'),
            coalesce(array_agg(weights[place] ORDER BY place <= last, place), '{}')
        INTO generous, rooms, weights FROM generate_subscripts(generous, 1) AS place
        WHERE heads.counts[place] = quotas[place]
          AND rooms[place] - heads.counts[place] IS DISTINCT FROM 0;
    END LOOP;
    is_drained := is_drained AND places > 0;
END
$$;

-- Notify workers that a cap or the order of one of these lanes may have turned away, because this transaction has ended
-- tasks of the lanes and each ended task frees one place. A lane needs no notification if the claim in the same
-- transaction has taken all its free places ("p_taken"), or if no task waits in it. For the lanes in "p_marked",
-- workers are notified without a search for a waiting task, because it would read the dead entries that the mark skips.
-- The queues in "p_searched" are an exception, because the claim has already searched in front of their marks.
CREATE OR REPLACE FUNCTION horsies_offer_lanes(
    p_queues text[], p_lanes bigint[], p_taken uuid[], p_marked bigint[], p_searched text[]) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    -- Most queues have no limits: for them this check avoids the query below, which costs a tenth of a turn.
    IF NOT EXISTS (SELECT FROM horsies_lanes AS stored WHERE stored.queue_name = ANY(p_queues)) THEN
        RETURN;
    END IF;
    PERFORM pg_notify('task_queue_' || freed.queue, '@') FROM (
        SELECT DISTINCT freed.queue FROM (
            SELECT ended.queue, ended.lane, count(*) AS places,
                ended.lane = ANY(p_marked) AND ended.queue <> ALL(p_searched) AS is_marked
            FROM unnest(p_queues, p_lanes) AS ended (queue, lane) GROUP BY ended.queue, ended.lane OFFSET 0) AS freed
        WHERE EXISTS (
            SELECT FROM horsies_lanes AS stored
            WHERE stored.queue_name = freed.queue AND stored.lane IN (0, freed.lane)
              AND (stored.max_concurrency IS NOT NULL OR stored.is_fifo))
          AND freed.places > (
              SELECT count(*) FROM horsies_tasks AS task
              WHERE task.id = ANY(p_taken) AND task.queue_name = freed.queue AND task.lane = freed.lane)
          AND CASE WHEN freed.is_marked THEN true ELSE (
              SELECT true FROM horsies_tasks AS task
              WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
                AND task.queue_name = freed.queue AND task.lane = freed.lane
              ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1) END) AS freed;
END
$$;

-- Pause the fifo lanes of these tasks, which have failed finally, if the limits of the lane require it.
CREATE OR REPLACE FUNCTION horsies_halt_lanes(p_ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    failed record;
    limits horsies_lanes;
BEGIN
    FOR failed IN
        SELECT task.id, task.queue_name, task.lane, task.lane_key, task.error_code, shared AS shared
        FROM horsies_tasks AS task
        LEFT JOIN horsies_lanes AS shared ON shared.queue_name = task.queue_name AND shared.lane = 0
        WHERE task.id = ANY(p_ids) ORDER BY task.queue_name, task.lane
    LOOP
        limits := horsies_lane_limits(failed.queue_name, failed.lane, failed.shared);
        CONTINUE WHEN NOT (limits.is_fifo AND limits.halts);
        INSERT INTO horsies_lanes AS stored (queue_name, lane, lane_key, paused_at, pause_reason)
        VALUES (failed.queue_name, failed.lane, failed.lane_key, clock_timestamp(),
            concat('task ', failed.id, ' failed: ', failed.error_code))
        ON CONFLICT (queue_name, lane) DO UPDATE SET
            paused_at = EXCLUDED.paused_at, pause_reason = EXCLUDED.pause_reason, updated_at = clock_timestamp()
        WHERE stored.paused_at IS NULL;
    END LOOP;
END
$$;

-- Return whether a task keeps its place in its lane while it waits for a retry.
CREATE OR REPLACE FUNCTION horsies_keeps_place_v1(p_queue text, p_lane bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce(
        (SELECT stored.is_fifo FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = p_lane),
        (SELECT stored.is_fifo FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = 0),
        false);
END
$$;

-- Return the first due task of a lane.
CREATE OR REPLACE FUNCTION horsies_lane_head(p_queue text, p_lane bigint) RETURNS uuid
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    RETURN (
        SELECT task.id FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.queue_name = p_queue AND task.lane = p_lane
        ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1);
END
$$;

-- Return whether a task that no worker knows may fail without an attempt. In a paused lane no task may; in a fifo lane
-- only the first task may, while none is in flight.
CREATE OR REPLACE FUNCTION horsies_may_leave_lane_v1(p_queue text, p_lane bigint, p_id uuid) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    IF EXISTS (
        SELECT FROM horsies_lanes AS stored
        WHERE stored.queue_name = p_queue AND stored.lane = p_lane AND stored.paused_at IS NOT NULL) THEN
        RETURN false;
    END IF;
    RETURN NOT horsies_keeps_place_v1(p_queue, p_lane) OR (
        horsies_lane_in_flight(p_queue, p_lane, true) = 0 AND p_id = horsies_lane_head(p_queue, p_lane));
END
$$;

-- Lock and return due tasks with keys and this name, which no worker knows, up to "p_limit". A fifo lane returns only
-- its first task, a paused lane none. "p_only" restricts the search to these tasks. In a queue whose keys are fifo by
-- default, only the first task of each lane is checked, because a check of every task took 0.16 ms per task.
CREATE OR REPLACE FUNCTION horsies_lock_unresolvable_v1(
    p_queue text, p_name text, p_grace_seconds float8, p_excluded uuid[], p_only uuid[], p_limit integer) RETURNS uuid[]
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    due_at timestamptz := now() - p_grace_seconds * interval '1 second';
    is_fifo boolean := coalesce((
        SELECT stored.is_fifo FROM horsies_lanes AS stored WHERE stored.queue_name = p_queue AND stored.lane = 0), false);
    -- The lanes of the queue that are paused or fifo.
    special bigint[] := ARRAY(
        SELECT stored.lane FROM horsies_lanes AS stored
        WHERE stored.queue_name = p_queue AND stored.lane <> 0 AND (stored.paused_at IS NOT NULL OR stored.is_fifo));
    cursor bigint := -9223372036854775808;
    walk record;
    heads uuid[];
    ids uuid[] := '{}';
BEGIN
    IF NOT is_fifo THEN
        ids := ARRAY(
            SELECT task.id FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
              AND task.queue_name = p_queue AND task.task_name = p_name AND task.enqueued_at <= due_at
              AND (task.good_until IS NULL OR task.good_until > now()) AND task.id <> ALL(p_excluded)
              AND (p_only IS NULL OR task.id = ANY(p_only)) AND task.lane <> ALL(special)
            ORDER BY task.lane, task.priority, task.enqueued_at, task.id LIMIT p_limit FOR UPDATE SKIP LOCKED);
        heads := ARRAY(SELECT horsies_lane_head(p_queue, lane) FROM unnest(special) AS lane);
    END IF;
    LOOP
        IF is_fifo THEN
            walk := horsies_walk_lanes(p_queue, -9223372036854775808, cursor, 256);
            heads := walk.heads;
            cursor := walk.lanes[cardinality(walk.lanes)];
        END IF;
        ids := ids || ARRAY(
            SELECT task.id FROM horsies_tasks AS task
            WHERE task.id = ANY(heads) AND coalesce(task.status, '') = 'PENDING' AND task.task_name = p_name
              AND task.enqueued_at <= due_at AND (task.good_until IS NULL OR task.good_until > now())
              AND task.id <> ALL(p_excluded) AND (p_only IS NULL OR task.id = ANY(p_only))
              AND horsies_may_leave_lane_v1(task.queue_name, task.lane, task.id)
            ORDER BY task.lane LIMIT p_limit - cardinality(ids) FOR UPDATE SKIP LOCKED);
        EXIT WHEN NOT is_fifo OR cardinality(ids) >= p_limit;
        EXIT WHEN walk.is_past;
    END LOOP;
    RETURN ids;
END
$$;

-- Return the first task of each of up to "p_limit" lanes, for a worker that changes tasks one by one; see find_due.
CREATE OR REPLACE FUNCTION horsies_first_of_lanes_v1(
    p_queue text, p_grace_seconds float8, p_excluded uuid[], p_unknown_names text[], p_refused_by text[],
    p_names text[], p_limit integer)
RETURNS TABLE (id uuid, workflow_id uuid, priority integer, enqueued_at timestamptz, lane bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    RETURN QUERY
    SELECT head.* FROM unnest((horsies_walk_lanes(
        p_queue, -9223372036854775808, -9223372036854775808, p_limit)).lanes) AS ring (lane)
    CROSS JOIN LATERAL (
        SELECT task.id, task.workflow_id, task.priority, task.enqueued_at, task.lane FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
          AND task.queue_name = p_queue AND task.lane = ring.lane
          AND task.enqueued_at <= clock_timestamp() - p_grace_seconds * interval '1 second'
          AND (task.good_until IS NULL OR task.good_until > clock_timestamp())
          AND task.id <> ALL(p_excluded) AND task.task_name <> ALL(p_unknown_names)
          AND NOT horsies_is_refused(task.id, p_refused_by, clock_timestamp())
          AND (p_names IS NULL OR task.task_name = ANY(p_names))
        ORDER BY task.priority, task.enqueued_at, task.id LIMIT 1) AS head;
END
$$;

-- Return the lane of a task that returns to its queue; NULL while its run is paused.
CREATE OR REPLACE FUNCTION horsies_returned_lane_v1(p_lane bigint, p_run_id uuid) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN NOT EXISTS (
        SELECT FROM horsies_workflows AS run WHERE run.id = p_run_id AND run.status = 'PAUSED') THEN p_lane END;
END
$$;

-- Move tasks with keys that have become due to their lanes, for a worker that serves these queues (PENDING -> PENDING;
-- the update notifies the workers of the queue). Returns the seconds until the next delayed task with a key is due
-- (NULL if there is none), and the queues that have open tasks with keys.
CREATE OR REPLACE FUNCTION horsies_look_at_keys_v1(
    p_queues text[], p_limit integer, OUT seconds double precision, OUT queues text[], OUT promoted integer)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    queue text;
    now_at timestamptz := clock_timestamp();
    due uuid[];
    due_at timestamptz;
    earliest timestamptz;
BEGIN
    queues := '{}';
    promoted := 0;
    FOREACH queue IN ARRAY p_queues LOOP
        SELECT greatest(task.enqueued_at, task.next_retry_at) INTO due_at FROM horsies_tasks AS task
        WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
          AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at AND task.queue_name = queue
        ORDER BY greatest(task.enqueued_at, task.next_retry_at) LIMIT 1;
        IF due_at <= now_at THEN
            due := ARRAY(
                SELECT task.id FROM horsies_tasks AS task
                WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
                  AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at AND task.queue_name = queue
                  AND greatest(task.enqueued_at, task.next_retry_at) <= now_at
                ORDER BY greatest(task.enqueued_at, task.next_retry_at) LIMIT p_limit FOR UPDATE SKIP LOCKED);
            UPDATE horsies_tasks AS task SET updated_at = now_at WHERE task.id = ANY(due);
            promoted := promoted + cardinality(due);
            SELECT greatest(task.enqueued_at, task.next_retry_at) INTO due_at FROM horsies_tasks AS task
            WHERE task.lane IS NOT NULL AND task.status = 'PENDING'
              AND greatest(task.enqueued_at, task.next_retry_at) > task.updated_at AND task.queue_name = queue
            ORDER BY greatest(task.enqueued_at, task.next_retry_at) LIMIT 1;
        END IF;
        earliest := least(earliest, due_at);
        IF horsies_has_keys(queue) THEN
            queues := queues || queue;
        END IF;
    END LOOP;
    IF earliest IS NOT NULL THEN
        seconds := greatest(extract(epoch FROM earliest - clock_timestamp()), 0);
    END IF;
END
$$;
