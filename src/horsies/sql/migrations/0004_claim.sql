-- The claim, on the server: queues in the order given, priorities in order within a queue, first in first out
-- within a priority, until the free children run out or a cap is reached. A loop in the database costs one round
-- trip where the same loop in the worker costs one per queue; measured against a single plain UPDATE it costs 3 to
-- 8 % of a turn.
--
-- * The rows are chosen in an ARRAY(SELECT ...), which is evaluated exactly once: IN (SELECT ... LIMIT n FOR UPDATE
--   SKIP LOCKED) may be evaluated again and claim more than its limit.
-- * One priority at a time, so that "enqueued_at <= moment" ends the index scan: a hundred thousand tasks
--   scheduled for tomorrow cost nothing today. "moment" is a value, because a volatile function in the WHERE clause
--   would be a filter and not an index condition.
-- * A task for an idle child is claimed and started in one step: status RUNNING, and the child's pid. What is
--   claimed ahead ("prefetch") rests as CLAIMED under a lease.
-- * Caps are read and acted on under transaction-scoped advisory locks: one for the whole cluster if it has a cap,
--   else one per capped queue in the order of their keys, else none. Both are held until the turn commits, so no
--   two turns ever count the same free place. Lapsed leases hold no place.
-- * "freed" says how many places of each queue this transaction has just given back. If it does not take them
--   again itself, the workers that a cap may have turned away are woken.

CREATE FUNCTION horsies_claim_v1(
    worker_id text, hostname text, pids integer[], prefetch integer, lease_ms integer, queues text[],
    queue_limits integer[], queue_caps integer[], cluster_cap integer, counts_claimed boolean, freed integer[])
RETURNS TABLE (
    id text, generation integer, task_name text, queue_name text, args text, kwargs text, retry_count integer,
    max_retries integer, task_options text, timeout_ms integer, worker_pid integer, workflow_id text,
    workflow_node_index integer, workflow_item_index integer, workflow_inputs text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    places integer := cardinality(pids) + prefetch;
    taken integer := 0;
    taken_here integer;
    wanted integer;
    changed integer;
    queue text;
    level integer;
    moment timestamptz;
BEGIN
    IF cluster_cap IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(1751348595, 0);
    ELSIF array_length(array_remove(queue_caps, NULL), 1) > 0 THEN
        PERFORM pg_advisory_xact_lock(1751348595, key) FROM (
            SELECT DISTINCT hashtext(capped.name) AS key
            FROM unnest(queues, queue_caps) AS capped (name, cap) WHERE capped.cap IS NOT NULL
            ORDER BY key) AS keys;
    END IF;
    moment := clock_timestamp();
    IF cluster_cap IS NOT NULL THEN
        SELECT least(places, greatest(cluster_cap - count(*), 0)) INTO places FROM horsies_tasks AS flying
        WHERE flying.status IN ('CLAIMED', 'RUNNING')
          AND NOT (flying.status = 'CLAIMED' AND flying.claim_expires_at <= moment);
    END IF;
    FOR position IN 1 .. cardinality(queues) LOOP
        queue := queues[position];
        level := 0;
        taken_here := 0;
        wanted := least(places - taken, queue_limits[position]);
        IF wanted > 0 AND queue_caps[position] IS NOT NULL THEN
            SELECT least(wanted, queue_caps[position] - count(*)) INTO wanted FROM horsies_tasks AS flying
            WHERE flying.status IN ('CLAIMED', 'RUNNING') AND flying.queue_name = queue
              AND (counts_claimed OR flying.status = 'RUNNING')
              AND NOT (flying.status = 'CLAIMED' AND flying.claim_expires_at <= moment);
        END IF;
        IF wanted > 0 AND EXISTS (
            SELECT FROM horsies_queues AS steered
            WHERE steered.queue_name = queue AND steered.paused_at IS NOT NULL)
        THEN
            wanted := 0;
        END IF;
        WHILE wanted > 0 LOOP
            SELECT task.priority INTO level FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue AND task.priority > level
            ORDER BY task.priority LIMIT 1;
            EXIT WHEN NOT FOUND;
            RETURN QUERY
            UPDATE horsies_tasks AS task SET
                status = CASE WHEN chosen.pid IS NULL THEN 'CLAIMED' ELSE 'RUNNING' END,
                generation = task.generation + 1,
                claimed = chosen.pid IS NULL,
                claimed_by_worker_id = horsies_claim_v1.worker_id,
                claimed_at = clock_timestamp(),
                claim_expires_at = CASE WHEN chosen.pid IS NULL
                    THEN clock_timestamp() + lease_ms * interval '1 millisecond' END,
                started_at = CASE WHEN chosen.pid IS NOT NULL THEN clock_timestamp() END,
                worker_hostname = horsies_claim_v1.hostname,
                worker_pid = chosen.pid,
                worker_process_name = 'worker-' || chosen.pid,
                updated_at = clock_timestamp()
            FROM (
                SELECT due.id, pids[taken + due.place] AS pid
                FROM unnest(ARRAY(
                    SELECT ready.id FROM horsies_tasks AS ready
                    WHERE ready.status = 'PENDING' AND NOT ready.held AND ready.queue_name = queue
                      AND ready.priority = level AND ready.enqueued_at <= moment
                      AND (ready.good_until IS NULL OR ready.good_until > moment)
                    ORDER BY ready.enqueued_at, ready.id LIMIT wanted FOR UPDATE SKIP LOCKED
                )) WITH ORDINALITY AS due (id, place)
            ) AS chosen
            WHERE task.id = chosen.id
            RETURNING task.id::text, task.generation, task.task_name::text, task.queue_name::text, task.args,
                task.kwargs, task.retry_count, task.max_retries, task.task_options, task.timeout_ms, task.worker_pid,
                task.workflow_id::text, task.workflow_node_index, task.workflow_item_index, task.workflow_inputs;
            GET DIAGNOSTICS changed = ROW_COUNT;
            taken := taken + changed;
            taken_here := taken_here + changed;
            wanted := wanted - changed;
        END LOOP;
        IF freed[position] > taken_here AND (queue_caps[position] IS NOT NULL OR cluster_cap IS NOT NULL) THEN
            PERFORM pg_notify('task_queue_' || queue, '');
        END IF;
    END LOOP;
END
$$;

-- Seconds until something on these queues becomes due or expires, NULL when nothing will, and the moment of this
-- look. What became due since the last look counts as due now: it may have done so after the claim that did not see
-- it. One index probe per queue and priority in use.
CREATE FUNCTION horsies_seconds_until_due_v1(
    queues text[], last_look timestamptz, OUT seconds double precision, OUT looked_at timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    queue text;
    level integer;
    due timestamptz;
    earliest timestamptz;
BEGIN
    looked_at := clock_timestamp();
    last_look := coalesce(last_look, '-infinity');
    SELECT task.good_until INTO earliest FROM horsies_tasks AS task
    WHERE task.status = 'PENDING' AND task.good_until IS NOT NULL ORDER BY task.good_until LIMIT 1;
    SELECT task.claim_expires_at INTO due FROM horsies_tasks AS task
    WHERE task.status = 'CLAIMED' ORDER BY task.claim_expires_at LIMIT 1;
    earliest := least(earliest, due);
    FOREACH queue IN ARRAY queues LOOP
        level := 0;
        LOOP
            SELECT task.priority INTO level FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue AND task.priority > level
            ORDER BY task.priority LIMIT 1;
            EXIT WHEN NOT FOUND;
            SELECT task.enqueued_at INTO due FROM horsies_tasks AS task
            WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue AND task.priority = level
              AND task.enqueued_at > last_look
            ORDER BY task.enqueued_at LIMIT 1;
            earliest := least(earliest, due);
        END LOOP;
    END LOOP;
    IF earliest IS NOT NULL THEN  -- greatest() would turn NULL into 0
        seconds := greatest(extract(epoch FROM earliest - clock_timestamp()), 0);
    END IF;
END
$$;
