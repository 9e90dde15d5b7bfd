-- The span of an attempt in the form of the W3C header, NULL without tracing. A retry links to the attempt
-- before it. The context of a send is part of the task's options.
ALTER TABLE horsies_task_attempts ADD COLUMN traceparent varchar(55);
