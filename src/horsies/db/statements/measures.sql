-- Statements on the counts of attempts per minute. The sixteen buckets of a duration are summed one by one, because
-- unnesting them would multiply the rows.

-- name: add_measures
-- Add counts to the rows for their minutes. All workers lock these rows in the same order, so no deadlocks occur.
INSERT INTO horsies_measures AS stored (
    minute, minutes, queue_name, task_name, done, failed, retried, crashed, stopped, waited_ms, ran_ms,
    waited, ran)
SELECT to_timestamp(sent.minute * 60), 1, sent.queue_name, sent.task_name, sent.done, sent.failed,
    sent.retried, sent.crashed, sent.stopped, sent.waited_ms, sent.ran_ms, sent.waited::integer[],
    sent.ran::integer[]
FROM unnest(%(minutes)s::bigint[], %(queues)s::text[], %(names)s::text[], %(done)s::integer[],
            %(failed)s::integer[], %(retried)s::integer[], %(crashed)s::integer[], %(stopped)s::integer[],
            %(waited_ms)s::bigint[], %(ran_ms)s::bigint[], %(waited)s::text[], %(ran)s::text[])
    AS sent (minute, queue_name, task_name, done, failed, retried, crashed, stopped, waited_ms, ran_ms,
             waited, ran)
ORDER BY sent.minute, sent.queue_name, sent.task_name
ON CONFLICT (minute, minutes, queue_name, task_name) DO UPDATE SET
    done = stored.done + excluded.done, failed = stored.failed + excluded.failed,
    retried = stored.retried + excluded.retried, crashed = stored.crashed + excluded.crashed,
    stopped = stored.stopped + excluded.stopped, waited_ms = stored.waited_ms + excluded.waited_ms,
    ran_ms = stored.ran_ms + excluded.ran_ms,
    waited = ARRAY(
        SELECT pair.stored + pair.added
        FROM unnest(stored.waited, excluded.waited) WITH ORDINALITY AS pair (stored, added, place)
        ORDER BY place),
    ran = ARRAY(
        SELECT pair.stored + pair.added
        FROM unnest(stored.ran, excluded.ran) WITH ORDINALITY AS pair (stored, added, place)
        ORDER BY place)

-- name: read_measures
-- Sum the counts per slot of "step_seconds", in total or by queue or task, from one range of the primary key. The first
-- slot begins "seconds" ago, at a whole multiple of "unit_seconds". A slot without attempts is returned as one row,
-- whose subject is null unless the sums cover all attempts. Parameters: how far to look back, where the first slot may
-- begin, and the length of a slot. An empty list of queues or names matches anything. With thousands of task names,
-- summing the buckets takes most of the time, so the caller lists the durations whose buckets it needs.
SELECT slot.at, now() AS until, CASE WHEN %(split)s::text = 'all' THEN '' ELSE found.subject END AS subject,
    coalesce(found.done, 0) AS done,
    coalesce(found.failed, 0) AS failed, coalesce(found.retried, 0) AS retried,
    coalesce(found.crashed, 0) AS crashed, coalesce(found.stopped, 0) AS stopped,
    coalesce(found.waited_ms, 0) AS waited_ms, coalesce(found.ran_ms, 0) AS ran_ms,
    CASE WHEN %(with_waited)s::boolean AND found.waited IS NOT NULL THEN found.waited ELSE '{}' END AS waited,
    CASE WHEN %(with_ran)s::boolean AND found.ran IS NOT NULL THEN found.ran ELSE '{}' END AS ran
FROM generate_series(
    date_bin(%(unit_seconds)s::integer * interval '1 second',
             now() - %(seconds)s::float8 * interval '1 second', timestamptz 'epoch'),
    now(), %(step_seconds)s::integer * interval '1 second') AS slot (at)
LEFT JOIN (
    SELECT date_bin(
            %(step_seconds)s::integer * interval '1 second', measure.minute,
            date_bin(%(unit_seconds)s::integer * interval '1 second',
                     now() - %(seconds)s::float8 * interval '1 second', timestamptz 'epoch')) AS at,
        CASE %(split)s::text WHEN 'queue' THEN measure.queue_name WHEN 'task' THEN measure.task_name
            ELSE '' END::text AS subject,
        sum(done) AS done, sum(failed) AS failed, sum(retried) AS retried, sum(crashed) AS crashed,
        sum(stopped) AS stopped, sum(waited_ms)::bigint AS waited_ms, sum(ran_ms)::bigint AS ran_ms,
        ARRAY[sum(waited[1]), sum(waited[2]), sum(waited[3]), sum(waited[4]), sum(waited[5]),
            sum(waited[6]), sum(waited[7]), sum(waited[8]), sum(waited[9]), sum(waited[10]),
            sum(waited[11]), sum(waited[12]), sum(waited[13]), sum(waited[14]), sum(waited[15]),
            sum(waited[16])]::bigint[] AS waited,
        ARRAY[sum(ran[1]), sum(ran[2]), sum(ran[3]), sum(ran[4]), sum(ran[5]), sum(ran[6]), sum(ran[7]),
            sum(ran[8]), sum(ran[9]), sum(ran[10]), sum(ran[11]), sum(ran[12]), sum(ran[13]),
            sum(ran[14]), sum(ran[15]), sum(ran[16])]::bigint[] AS ran
    FROM (
        SELECT minute, queue_name, task_name, done, failed, retried, crashed, stopped, waited_ms, ran_ms,
            CASE WHEN %(with_waited)s::boolean THEN stored.waited END AS waited,
            CASE WHEN %(with_ran)s::boolean THEN stored.ran END AS ran
        FROM horsies_measures AS stored) AS measure
    WHERE measure.minute >= date_bin(
            %(unit_seconds)s::integer * interval '1 second',
            now() - %(seconds)s::float8 * interval '1 second', timestamptz 'epoch')
      AND (cardinality(%(queues)s::text[]) = 0 OR measure.queue_name = ANY(%(queues)s::text[]))
      AND (cardinality(%(names)s::text[]) = 0 OR measure.task_name = ANY(%(names)s::text[]))
    GROUP BY 1, 2) AS found ON found.at = slot.at
ORDER BY slot.at, found.subject

-- name: count_done_by_minute
-- Each queue's successful attempts, by how many whole minutes ago they ended. The result has two arrays per queue,
-- because a row costs the reader more than an array element. The current minute is removed after the scan: if the scan
-- had both ends of the range, the planner would expect few rows and read a block for each of them. Parameters: how many
-- whole minutes to look back, and the queues.
SELECT queue_name, array_agg(minutes_ago) AS minutes_ago, array_agg(done) AS done
FROM (
    SELECT queue_name, sum(done) AS done, (extract(epoch FROM
        date_bin(interval '1 minute', now(), timestamptz 'epoch') - minute) / 60)::integer AS minutes_ago
    FROM horsies_measures
    WHERE minute >= date_bin(interval '1 minute', now(), timestamptz 'epoch')
              - %(minutes)s::integer * interval '1 minute'
      AND queue_name = ANY(%(queues)s::text[])
    GROUP BY queue_name, minute) AS counted
WHERE minutes_ago > 0
GROUP BY queue_name

-- name: find_failing_tasks
-- Tasks with final failures or retries in the last ten minutes, with their numbers in these ten minutes and their
-- average per ten minutes over the hour before. Both periods begin at a whole multiple of five minutes. Most rows have
-- neither failures nor retries.
SELECT task_name AS name, recent AS failures, (before / 5.0)::float8 AS usual, crashes, retries,
    (retries_before / 5.0)::float8 AS usual_retries
FROM (
    SELECT task_name,
        coalesce(sum(failed + crashed) FILTER (WHERE minute >= since), 0) AS recent,
        coalesce(sum(failed + crashed) FILTER (WHERE minute < since), 0) AS before,
        coalesce(sum(crashed) FILTER (WHERE minute >= since), 0) AS crashes,
        coalesce(sum(retried) FILTER (WHERE minute >= since), 0) AS retries,
        coalesce(sum(retried) FILTER (WHERE minute < since), 0) AS retries_before
    FROM horsies_measures,
        LATERAL (SELECT date_bin(interval '5 minutes', now() - interval '10 minutes', timestamptz 'epoch') AS since) AS ten
    WHERE minute >= date_bin(interval '5 minutes', now() - interval '1 hour', timestamptz 'epoch')
      AND failed + crashed + retried > 0
    GROUP BY task_name) AS counted
WHERE recent > 0 OR retries > 0

-- name: compact_measures
-- Merge rows of single minutes that are older than six hours into rows of ten minutes. The counts that are deleted are
-- exactly the counts that are added, so the sums stay correct even if two workers do this at the same time, or if only
-- some of a slot's rows are merged. Parameters: how many rows to delete at most.
WITH old AS (
    DELETE FROM horsies_measures WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM horsies_measures
        WHERE minutes = 1
          AND minute < date_bin(interval '10 minutes', now() - interval '6 hours', timestamptz 'epoch')
        ORDER BY minute LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
    RETURNING *),
compacted AS (
    INSERT INTO horsies_measures AS stored (
        minute, minutes, queue_name, task_name, done, failed, retried, crashed, stopped, waited_ms, ran_ms,
    waited, ran)
    SELECT date_bin(interval '10 minutes', minute, timestamptz 'epoch') AS ten, 10, queue_name, task_name,
        sum(done), sum(failed), sum(retried), sum(crashed), sum(stopped), sum(waited_ms), sum(ran_ms),
        ARRAY[sum(waited[1]), sum(waited[2]), sum(waited[3]), sum(waited[4]), sum(waited[5]),
            sum(waited[6]), sum(waited[7]), sum(waited[8]), sum(waited[9]), sum(waited[10]),
            sum(waited[11]), sum(waited[12]), sum(waited[13]), sum(waited[14]), sum(waited[15]),
            sum(waited[16])]::integer[],
        ARRAY[sum(ran[1]), sum(ran[2]), sum(ran[3]), sum(ran[4]), sum(ran[5]), sum(ran[6]), sum(ran[7]),
            sum(ran[8]), sum(ran[9]), sum(ran[10]), sum(ran[11]), sum(ran[12]), sum(ran[13]),
            sum(ran[14]), sum(ran[15]), sum(ran[16])]::integer[]
    FROM old GROUP BY ten, queue_name, task_name ORDER BY ten, queue_name, task_name
    ON CONFLICT (minute, minutes, queue_name, task_name) DO UPDATE SET
        done = stored.done + excluded.done, failed = stored.failed + excluded.failed,
        retried = stored.retried + excluded.retried, crashed = stored.crashed + excluded.crashed,
        stopped = stored.stopped + excluded.stopped, waited_ms = stored.waited_ms + excluded.waited_ms,
        ran_ms = stored.ran_ms + excluded.ran_ms,
        waited = ARRAY(
            SELECT pair.stored + pair.added
            FROM unnest(stored.waited, excluded.waited) WITH ORDINALITY AS pair (stored, added, place)
            ORDER BY place),
        ran = ARRAY(
            SELECT pair.stored + pair.added
            FROM unnest(stored.ran, excluded.ran) WITH ORDINALITY AS pair (stored, added, place)
            ORDER BY place))
SELECT minute::text AS id FROM old

-- name: delete_old_measures
-- Delete old rows. Parameters: the maximum age, and how many rows to delete at most.
DELETE FROM horsies_measures WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM horsies_measures WHERE minute < now() - %(hours)s * interval '1 hour'
    ORDER BY minute LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
RETURNING minute::text AS id
