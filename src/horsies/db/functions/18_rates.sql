-- Rates: how many tasks of a queue may start per period, in the whole cluster, measured by the database's clock.
--
-- Each queue with a rate has one row, its meter. Its column "next_at" is the time at which all starts so far are paid
-- for (the generic cell rate algorithm). A claim of n tasks advances "next_at" by n times the seconds per start, to at
-- most "burst" starts ahead of the clock. So at most N + burst - 1 tasks start in any period that is long enough for N
-- starts. Tasks beyond the rate wait in their queue. The row stays locked until the claim commits, so no two turns use
-- the same start, and a turn that rolls back uses none. Lock order: caps, then meters by name, then tasks.

-- Give a meter another rate, while its row is locked. Starts that are not paid for yet are paid at the new rate, so a
-- higher rate applies immediately. The number of unpaid starts does not change, so workers with two different
-- configurations gain no starts when they take turns. This number is limited to one burst, even if the clock was set
-- back.
CREATE OR REPLACE FUNCTION horsies_change_rate(p_meter horsies_meters, p_seconds float8, p_burst integer)
RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
    UPDATE horsies_meters AS stored SET
        next_at = clock_timestamp() + p_seconds * interval '1 second' * least(greatest(p_burst, stored.burst),
            greatest(0, extract(epoch FROM stored.next_at - clock_timestamp())::float8) / stored.seconds),
        seconds = p_seconds, burst = p_burst
    WHERE stored.queue_name = p_meter.queue_name AND stored.lane = p_meter.lane
    RETURNING stored.next_at INTO p_meter.next_at;
    RETURN p_meter.next_at;
END
$$;

-- Return the limits of a claim, each lowered to the number of starts that the queue's rate allows now. A queue without
-- seconds has no rate.
CREATE OR REPLACE FUNCTION horsies_metered_limits(
    p_queues text[], p_limits integer[], p_seconds float8[], p_bursts integer[])
RETURNS integer[] LANGUAGE plpgsql AS $$
DECLARE
    rated text[] := ARRAY(
        SELECT queue.name FROM unnest(p_queues, p_seconds) AS queue (name, seconds)
        WHERE queue.seconds IS NOT NULL ORDER BY queue.name);
    meter horsies_meters;
    place integer;
    found_count integer := 0;
BEGIN
    FOR attempt IN 1 .. 2 LOOP
        FOR meter IN
            SELECT * FROM horsies_meters AS stored
            WHERE stored.queue_name = ANY(rated) AND stored.lane = 0 ORDER BY stored.queue_name FOR UPDATE
        LOOP
            place := array_position(p_queues, meter.queue_name::text);
            IF meter.seconds <> p_seconds[place] OR meter.burst <> p_bursts[place] THEN
                meter.next_at := horsies_change_rate(meter, p_seconds[place], p_bursts[place]);
            END IF;
            p_limits[place] := least(p_limits[place], greatest(0, floor(p_bursts[place] + 1e-6
                - greatest(0, extract(epoch FROM meter.next_at - clock_timestamp())::float8) / p_seconds[place])));
            found_count := found_count + 1;
        END LOOP;
        EXIT WHEN found_count = cardinality(rated);
        found_count := 0;
        INSERT INTO horsies_meters (queue_name, next_at, seconds, burst)
        SELECT queue.name, clock_timestamp(), queue.seconds, queue.burst
        FROM unnest(p_queues, p_seconds, p_bursts) AS queue (name, seconds, burst)
        WHERE queue.seconds IS NOT NULL ORDER BY queue.name
        ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN p_limits;
END
$$;

-- Record how many tasks of each queue were claimed.
CREATE OR REPLACE FUNCTION horsies_note_starts(
    p_queues text[], p_taken integer[], p_seconds float8[], p_bursts integer[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE horsies_meters AS meter SET
        next_at = greatest(meter.next_at, clock_timestamp()) + queue.taken * queue.seconds * interval '1 second',
        seconds = queue.seconds, burst = queue.burst
    FROM unnest(p_queues, p_taken, p_seconds, p_bursts) AS queue (name, taken, seconds, burst)
    WHERE meter.queue_name = queue.name AND meter.lane = 0 AND queue.taken > 0 AND queue.seconds IS NOT NULL;
END
$$;

-- Return when the next task of a queue with a rate may start.
CREATE OR REPLACE FUNCTION horsies_starts_at(p_meter horsies_meters) RETURNS timestamptz LANGUAGE sql STABLE
RETURN p_meter.next_at - (p_meter.burst - 1) * p_meter.seconds * interval '1 second';

-- Return the seconds until the rate of one of these queues allows the next start; NULL if no rate is holding tasks
-- back. A queue whose rate already allowed a start at the last check is left out, because its rate has turned away no
-- claim since.
CREATE OR REPLACE FUNCTION horsies_seconds_until_start_v1(p_queues text[], p_last_look timestamptz)
RETURNS double precision LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
    SELECT min(greatest(extract(epoch FROM horsies_starts_at(meter) - clock_timestamp())::float8, 0))
    FROM horsies_meters AS meter
    WHERE meter.queue_name = ANY(p_queues) AND meter.lane = 0 AND horsies_starts_at(meter) > coalesce(p_last_look, '-infinity')
      AND (SELECT true FROM horsies_tasks AS task
           WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = meter.queue_name
           UNION ALL
           SELECT true FROM horsies_tasks AS task
           WHERE task.lane IS NOT NULL AND task.status = 'PENDING' AND task.enqueued_at <= task.updated_at
             AND task.queue_name = meter.queue_name LIMIT 1));
END
$$;
