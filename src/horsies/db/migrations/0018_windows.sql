-- Windows: whether a task may wait in a child behind others, because it is tried again after a crash or says so.
ALTER TABLE horsies_tasks ADD COLUMN burst boolean NOT NULL DEFAULT false;
