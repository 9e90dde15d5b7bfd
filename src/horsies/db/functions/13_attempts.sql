-- When a task is deleted, its attempts, their logs, its large payload and the records of its durable function are
-- deleted with it, by retention as well as by a manual statement. No attempt remains without its task: the statement
-- that inserts an attempt has updated the task's row and holds the row lock until it commits. A delete waits for that
-- commit and then sees the attempt, because this statement takes its snapshot after the wait. If the delete commits
-- first, the update matches no task and inserts no attempt.
CREATE OR REPLACE FUNCTION horsies_delete_attempts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        -- The TRUNCATE may include the attempts, and PostgreSQL rejects a second TRUNCATE of that table.
        DELETE FROM horsies_task_attempts;
        DELETE FROM horsies_steps;
        DELETE FROM horsies_task_signals;
        DELETE FROM horsies_parked;
        DELETE FROM horsies_deadlines;
        DELETE FROM horsies_task_logs;
        PERFORM horsies_disown_payloads_v1(ARRAY(SELECT owner.owner_id FROM horsies_payload_owners AS owner));
    ELSE
        DELETE FROM horsies_task_attempts AS attempt
        WHERE attempt.task_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        IF EXISTS (SELECT FROM horsies_task_logs) THEN
            DELETE FROM horsies_task_logs AS log WHERE log.task_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
        -- The following tables are empty if no application uses durable functions.
        IF EXISTS (SELECT FROM horsies_steps) THEN
            DELETE FROM horsies_steps AS step WHERE step.task_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
        IF EXISTS (SELECT FROM horsies_task_signals) THEN
            DELETE FROM horsies_task_signals AS sent
            WHERE sent.task_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
        IF EXISTS (SELECT FROM horsies_parked) THEN
            DELETE FROM horsies_parked AS parked
            WHERE parked.task_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
        IF EXISTS (SELECT FROM horsies_deadlines) THEN
            DELETE FROM horsies_deadlines AS deadline
            WHERE deadline.task_id = ANY(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
        IF EXISTS (SELECT FROM horsies_payload_owners) THEN
            PERFORM horsies_disown_payloads_v1(ARRAY(SELECT deleted.id FROM deleted));
        END IF;
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER horsies_task_deleted AFTER DELETE ON horsies_tasks
    REFERENCING OLD TABLE AS deleted
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_delete_attempts();

CREATE OR REPLACE TRIGGER horsies_tasks_truncated AFTER TRUNCATE ON horsies_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION horsies_delete_attempts();
