-- Attempts are deleted with their task by a trigger, horsies_task_deleted, instead of a foreign key: the key was
-- checked for every attempt, although the statement that inserts one has just updated its task.
ALTER TABLE horsies_task_attempts DROP CONSTRAINT horsies_task_attempts_task_id_fkey;
