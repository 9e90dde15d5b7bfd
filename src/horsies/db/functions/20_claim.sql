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
-- * Tasks claimed before leave index entries that lead nowhere until vacuum removes them, which an open transaction
--   forbids. So a caller may mark the task it got last from a queue (its priority, moment and id): the claim first
--   looks behind the marks, which is one probe of the index without a search for the first priority, and then, if it
--   still wants tasks and "looks_everywhere", from the front of every marked queue. Behind a mark the order is exact;
--   when to look without marks, so that nothing before them waits for long, is the caller's to decide.
-- * The chosen rows are updated by "id = ANY(...)", beside the join that says the same: a plan made while the table was
--   almost empty would otherwise read it from end to end for ever. That loses their order, so it is restored.
-- * The pause of a queue is asked in the statement that chooses the rows: as a statement of its own it cost 0.02 ms.

CREATE OR REPLACE FUNCTION horsies_claim_v1(
    worker_id text, hostname text, pids integer[], prefetch integer, lease_ms integer, queues text[],
    queue_limits integer[], queue_caps integer[], cluster_cap integer, counts_claimed boolean, freed integer[],
    marked_priorities integer[] DEFAULT '{}', marked_moments timestamptz[] DEFAULT '{}',
    marked_ids uuid[] DEFAULT '{}', looks_everywhere boolean DEFAULT true)
RETURNS TABLE (
    id text, generation integer, task_name text, queue_name text, args text, kwargs text, retry_count integer,
    max_retries integer, task_options text, timeout_ms integer, worker_pid integer, workflow_id text,
    workflow_node_index integer, workflow_item_index integer, workflow_inputs text, priority integer,
    enqueued_at timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    places integer := cardinality(pids) + prefetch;
    taken integer := 0;
    taken_here integer[] := array_fill(0, ARRAY[cardinality(queues)]);
    wanted integer;
    changed integer;
    queue text;
    level integer;
    behind_moment timestamptz;
    behind_id uuid;
    is_marked boolean;
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
    FOR look IN 1 .. 2 LOOP
        FOR position IN 1 .. cardinality(queues) LOOP
            EXIT WHEN taken >= places;
            is_marked := marked_ids[position] IS NOT NULL;
            CONTINUE WHEN look = 2 AND NOT (is_marked AND looks_everywhere);
            is_marked := is_marked AND look = 1;
            queue := queues[position];
            wanted := least(places - taken, queue_limits[position] - taken_here[position]);
            IF wanted > 0 AND queue_caps[position] IS NOT NULL THEN
                SELECT least(wanted, queue_caps[position] - count(*)) INTO wanted FROM horsies_tasks AS flying
                WHERE flying.status IN ('CLAIMED', 'RUNNING') AND flying.queue_name = queue
                  AND (counts_claimed OR flying.status = 'RUNNING')
                  AND NOT (flying.status = 'CLAIMED' AND flying.claim_expires_at <= moment);
            END IF;
            level := 0;
            behind_moment := '-infinity';
            behind_id := '00000000-0000-0000-0000-000000000000';
            IF is_marked THEN
                level := marked_priorities[position];
                behind_moment := marked_moments[position];
                behind_id := marked_ids[position];
            END IF;
            WHILE wanted > 0 LOOP
                IF NOT is_marked THEN
                    SELECT task.priority INTO level FROM horsies_tasks AS task
                    WHERE task.status = 'PENDING' AND NOT task.held AND task.queue_name = queue
                      AND task.priority > level
                    ORDER BY task.priority LIMIT 1;
                    EXIT WHEN NOT FOUND;
                END IF;
                RETURN QUERY
                WITH chosen AS MATERIALIZED (
                    SELECT due.id, due.place, pids[taken + due.place] AS pid
                    FROM unnest(ARRAY(
                        SELECT ready.id FROM horsies_tasks AS ready
                        WHERE ready.status = 'PENDING' AND NOT ready.held AND ready.queue_name = queue
                          AND ready.priority = level AND ready.enqueued_at <= moment
                          AND (ready.enqueued_at, ready.id) > (behind_moment, behind_id)
                          AND (ready.good_until IS NULL OR ready.good_until > moment)
                          AND NOT EXISTS (
                              SELECT FROM horsies_queues AS steered
                              WHERE steered.queue_name = queue AND steered.paused_at IS NOT NULL)
                        ORDER BY ready.enqueued_at, ready.id LIMIT wanted FOR UPDATE SKIP LOCKED
                    )) WITH ORDINALITY AS due (id, place)),
                begun AS (
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
                    FROM chosen
                    WHERE task.id = chosen.id AND task.id = ANY(ARRAY(SELECT chosen.id FROM chosen))
                    RETURNING task.*, chosen.place)
                SELECT begun.id::text, begun.generation, begun.task_name::text, begun.queue_name::text, begun.args,
                    begun.kwargs, begun.retry_count, begun.max_retries, begun.task_options, begun.timeout_ms,
                    begun.worker_pid, begun.workflow_id::text, begun.workflow_node_index, begun.workflow_item_index,
                    begun.workflow_inputs, begun.priority, begun.enqueued_at
                FROM begun ORDER BY begun.place;
                GET DIAGNOSTICS changed = ROW_COUNT;
                taken := taken + changed;
                taken_here[position] := taken_here[position] + changed;
                wanted := wanted - changed;
                EXIT WHEN is_marked;
            END LOOP;
        END LOOP;
    END LOOP;
    IF freed <> '{}' THEN
        PERFORM pg_notify('task_queue_' || queues[position], '')
        FROM generate_subscripts(queues, 1) AS position
        WHERE freed[position] > taken_here[position]
          AND (queue_caps[position] IS NOT NULL OR cluster_cap IS NOT NULL);
    END IF;
END
$$;

-- Seconds until something on these queues becomes due or expires, NULL when nothing will, and the moment of this
-- look. What became due since the last look counts as due now: it may have done so after the claim that did not see
-- it. One index probe per queue and priority in use.
CREATE OR REPLACE FUNCTION horsies_seconds_until_due_v1(
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
