-- Schedules: find due slots, fire them, and store changes by operators and programs.
--
-- A scheduler serves two kinds of schedules: those in its configuration, if their stored timing equals the configured
-- timing ("names" and "hashes", one per line, because the driver needs far longer to write an array); and schedules
-- added at run time, if it has their task ("task_names") or workflow ("definition_keys"). A configured schedule that a
-- person has edited is served by its stored timing, regardless of the configuration. Any number of schedulers may serve
-- the same schedules.

-- name: find_due_schedules
-- Due schedules, oldest first; nothing is locked yet. Schedules whose last task or run is unfinished are returned last,
-- so that they do not delay other schedules. Each due schedule costs a few index probes; an EXISTS might be planned as
-- a scan of all tasks. Parameters: the schedules that a scheduler serves, one per line, and how many due schedules to
-- read at once.
SELECT state.schedule_name AS name, state.next_run_at AS due_at, state.config_hash AS hash, state.definition,
    CASE WHEN state.original_timing IS NOT NULL THEN state.timing END AS edited_timing, state.edited_at,
    state.resumed_at, now() AS looked_at,
    coalesce((
        SELECT true FROM horsies_tasks AS task
        WHERE task.schedule_name = state.schedule_name AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
        LIMIT 1), (
        SELECT true FROM horsies_workflows AS run
        WHERE run.schedule_name = state.schedule_name AND run.status IN ('PENDING', 'RUNNING', 'PAUSED')
        LIMIT 1), false) AS is_unfinished
FROM horsies_schedule_state AS state
LEFT JOIN unnest(string_to_array(%(names)s, E'\n'), string_to_array(%(hashes)s, E'\n')) AS known (name, hash)
    ON known.name = state.schedule_name
        AND (known.hash = state.config_hash OR state.original_timing IS NOT NULL)
WHERE state.next_run_at <= now() AND state.paused_at IS NULL
  AND (known.name IS NOT NULL OR (state.definition IS NOT NULL AND (
      state.task_name = ANY(%(task_names)s::text[])
      OR state.definition_key = ANY(%(definition_keys)s::text[]))))
ORDER BY is_unfinished, state.next_run_at, state.schedule_name
LIMIT %(limit)s

-- name: fire_slots
-- Insert tasks and runs for due slots, and update their schedules, in one statement. A schedule is updated only if it
-- has not changed since it was read: a schedule that was served by another scheduler, paused or changed since then is
-- skipped. A task or run that already exists (its id is derived from name and slot) is kept.
WITH decided AS MATERIALIZED (
    SELECT * FROM unnest(
        %(names)s::text[], %(due_at)s::timestamptz[], %(hashes)s::text[], %(next_run_at)s::timestamptz[],
        %(last_task_ids)s::uuid[], %(run_counts)s::integer[], %(skipped_at)s::timestamptz[],
        %(skip_reasons)s::text[]
    ) AS decision (name, due_at, hash, next_run_at, last_task_id, run_count, skipped_at, skip_reason)),
taken AS MATERIALIZED (
    SELECT state.schedule_name AS name
    FROM decided JOIN horsies_schedule_state AS state ON state.schedule_name = decided.name
    WHERE state.next_run_at = decided.due_at AND state.config_hash = decided.hash AND state.paused_at IS NULL
    FOR UPDATE OF state SKIP LOCKED),
sent AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, retention, enqueue_sha, schedule_name, scheduled_for, burst, lane_key, lane, held)
    SELECT run.id, run.task_name, run.queue_name, run.priority, '[]', run.kwargs, run.slot,
        greatest(now(), run.slot + run.delay_seconds * interval '1 second'), run.good_until, run.max_retries,
        run.task_options, run.timeout_ms, run.retention_seconds * interval '1 second', run.enqueue_sha,
        run.schedule_name, run.slot, horsies_is_burst_v1(run.task_options), run.lane_key, run.lane,
        run.lane IS NOT NULL
    FROM unnest(
        %(ids)s::uuid[], %(schedule_names)s::text[], %(slots)s::timestamptz[], %(task_names)s::text[],
        %(queue_names)s::text[], %(priorities)s::integer[], %(kwargs)s::text[], %(delay_seconds)s::float8[],
        %(good_until)s::timestamptz[], %(max_retries)s::integer[], %(task_options)s::text[],
        %(timeouts_ms)s::integer[], %(retention_seconds)s::float8[], %(enqueue_shas)s::text[], %(lane_keys)s::text[],
        %(lanes)s::bigint[]
    ) AS run (id, schedule_name, slot, task_name, queue_name, priority, kwargs, delay_seconds, good_until,
              max_retries, task_options, timeout_ms, retention_seconds, enqueue_sha, lane_key, lane)
    JOIN taken ON taken.name = run.schedule_name
    ON CONFLICT DO NOTHING),
started AS MATERIALIZED (
    SELECT horsies_start_scheduled_v1(
        array_agg(run.id), array_agg(run.plan), array_agg(run.schedule_name), array_agg(run.slot),
        array_agg(run.delay_seconds))
    FROM unnest(
        %(run_ids)s::uuid[], %(plans)s::text[], %(run_schedule_names)s::text[], %(run_slots)s::timestamptz[],
        %(run_delay_seconds)s::float8[]
    ) AS run (id, plan, schedule_name, slot, delay_seconds)
    JOIN taken ON taken.name = run.schedule_name
    HAVING count(*) > 0)
UPDATE horsies_schedule_state AS state SET
    next_run_at = decided.next_run_at,
    last_run_at = CASE WHEN decided.run_count > 0 THEN now() ELSE state.last_run_at END,
    last_task_id = coalesce(decided.last_task_id, state.last_task_id),
    run_count = state.run_count + decided.run_count,
    skipped_at = coalesce(decided.skipped_at, state.skipped_at),
    skip_reason = coalesce(decided.skip_reason, state.skip_reason), updated_at = now()
FROM decided JOIN taken ON taken.name = decided.name
WHERE state.schedule_name = decided.name AND (SELECT count(*) FROM started) >= 0
RETURNING state.schedule_name AS name

-- name: seconds_until_next_slot
-- The number of seconds that a scheduler may sleep: NULL if no schedule has a next slot, 0 or less if a schedule is
-- due. Parameters: the schedules that a scheduler serves, one per line, and, if schedules were due, the time at which
-- they were last read.
SELECT extract(epoch FROM min(state.next_run_at) - clock_timestamp())::float8 AS seconds
FROM horsies_schedule_state AS state
LEFT JOIN unnest(string_to_array(%(names)s, E'\n'), string_to_array(%(hashes)s, E'\n')) AS known (name, hash)
    ON known.name = state.schedule_name
        AND (known.hash = state.config_hash OR state.original_timing IS NOT NULL)
WHERE state.next_run_at > coalesce(%(looked_at)s::timestamptz, '-infinity') AND state.paused_at IS NULL
  AND (known.name IS NOT NULL OR (state.definition IS NOT NULL AND (
      state.task_name = ANY(%(task_names)s::text[])
      OR state.definition_key = ANY(%(definition_keys)s::text[]))))

-- name: read_schedule_records
-- The stored state of these schedules, always one row for each, and the database's time. "is_unserved" means that a
-- slot is overdue and that no scheduler has written the row since; a scheduler that catches up writes it on every tick.
-- "was_disabled" means that the schedule was switched off, and that its row has not changed since.
SELECT wanted.name, state.schedule_name IS NOT NULL AS is_stored, state.config_hash AS hash,
    state.next_run_at, state.task_name, state.definition_key, state.owner, state.definition,
    state.definition AS stored_definition, state.timing, state.original_timing,
    state.paused_at IS NOT NULL AS is_paused,
    clock_timestamp() AS looked_at, coalesce(state.disabled_at >= state.updated_at, false) AS was_disabled,
    coalesce(
        state.next_run_at < now() - %(late_seconds)s::float8 * interval '1 second' AND state.paused_at IS NULL
        AND state.updated_at < now() - %(late_seconds)s::float8 * interval '1 second', false) AS is_unserved,
    coalesce((
        SELECT true FROM horsies_tasks AS task
        WHERE task.schedule_name = wanted.name AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
        LIMIT 1), (
        SELECT true FROM horsies_workflows AS run
        WHERE run.schedule_name = wanted.name AND run.status IN ('PENDING', 'RUNNING', 'PAUSED')
        LIMIT 1), false) AS is_unfinished
FROM unnest(%(names)s::text[]) AS wanted (name)
LEFT JOIN horsies_schedule_state AS state ON state.schedule_name = wanted.name

-- name: store_schedules
-- Store the configured schedules. New schedules are inserted. A stored schedule gets a new next slot if its timing has
-- changed, if it had no next slot, or if it was switched off; its counters and its pause are kept. If a person has
-- edited the timing of a schedule, that timing is kept too, and a reset returns to the newly configured timing. Rows
-- are written in name order, to avoid deadlocks.
INSERT INTO horsies_schedule_state AS state (
    schedule_name, next_run_at, config_hash, timing, task_name, definition_key, owner)
SELECT fresh.* FROM unnest(
    %(names)s::text[], %(next_run_at)s::timestamptz[], %(hashes)s::text[], %(timings)s::text[],
    %(task_names)s::text[], %(definition_keys)s::text[], %(owners)s::text[]
) AS fresh (name, next_run_at, hash, timing, task_name, definition_key, owner)
ORDER BY fresh.name
ON CONFLICT (schedule_name) DO UPDATE SET
    next_run_at = CASE WHEN (state.config_hash = EXCLUDED.config_hash OR state.original_timing IS NOT NULL)
            AND NOT coalesce(state.disabled_at >= state.updated_at, false)
        THEN coalesce(state.next_run_at, EXCLUDED.next_run_at) ELSE EXCLUDED.next_run_at END,
    config_hash = CASE WHEN state.original_timing IS NULL THEN EXCLUDED.config_hash ELSE state.config_hash END,
    timing = CASE WHEN state.original_timing IS NULL THEN EXCLUDED.timing ELSE state.timing END,
    original_timing = CASE WHEN state.original_timing IS NOT NULL AND state.timing <> EXCLUDED.timing
        THEN EXCLUDED.timing END,
    task_name = EXCLUDED.task_name, definition_key = EXCLUDED.definition_key, owner = EXCLUDED.owner,
    definition = NULL, updated_at = now()
RETURNING state.schedule_name AS name

-- name: note_disabled_schedules
-- Mark overdue configured schedules that this owner's configuration switches off or lacks, and that no scheduler of
-- another release serves. Slots that pass after this time do not count as missed. Parameters: an owner, the schedules
-- it serves, and those that its configuration switches off.
UPDATE horsies_schedule_state SET disabled_at = now()
WHERE definition IS NULL AND paused_at IS NULL AND (disabled_at IS NULL OR disabled_at < updated_at)
  AND next_run_at < now() - %(late_seconds)s::float8 * interval '1 second'
  AND updated_at < now() - %(late_seconds)s::float8 * interval '1 second'
  AND (schedule_name = ANY(%(disabled)s::text[])
       OR (owner = %(owner)s AND schedule_name <> ALL(%(names)s::text[])))
RETURNING schedule_name AS name

-- name: list_orphaned_schedules
-- Schedules stored by this owner that are no longer in its configuration. Parameters: an owner and the schedules in
-- its configuration.
SELECT schedule_name AS name FROM horsies_schedule_state
WHERE owner = %(owner)s AND definition IS NULL AND schedule_name <> ALL(%(names)s::text[])
ORDER BY schedule_name

-- name: add_schedule
-- Store a schedule that exists only in the database. An existing schedule with the same name is replaced if it was also
-- added at run time and "replace" is set; its next slot is kept if the timing is unchanged. An identical schedule is
-- not changed, and keeps a person's edit of its timing. "same_as" is the stored text that was found to be identical:
-- the caller compares them, because an encrypted text differs each time. In all other cases no row is returned.
-- Parameters: a schedule added at run time, stored in the database only.
WITH added AS (
    INSERT INTO horsies_schedule_state AS state (
        schedule_name, next_run_at, config_hash, timing, task_name, definition_key, owner, definition)
    VALUES (
        %(name)s, %(next_run_at)s, %(hash)s, %(timing)s, %(task_name)s, %(definition_key)s, 'program',
        %(definition)s)
    ON CONFLICT (schedule_name) DO UPDATE SET
        next_run_at = CASE
            WHEN state.definition IN (EXCLUDED.definition, %(same_as)s) AND state.original_timing IS NOT NULL
                THEN state.next_run_at
            WHEN state.config_hash = EXCLUDED.config_hash THEN coalesce(state.next_run_at, EXCLUDED.next_run_at)
            ELSE EXCLUDED.next_run_at END,
        config_hash = CASE
            WHEN state.definition IN (EXCLUDED.definition, %(same_as)s) AND state.original_timing IS NOT NULL
            THEN state.config_hash ELSE EXCLUDED.config_hash END,
        timing = CASE
            WHEN state.definition IN (EXCLUDED.definition, %(same_as)s) AND state.original_timing IS NOT NULL
            THEN state.timing ELSE EXCLUDED.timing END,
        original_timing = CASE WHEN state.definition IN (EXCLUDED.definition, %(same_as)s)
            THEN state.original_timing END,
        task_name = EXCLUDED.task_name, definition_key = EXCLUDED.definition_key,
        definition = EXCLUDED.definition, updated_at = now()
    WHERE state.definition IS NOT NULL
      AND (%(replace)s OR state.definition IN (EXCLUDED.definition, %(same_as)s))
    RETURNING state.schedule_name)
SELECT added.schedule_name AS name
FROM added CROSS JOIN LATERAL pg_notify('horsies_schedules', added.schedule_name) AS woken

-- name: edit_schedule
-- Change the timing of a schedule, on behalf of a person, unless the schedule has changed since it was read. The first
-- edit keeps the timing of the configuration or program; an edit back to that timing ends the edit. Parameters: the
-- digest of the timing that was read and its next slot, the new timing and its digest, the time of the edit, the next
-- slot after it, and the end and the reason of slots that are dropped.
WITH edited AS (
    UPDATE horsies_schedule_state SET
        original_timing = nullif(coalesce(original_timing, timing), %(timing)s::text), timing = %(timing)s,
        config_hash = %(hash)s, next_run_at = %(next_run_at)s, edited_at = %(edited_at)s,
        skipped_at = coalesce(%(skipped_at)s::timestamptz, skipped_at),
        skip_reason = coalesce(%(skip_reason)s::text, skip_reason), updated_at = now()
    WHERE schedule_name = %(name)s AND config_hash IS NOT DISTINCT FROM %(hash_before)s
      AND next_run_at IS NOT DISTINCT FROM %(due_before)s
    RETURNING schedule_name)
SELECT edited.schedule_name AS name
FROM edited CROSS JOIN LATERAL pg_notify('horsies_schedules', edited.schedule_name) AS woken

-- name: remove_schedule
-- Delete a schedule that was added at run time; its tasks and runs are kept.
WITH removed AS (
    DELETE FROM horsies_schedule_state
    WHERE schedule_name = %(name)s AND definition IS NOT NULL
    RETURNING schedule_name)
SELECT removed.schedule_name AS name
FROM removed CROSS JOIN LATERAL pg_notify('horsies_schedules', removed.schedule_name) AS woken

-- name: pause_schedule
-- Pause a schedule: no further slot fires. Pausing a paused schedule keeps the original time.
WITH paused AS (
    UPDATE horsies_schedule_state SET paused_at = coalesce(paused_at, now()), updated_at = now()
    WHERE schedule_name = %(name)s RETURNING schedule_name)
SELECT paused.schedule_name AS name
FROM paused CROSS JOIN LATERAL pg_notify('horsies_schedules', paused.schedule_name) AS woken

-- name: resume_schedule
-- Resume a schedule: its slots fire again. From the time of the resume, the scheduler determines which slots fell into
-- the pause.
WITH resumed AS (
    UPDATE horsies_schedule_state SET
        resumed_at = CASE WHEN paused_at IS NULL THEN resumed_at ELSE now() END, paused_at = NULL,
        updated_at = now()
    WHERE schedule_name = %(name)s RETURNING schedule_name)
SELECT resumed.schedule_name AS name
FROM resumed CROSS JOIN LATERAL pg_notify('horsies_schedules', resumed.schedule_name) AS woken

-- name: run_schedule
-- Run a schedule manually once, in addition to its slots; its timetable does not change. Parameters: the task of a
-- schedule that is run manually.
WITH sent AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, priority, args, kwargs, sent_at, enqueued_at, good_until, max_retries,
        task_options, timeout_ms, retention, enqueue_sha, schedule_name, burst, lane_key, lane, held)
    VALUES (
        %(id)s::uuid, %(task_name)s, %(queue_name)s, %(priority)s, '[]', %(kwargs)s, %(sent_at)s, now(),
        %(good_until)s, %(max_retries)s, %(task_options)s, %(timeout_ms)s,
        %(retention_seconds)s::float8 * interval '1 second', %(enqueue_sha)s, %(schedule_name)s,
        horsies_is_burst_v1(%(task_options)s::text), %(lane_key)s::text, %(lane)s::bigint,
        %(lane)s::bigint IS NOT NULL)
    ON CONFLICT DO NOTHING
    RETURNING id, schedule_name),
noted AS (
    UPDATE horsies_schedule_state AS state SET
        last_run_at = now(), last_task_id = sent.id, run_count = state.run_count + 1, updated_at = now()
    FROM sent WHERE state.schedule_name = sent.schedule_name)
SELECT sent.id::text AS id FROM sent

-- name: start_schedule
-- Run a workflow schedule manually once, in addition to its slots. Parameters: the run id and the plan, as JSON text.
WITH started AS MATERIALIZED (
    SELECT horsies_start_scheduled_v1(
        ARRAY[%(id)s::uuid], ARRAY[%(plan)s::text], ARRAY[%(schedule_name)s::text], ARRAY[NULL::timestamptz],
        ARRAY[0::float8]) AS created),
noted AS (
    UPDATE horsies_schedule_state AS state SET
        last_run_at = now(), last_task_id = %(id)s::uuid, run_count = state.run_count + 1, updated_at = now()
    FROM started WHERE state.schedule_name = %(schedule_name)s AND started.created > 0)
SELECT %(id)s::text AS id FROM started WHERE started.created > 0

-- name: list_schedules
-- Stored schedules (all, one page, or one), each with the status of its newest task or run. Parameters: the name of one
-- schedule; or NULL for all schedules, or for a page that starts after the name `after`.
SELECT state.schedule_name AS name, state.task_name, state.definition_key,
    state.definition IS NOT NULL AS is_dynamic, state.owner, state.timing, state.original_timing,
    state.next_run_at, state.last_run_at, state.last_task_id::text, coalesce(task.status::text, run.status::text) AS last_status,
    state.run_count, state.paused_at, state.skipped_at, state.skip_reason
FROM horsies_schedule_state AS state
LEFT JOIN horsies_tasks AS task ON task.id = state.last_task_id
LEFT JOIN horsies_workflows AS run ON run.id = state.last_task_id
WHERE (%(name)s::text IS NULL OR state.schedule_name = %(name)s) AND state.schedule_name > %(after)s::text
ORDER BY state.schedule_name LIMIT %(limit)s::integer

-- name: list_schedule_runs
-- A schedule's newest tasks and runs, from the indexes on (schedule_name, sent_at). A schedule has both tasks and runs
-- if it was changed from a task to a workflow or back.
SELECT newest.id::text AS task_id, newest.is_workflow, newest.scheduled_for, newest.status::text,
    newest.enqueued_at, newest.error_code
FROM (
    (SELECT task.id, false AS is_workflow, task.scheduled_for, task.status::text, task.enqueued_at,
        task.error_code::text, task.sent_at
    FROM horsies_tasks AS task WHERE task.schedule_name = %(name)s ORDER BY task.sent_at DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT run.id, true, run.scheduled_for, run.status::text, run.started_at,
        coalesce(run.error::json #>> '{error_code,__builtin_task_code__}', run.error::json ->> 'error_code'),
        run.sent_at
    FROM horsies_workflows AS run WHERE run.schedule_name = %(name)s
    ORDER BY run.sent_at DESC LIMIT %(limit)s)
) AS newest
ORDER BY newest.sent_at DESC LIMIT %(limit)s

-- name: list_newest_schedule_runs
-- The newest tasks and runs of each of these schedules, and how long they took, from the indexes on (schedule_name,
-- sent_at).
SELECT wanted.name, newest.id::text AS task_id, newest.is_workflow, newest.scheduled_for, newest.status,
    newest.sent_at, newest.error_code, newest.took_seconds
FROM unnest(%(names)s::text[]) AS wanted (name) CROSS JOIN LATERAL (
    SELECT found.* FROM (
        (SELECT task.id, false AS is_workflow, task.scheduled_for, task.status::text, task.sent_at,
            task.error_code::text,
            extract(epoch FROM coalesce(task.completed_at, task.failed_at) - task.started_at)::float8
                AS took_seconds
        FROM horsies_tasks AS task WHERE task.schedule_name = wanted.name
        ORDER BY task.sent_at DESC LIMIT %(limit)s::integer)
        UNION ALL
        (SELECT run.id, true, run.scheduled_for, run.status::text, run.sent_at,
            coalesce(run.error::json #>> '{error_code,__builtin_task_code__}', run.error::json ->> 'error_code'),
            extract(epoch FROM run.completed_at - run.started_at)::float8
        FROM horsies_workflows AS run WHERE run.schedule_name = wanted.name
        ORDER BY run.sent_at DESC LIMIT %(limit)s::integer)) AS found
    ORDER BY found.sent_at DESC LIMIT %(limit)s::integer) AS newest
ORDER BY wanted.name, newest.sent_at DESC

-- name: find_schedulers
-- Whether schedulers are connected to this database, judging by session names, and the database's clock.
SELECT count(*) FILTER (WHERE session.application_name = 'horsies:scheduler') AS sessions, now() AS looked_at
FROM pg_catalog.pg_stat_activity AS session WHERE session.datname = pg_catalog.current_database()
