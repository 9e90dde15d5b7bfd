-- Maps by reference and in steps: the results of items are read from their tasks, and a long list becomes
-- tasks a thousand at a time.

ALTER TABLE horsies_workflow_tasks
    -- The largest number of items that a map may have (payload.max_map_items); NULL without a limit.
    ADD COLUMN max_items integer,
    -- Items that have no task yet, and the index at which the next step looks for them. NULL in a map whose
    -- tasks were inserted all at once.
    ADD COLUMN items_waiting integer,
    ADD COLUMN items_next integer;

-- Functions of the release before, which no statement calls by name.
DROP FUNCTION IF EXISTS horsies_map_elements(horsies_workflow_tasks);
DROP FUNCTION IF EXISTS horsies_items(horsies_workflow_tasks);
DROP FUNCTION IF EXISTS horsies_add_items(horsies_workflow_tasks, json);
DROP FUNCTION IF EXISTS horsies_item_results(horsies_workflow_tasks);
DROP FUNCTION IF EXISTS horsies_failed_items(horsies_workflow_tasks);
DROP FUNCTION IF EXISTS horsies_retry_items(horsies_workflow_tasks);
DROP FUNCTION IF EXISTS horsies_task_result(horsies_tasks);
