-- Sends from SQL, for programs in any language, for triggers and for pg_cron: horsies_send_v1 and horsies_send_many_v1.
-- Both make the same checks as task.send, with the same error messages, and store the same rows, in the caller's
-- transaction and with the caller's privileges. The settings from each task's decorator come from
-- horsies_task_defaults, where workers have stored them.
--
-- Python producers insert with their own statement, because their arguments are already checked and encoded. For one
-- task, horsies_send_v1 costs the server four times as much processor time (0.8 instead of 0.2 ms), mostly because it
-- calls functions that set their own search_path. In one call for hundreds of tasks, each task costs 0.1 ms.

-- Return a JSON value as text with sorted keys and without spaces, as Python producers write it. So a repeated
-- idempotency key matches the earlier request, regardless of the language of its sender.
CREATE OR REPLACE FUNCTION horsies_canonical(p_value jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    CASE jsonb_typeof(p_value)
        WHEN 'object' THEN RETURN '{' || coalesce((
            SELECT string_agg(to_json(member.key)::text || ':' || horsies_canonical(member.value), ','
                ORDER BY member.key COLLATE "C")
            FROM jsonb_each(p_value) AS member), '') || '}';
        WHEN 'array' THEN RETURN '[' || coalesce((
            SELECT string_agg(horsies_canonical(element.value), ',' ORDER BY element.place)
            FROM jsonb_array_elements(p_value) WITH ORDINALITY AS element (value, place)), '') || ']';
        ELSE RETURN p_value::text;
    END CASE;
END
$$;

-- Return the timestamp in a value of a call. The text must contain an offset from UTC; without one, and for any other
-- value, the result is NULL.
CREATE OR REPLACE FUNCTION horsies_moment(p_value jsonb) RETURNS timestamptz LANGUAGE plpgsql STABLE STRICT AS $$
BEGIN
    IF jsonb_typeof(p_value) = 'string' AND p_value #>> '{}' ~ ':\d\d(\.\d+)? *(Z|[+-]\d\d(:?\d\d)?)$' THEN
        RETURN (p_value #>> '{}')::timestamptz;
    END IF;
    RETURN NULL;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END
$$;

-- Return the duration in a value of a call, which is a number of seconds or the text of an interval. The result is NULL
-- for any other value, and for a duration outside the limits of a send.
CREATE OR REPLACE FUNCTION horsies_duration(p_value jsonb, p_shortest interval) RETURNS interval
LANGUAGE plpgsql STABLE STRICT AS $$
DECLARE
    duration interval;
BEGIN
    CASE jsonb_typeof(p_value)
        WHEN 'number' THEN duration := (p_value #>> '{}')::float8 * interval '1 second';
        WHEN 'string' THEN duration := (p_value #>> '{}')::interval;
        ELSE RETURN NULL;
    END CASE;
    RETURN CASE WHEN duration BETWEEN p_shortest AND interval '100 years' THEN duration END;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION horsies_headers_problem(p_headers jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    header record;
    size integer := 0;
BEGIN
    IF jsonb_typeof(p_headers) <> 'object' THEN
        RETURN 'headers must be a JSON object of texts, not ' || jsonb_typeof(p_headers);
    END IF;
    FOR header IN SELECT member.key, member.value FROM jsonb_each(p_headers) AS member LOOP
        IF header.key = '' THEN
            RETURN 'the name of a header must be a text that is not empty';
        ELSIF jsonb_typeof(header.value) <> 'string' THEN
            RETURN format('header %L must be a text, not %s', left(header.key, 40), jsonb_typeof(header.value));
        END IF;
        size := size + octet_length(header.key) + octet_length(header.value #>> '{}');
    END LOOP;
    IF size > 8192 THEN
        RETURN format('headers are %s bytes, more than 8,192; send an argument instead', to_char(size, 'FM9,999,999,999'));
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION horsies_debounce_problem(p_given jsonb) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    debounce jsonb := p_given -> 'debounce';
    quiet interval;
BEGIN
    IF jsonb_typeof(debounce) <> 'object' OR debounce - '{quiet,at_most}'::text[] <> '{}' THEN
        RETURN 'debounce must be a JSON object with quiet and at_most';
    END IF;
    quiet := horsies_duration(debounce -> 'quiet', interval '1 millisecond');
    IF quiet IS NULL THEN
        RETURN 'quiet of debounce must be an interval or a number of seconds, from one millisecond to 100 years';
    ELSIF horsies_duration(debounce -> 'at_most', quiet) IS NULL THEN
        RETURN 'at_most of debounce must be an interval or a number of seconds, from quiet to 100 years';
    ELSIF NOT p_given ? 'idempotency_key' THEN
        RETURN 'debounce needs an idempotency_key, which names the tasks that replace each other';
    ELSIF p_given ->> 'unique' = 'while_open' THEN
        RETURN 'debounce implies unique=''while_waiting''; leave unique out';
    ELSIF p_given ? 'at' OR p_given ? 'delay' THEN
        RETURN 'debounce sets the time of the task; leave at, delay and schedule out';
    END IF;
    RETURN NULL;
END
$$;

-- Return the reason why a queue cannot take the task, or NULL. If a worker has registered the task, the queue must be
-- one of its application's queues. A call of an unregistered task must name a queue, and only the form of the name is
-- checked.
CREATE OR REPLACE FUNCTION horsies_queue_problem(p_queue jsonb, p_queues jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    queue text := p_queue #>> '{}';
BEGIN
    IF queue IS NULL THEN
        RETURN CASE WHEN p_queues IS NULL THEN
            'no worker has registered it yet; start a worker that has the task, or give the queue' END;
    ELSIF jsonb_typeof(p_queue) <> 'string' THEN
        RETURN 'queue must be a text, not ' || jsonb_typeof(p_queue);
    ELSIF p_queues IS NOT NULL THEN
        RETURN CASE WHEN NOT p_queues ? queue THEN format(
            'its application has no queue %L; choose one of %s', left(queue, 100),
            (SELECT string_agg(known.name, ', ') FROM jsonb_object_keys(p_queues) AS known (name))) END;
    ELSIF queue !~ '^[A-Za-z0-9_.-]{1,52}$' THEN
        RETURN format('the queue name %L must consist of 1 to 52 letters A-Z and a-z, digits, ''_'', ''.'' and ''-''',
            left(queue, 100));
    END IF;
    RETURN NULL;
END
$$;

-- Return the reason why the key of a call cannot be stored, or NULL. Without the option "key", the key is the argument
-- that the task's decorator names. The option "key" with a value of null means that the task has no key.
CREATE OR REPLACE FUNCTION horsies_key_problem(p_call jsonb, p_parameter text, p_computes boolean) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    value jsonb := CASE WHEN p_call ? 'key' THEN p_call -> 'key' ELSE p_call -> 'kwargs' -> p_parameter END;
BEGIN
    IF p_call ? 'key' AND value = jsonb 'null' OR (NOT p_call ? 'key' AND p_parameter IS NULL AND NOT p_computes) THEN
        RETURN NULL;
    ELSIF NOT p_call ? 'key' AND p_computes THEN
        RETURN 'Python code computes its key; give the option key';
    ELSIF jsonb_typeof(value) IS DISTINCT FROM 'string' OR length(value #>> '{}') NOT BETWEEN 1 AND 255 THEN
        RETURN CASE WHEN p_call ? 'key' THEN 'key'
            ELSE format('argument %L, the key of the task,', p_parameter) END || ' must be a text of 1 to 255 characters';
    END IF;
    RETURN NULL;
END
$$;

-- Return the reason why a call with a key cannot set its position in the queue, or NULL. The option "key" gives the
-- key, or null for no key; without the option, the key comes from the task's decorator.
CREATE OR REPLACE FUNCTION horsies_order_problem(p_call jsonb) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    queue text := p_call ->> 'queue';
    has_key boolean := p_call ->> 'key' IS NOT NULL;
    option text := (
        SELECT name FROM unnest('{priority,at,delay,debounce}'::text[]) WITH ORDINALITY AS options (name, place)
        WHERE p_call ->> name IS NOT NULL ORDER BY place LIMIT 1);
BEGIN
    IF option IS NULL THEN
        RETURN NULL;
    ELSIF queue IS NULL OR NOT p_call ? 'key' THEN
        SELECT coalesce(queue, defaults.queue_name), CASE WHEN p_call ? 'key' THEN has_key
            ELSE defaults.key_parameter IS NOT NULL OR defaults.fixed_key IS NOT NULL END
        INTO queue, has_key FROM horsies_task_defaults AS defaults WHERE defaults.task_name = p_call ->> 'task';
    END IF;
    IF has_key AND (
        SELECT stored.is_fifo FROM horsies_lanes AS stored WHERE stored.queue_name = queue AND stored.lane = 0) THEN
        RETURN format('queue %L runs the tasks of a key in the order of their sends; leave %s out', queue, option);
    END IF;
    RETURN NULL;
END
$$;

-- Return the first reason why a call cannot be sent, in one sentence, or NULL. A value of null means "not given".
CREATE OR REPLACE FUNCTION horsies_call_problem(
    p_call jsonb, p_queues jsonb, p_reject_bytes bigint, p_key_parameter text, p_computes_key boolean) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    known text[] := '{task,kwargs,queue,priority,delay,at,good_until,timeout_ms,idempotency_key,unique,headers,retention,debounce,key}';
    given jsonb;
    unknown text;
    size bigint;
BEGIN
    SELECT coalesce(jsonb_object_agg(member.key, member.value), '{}') INTO given
    FROM jsonb_each(p_call) AS member WHERE member.key = 'kwargs' OR member.value <> jsonb 'null';
    SELECT member.key INTO unknown FROM jsonb_each(p_call) AS member
    WHERE member.key <> ALL(known) ORDER BY member.key LIMIT 1;
    IF unknown IS NOT NULL THEN
        RETURN format('a send has no option %L; the options are %s', left(unknown, 100),
            array_to_string(known, ', '));
    ELSIF jsonb_typeof(given -> 'kwargs') <> 'object' THEN
        RETURN 'kwargs must be a JSON object, not ' || jsonb_typeof(given -> 'kwargs');
    ELSIF given ? 'priority' AND given ->> 'priority' !~ '^([1-9]\d?|100)$' THEN
        RETURN 'priority must be a whole number from 1 (first) to 100 (last)';
    ELSIF given ? 'at' AND given ? 'delay' THEN
        RETURN 'at and delay exclude each other; leave one of them out';
    ELSIF given ? 'delay' AND horsies_duration(given -> 'delay', interval '0') IS NULL THEN
        RETURN 'delay must be an interval or a number of seconds, from 0 to 100 years';
    ELSIF given ? 'at' AND horsies_moment(given -> 'at') IS NULL THEN
        RETURN 'at must be a time with its offset from UTC, such as 2030-01-01T12:00:00Z';
    ELSIF given ? 'good_until' AND horsies_moment(given -> 'good_until') IS NULL THEN
        RETURN 'good_until must be a time with its offset from UTC, such as 2030-01-01T12:00:00Z';
    ELSIF given ? 'timeout_ms' AND (given ->> 'timeout_ms' !~ '^\d{3,10}$'
            OR (given ->> 'timeout_ms')::bigint NOT BETWEEN 100 AND 2147483647) THEN
        RETURN 'timeout_ms must be a whole number of milliseconds from 100 to 2,147,483,647';
    ELSIF given ? 'idempotency_key' AND (jsonb_typeof(given -> 'idempotency_key') <> 'string'
            OR length(given ->> 'idempotency_key') NOT BETWEEN 1 AND 255) THEN
        RETURN 'idempotency_key must be a text of 1 to 255 characters';
    ELSIF coalesce(given ->> 'unique', 'forever') NOT IN ('while_waiting', 'while_open', 'forever') THEN
        RETURN 'unique must be ''while_waiting'', ''while_open'' or ''forever''';
    ELSIF coalesce(given ->> 'unique', 'forever') <> 'forever' AND NOT given ? 'idempotency_key' THEN
        RETURN 'unique needs an idempotency_key, which names the tasks that must not exist twice';
    ELSIF given ? 'retention' AND horsies_duration(given -> 'retention', interval '1 second') IS NULL THEN
        RETURN 'retention must be an interval or a number of seconds, from one second to 100 years';
    END IF;
    size := 2 + octet_length(horsies_canonical(coalesce(given -> 'kwargs', '{}')));
    IF size > p_reject_bytes THEN
        RETURN format('the arguments are %s bytes, more than payload.reject_bytes (%s); store the data and send a '
            'reference to it', to_char(size, 'FM9,999,999,999'), to_char(p_reject_bytes, 'FM9,999,999,999'));
    END IF;
    RETURN coalesce(horsies_key_problem(p_call, p_key_parameter, p_computes_key),
        CASE WHEN given ? 'debounce' THEN horsies_debounce_problem(given) END,
        horsies_queue_problem(given -> 'queue', p_queues),
        CASE WHEN given ? 'headers' THEN horsies_headers_problem(given -> 'headers') END,
        horsies_order_problem(p_call));
END
$$;

-- Return a sentence that explains why the first invalid call cannot be sent, or NULL if all calls are valid. A call
-- without a name, or of the wrong type, has no defaults, so it is not checked any further.
CREATE OR REPLACE FUNCTION horsies_calls_problem(p_calls jsonb) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF jsonb_typeof(p_calls) IS DISTINCT FROM 'array' THEN
        RETURN 'p_calls must be a JSON array of calls, not '
            || coalesce(jsonb_typeof(p_calls), 'null') || '.';
    END IF;
    RETURN (
        SELECT CASE WHEN jsonb_array_length(p_calls) > 1
                THEN format('Call %s of p_calls: ', found.place - 1) ELSE '' END || found.problem || '.'
        FROM (
            SELECT sent.place, CASE
                WHEN jsonb_typeof(sent.call) <> 'object' THEN
                    'a call is a JSON object, not ' || jsonb_typeof(sent.call)
                WHEN jsonb_typeof(sent.call -> 'task') IS DISTINCT FROM 'string' OR sent.call ->> 'task' ~ '^\s*$'
                    OR length(sent.call ->> 'task') > 255 THEN 'a task name is a text of 1 to 255 characters'
                WHEN starts_with(sent.call ->> 'task', 'horsies.') THEN
                    'names that begin with ''horsies.'' belong to horsies itself'
                ELSE format('Task %L was not sent: ', sent.call ->> 'task') || horsies_call_problem(
                    sent.call, defaults.queues, coalesce(defaults.reject_bytes, 16777216), defaults.key_parameter,
                    coalesce(defaults.computes_key, false)) END AS problem
            FROM jsonb_array_elements(p_calls) WITH ORDINALITY AS sent (call, place)
            LEFT JOIN horsies_task_defaults AS defaults
                ON jsonb_typeof(sent.call) = 'object' AND defaults.task_name = sent.call ->> 'task') AS found
        WHERE found.problem IS NOT NULL ORDER BY found.place LIMIT 1);
END
$$;

-- Return the column values for these checked calls, including the defaults of their tasks, in the order of the calls.
-- The options are written in the same order as in TaskOptions.to_json, because the claim for async children compares
-- their first characters.
CREATE OR REPLACE FUNCTION horsies_call_rows(p_calls jsonb, p_ids uuid[], p_now timestamptz) RETURNS TABLE (
    id uuid, task_name text, queue_name text, priority integer, kwargs text, enqueued_at timestamptz,
    good_until timestamptz, max_retries integer, task_options text, timeout_ms integer, retention interval,
    idempotency_key text, idempotency_sha text, unique_key text, unique_while text, quiet interval, at_most interval,
    lane_key text, lane bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY
    SELECT p_ids[sent.place], sent.call ->> 'task', line.queue_name, line.priority,
        -- The same rule as in encryption.py: an unencrypted value must not contain the mark of encrypted values.
        replace(line.kwargs, '"__horsies_encrypted__":"', '"\u005f_horsies_encrypted__":"'),
        greatest(horsies_moment(sent.call -> 'at'),
            p_now + coalesce(horsies_duration(sent.call -> 'delay', interval '0'), interval '0')),
        line.good_until, coalesce(defaults.max_retries, 0), line.options,
        coalesce((sent.call ->> 'timeout_ms')::integer, defaults.timeout_ms),
        coalesce(horsies_duration(sent.call -> 'retention', interval '1 second'),
            (defaults.queues -> line.queue_name ->> 'retention_seconds')::float8 * interval '1 second'),
        CASE WHEN line.unique_while IS NULL THEN sent.call ->> 'idempotency_key' END,
        -- The same digest as in tasks/request.py: of the request without times and headers, with its parts separated by
        -- NUL.
        CASE WHEN sent.call ->> 'idempotency_key' IS NOT NULL THEN encode(sha256(
            convert_to(sent.call ->> 'task', 'UTF8') || '\x00'::bytea || convert_to(line.queue_name, 'UTF8')
            || '\x00'::bytea || convert_to(line.priority::text, 'UTF8') || '\x00'::bytea || '[]'::bytea
            || '\x00'::bytea || convert_to(line.kwargs, 'UTF8')), 'hex') END,
        CASE WHEN line.unique_while IS NOT NULL THEN sent.call ->> 'idempotency_key' END, line.unique_while,
        horsies_duration(sent.call -> 'debounce' -> 'quiet', interval '0'),
        horsies_duration(sent.call -> 'debounce' -> 'at_most', interval '0'), line.lane_key,
        horsies_lane_v1(line.queue_name, line.lane_key)
    FROM jsonb_array_elements(p_calls) WITH ORDINALITY AS sent (call, place)
    LEFT JOIN horsies_task_defaults AS defaults ON defaults.task_name = sent.call ->> 'task'
    CROSS JOIN LATERAL (
        SELECT coalesce(sent.call ->> 'queue', defaults.queue_name) AS queue_name,
            horsies_canonical(coalesce(sent.call -> 'kwargs', '{}')) AS kwargs,
            horsies_moment(sent.call -> 'good_until') AS good_until,
            -- A call whose option "key" is null gets no key, even if its task has one.
            CASE WHEN sent.call ? 'key' THEN sent.call ->> 'key'
                ELSE coalesce(sent.call -> 'kwargs' ->> defaults.key_parameter, defaults.fixed_key) END AS lane_key,
            CASE WHEN sent.call ->> 'debounce' IS NOT NULL THEN 'waiting' ELSE nullif(
                replace(coalesce(sent.call ->> 'unique', 'forever'), 'while_', ''), 'forever') END AS unique_while
        OFFSET 0) AS given
    CROSS JOIN LATERAL (
        SELECT given.*, coalesce((sent.call ->> 'priority')::integer,
                (defaults.queues -> given.queue_name ->> 'priority')::integer, 100) AS priority,
            concat('{', CASE WHEN defaults.is_async THEN '"async":true,' END,
                '"retry_policy":', coalesce(defaults.retry_policy::text, 'null'), ',"good_until":',
                coalesce('"' || to_char(given.good_until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
                    || '"', 'null'),
                CASE WHEN sent.call -> 'headers' NOT IN ('{}', 'null')
                    THEN ',"headers":' || (sent.call -> 'headers')::text END,
                CASE WHEN defaults.burst THEN ',"burst":true' END, '}') AS options
        OFFSET 0) AS line
    ORDER BY sent.place;
END
$$;

-- Return the task that holds an idempotency key, or NULL if no task holds the key any more. Raises an error if that
-- task was sent with a different request. The condition on unique keys repeats the condition of their index word for
-- word, so that a plan made on an empty table does not read the whole table later.
CREATE OR REPLACE FUNCTION horsies_key_holder(p_name text, p_key text, p_unique_key text, p_sha text) RETURNS uuid
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    holder record;
BEGIN
    IF p_unique_key IS NULL THEN
        SELECT task.id, task.idempotency_sha INTO holder FROM horsies_tasks AS task
        WHERE task.task_name = p_name AND task.idempotency_key = p_key;
    ELSE
        SELECT task.id, task.idempotency_sha INTO holder FROM horsies_tasks AS task
        WHERE task.task_name = p_name AND task.unique_key = p_unique_key AND task.unique_key IS NOT NULL
          AND CASE WHEN task.unique_while = text 'open'
              THEN task.status::text IN (text 'PENDING', text 'CLAIMED', text 'RUNNING')
              ELSE task.status::text = text 'PENDING' AND task.generation = 0 AND task.retry_count = 0 END;
    END IF;
    IF holder.idempotency_sha LIKE 'k%' THEN
        RAISE EXCEPTION 'Task % already exists and was sent by an application with a codec, whose requests the database '
            'cannot compare; use a new idempotency key, or send it from the application.', holder.id
            USING ERRCODE = 'unique_violation';
    ELSIF holder.id IS NOT NULL AND holder.idempotency_sha IS DISTINCT FROM p_sha THEN
        RAISE EXCEPTION 'Task % already exists with a different request; use a new idempotency key for it.',
            holder.id USING ERRCODE = 'unique_violation';
    END IF;
    RETURN holder.id;
END
$$;

-- Nothing -> PENDING, or new values for the task that waits with this key and has not been claimed. The task becomes
-- due after the quiet time, but no later than "p_at_most_seconds" after the first send. Returns the task, or NULL if
-- the key belongs to a task in another queue or lane, or to a task that was not debounced. If a claim has locked the
-- waiting task's row, this send waits for the claim and then inserts a new task.
CREATE OR REPLACE FUNCTION horsies_debounce_v1(
    p_id uuid, p_task_name text, p_queue_name text, p_priority integer, p_args text, p_kwargs text,
    p_sent_at timestamptz, p_quiet_seconds float8, p_at_most_seconds float8, p_good_until timestamptz,
    p_max_retries integer, p_task_options text, p_timeout_ms integer, p_retention_seconds float8,
    p_enqueue_sha text, p_unique_key text, p_sha text, p_lane_key text DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    now_at timestamptz := clock_timestamp();
    stored uuid;
BEGIN
    -- The same send is repeated because its response was lost.
    IF EXISTS (SELECT FROM horsies_tasks AS task WHERE task.id = p_id AND task.enqueue_sha = p_enqueue_sha) THEN
        RETURN p_id;
    END IF;
    INSERT INTO horsies_tasks AS task (
        id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at,
        good_until, max_retries, task_options, timeout_ms, enqueue_sha, idempotency_sha, retention, unique_key,
        unique_while, burst, lane_key, lane, held)
    VALUES (p_id, p_task_name, p_queue_name, p_priority, p_args, p_kwargs, p_sent_at, now_at, now_at,
        now_at + p_quiet_seconds * interval '1 second', p_good_until, p_max_retries, p_task_options, p_timeout_ms,
        p_enqueue_sha, p_sha, p_retention_seconds * interval '1 second', p_unique_key, 'waiting',
        horsies_is_burst_v1(p_task_options), p_lane_key, horsies_lane_v1(p_queue_name, p_lane_key),
        p_lane_key IS NOT NULL)
    ON CONFLICT (task_name, unique_key) WHERE unique_key IS NOT NULL
        AND CASE WHEN unique_while = text 'open' THEN status::text IN (text 'PENDING', text 'CLAIMED', text 'RUNNING')
            ELSE status::text = text 'PENDING' AND generation = 0 AND retry_count = 0 END
    DO UPDATE SET priority = EXCLUDED.priority, args = EXCLUDED.args, kwargs = EXCLUDED.kwargs,
        enqueued_at = least(EXCLUDED.enqueued_at, task.created_at + p_at_most_seconds * interval '1 second'),
        good_until = EXCLUDED.good_until, max_retries = EXCLUDED.max_retries,
        task_options = EXCLUDED.task_options, timeout_ms = EXCLUDED.timeout_ms,
        enqueue_sha = EXCLUDED.enqueue_sha, idempotency_sha = EXCLUDED.idempotency_sha,
        retention = EXCLUDED.retention, burst = EXCLUDED.burst, updated_at = now_at
    WHERE task.unique_while = 'waiting' AND task.queue_name = EXCLUDED.queue_name
      AND task.lane_key IS NOT DISTINCT FROM EXCLUDED.lane_key
    RETURNING task.id INTO stored;
    RETURN stored;
END
$$;

-- Nothing -> PENDING for each call in a JSON array, all or none; returns the ids in the order of the calls. A call is
-- an object with the parameters of horsies_send_v1 and its options. One statement inserts all rows, so workers get one
-- notification per queue. For a call whose idempotency key is already in use, the result is the task that holds the
-- key. If the array is NULL, nothing is sent, because jsonb_agg returns NULL for no rows.
CREATE OR REPLACE FUNCTION horsies_send_many_v1(p_calls jsonb) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
DECLARE
    problem text := horsies_calls_problem(p_calls);
    sent_at timestamptz;
    ids uuid[];
    answer uuid[];
    unsent uuid[];
    kept record;
    place integer;
BEGIN
    IF p_calls IS NULL THEN
        RETURN;
    ELSIF problem IS NOT NULL THEN
        RAISE EXCEPTION '%', problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
    sent_at := clock_timestamp();
    -- The ids are sorted, because tasks that are due at the same time are claimed in id order.
    ids := ARRAY(SELECT made.id FROM (
        SELECT horsies_new_id() AS id FROM generate_series(1, jsonb_array_length(p_calls))) AS made ORDER BY made.id);
    answer := ids;
    unsent := ids;
    WHILE unsent <> '{}' LOOP
        -- After the first round, "unsent" contains the calls whose idempotency key has become free, because the task
        -- that held the key has since ended or been deleted.
        FOR kept IN
            WITH line AS MATERIALIZED (
                SELECT made.* FROM horsies_call_rows(p_calls, ids, sent_at) AS made WHERE made.id = ANY(unsent)),
            inserted AS (
                INSERT INTO horsies_tasks (
                    id, task_name, queue_name, priority, args, kwargs, sent_at, created_at, updated_at, enqueued_at,
                    good_until, max_retries, task_options, timeout_ms, enqueue_sha, idempotency_key,
                    idempotency_sha, retention, unique_key, unique_while, burst, lane_key, lane, held)
                SELECT line.id, line.task_name, line.queue_name, line.priority, '[]', line.kwargs, sent_at, sent_at,
                    sent_at, line.enqueued_at, line.good_until, line.max_retries, line.task_options,
                    line.timeout_ms, encode(sha256(convert_to(line.id::text, 'UTF8')), 'hex'),
                    line.idempotency_key, line.idempotency_sha, line.retention, line.unique_key, line.unique_while,
                    horsies_is_burst_v1(line.task_options), line.lane_key, line.lane, line.lane_key IS NOT NULL
                FROM line WHERE line.quiet IS NULL ORDER BY line.id
                ON CONFLICT DO NOTHING RETURNING horsies_tasks.id)
            SELECT line.*, inserted.id IS NOT NULL AS is_new FROM line LEFT JOIN inserted ON inserted.id = line.id
        LOOP
            IF kept.quiet IS NOT NULL THEN
                place := array_position(ids, kept.id);
                answer[place] := horsies_debounce_v1(
                    kept.id, kept.task_name, kept.queue_name, kept.priority, '[]', kept.kwargs, sent_at,
                    extract(epoch FROM kept.quiet)::float8, extract(epoch FROM kept.at_most)::float8,
                    kept.good_until, kept.max_retries, kept.task_options, kept.timeout_ms,
                    extract(epoch FROM kept.retention)::float8,
                    encode(sha256(convert_to(kept.id::text, 'UTF8')), 'hex'), kept.unique_key,
                    kept.idempotency_sha, kept.lane_key);
                IF answer[place] IS NULL THEN
                    RAISE EXCEPTION 'A task % with this idempotency key waits on another queue or with another key, or '
                        'was sent without debounce; use a new idempotency key.', quote_literal(kept.task_name)
                        USING ERRCODE = 'unique_violation';
                END IF;
            ELSIF NOT kept.is_new THEN
                answer[array_position(ids, kept.id)] := horsies_key_holder(
                    kept.task_name, kept.idempotency_key, kept.unique_key, kept.idempotency_sha);
            END IF;
        END LOOP;
        unsent := ARRAY(SELECT ids[at.place] FROM generate_subscripts(ids, 1) AS at (place)
            WHERE answer[at.place] IS NULL);
        answer := ARRAY(
            SELECT coalesce(answer[at.place], ids[at.place]) FROM generate_subscripts(ids, 1) AS at (place));
    END LOOP;
    RETURN QUERY SELECT unnest(answer);
END
$$;

-- Nothing -> PENDING for one task, in the caller's transaction; returns its id. "p_options" contains rarely used
-- options: at, good_until, timeout_ms, unique, headers, retention, debounce, key.
CREATE OR REPLACE FUNCTION horsies_send_v1(
    p_task text, p_kwargs jsonb DEFAULT '{}', p_queue text DEFAULT NULL, p_priority integer DEFAULT NULL,
    p_delay interval DEFAULT NULL, p_idempotency_key text DEFAULT NULL, p_options jsonb DEFAULT '{}')
RETURNS uuid LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_typeof(p_options) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'Task % was not sent: p_options must be a JSON object, not %.', quote_nullable(p_task),
            coalesce(jsonb_typeof(p_options), 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN (SELECT horsies_send_many_v1(jsonb_build_array(
        p_options || jsonb_build_object('task', p_task, 'kwargs', p_kwargs) || jsonb_strip_nulls(jsonb_build_object(
            'queue', p_queue, 'priority', p_priority, 'delay', p_delay, 'idempotency_key', p_idempotency_key)))));
END
$$;
