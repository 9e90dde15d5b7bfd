-- Tasks of "async def" functions, for async children: a claim for these finds them behind any number of other
-- tasks. The text is the start of the options that producers store with such a task. Other tasks have no
-- entry here and pay for one comparison.
CREATE INDEX horsies_tasks_claim_async ON horsies_tasks (queue_name, priority, enqueued_at, id)
    WHERE status = 'PENDING' AND NOT held AND task_options LIKE '{"async":true%';
