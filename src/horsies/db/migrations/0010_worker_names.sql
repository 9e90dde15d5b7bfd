-- The name that an operator gave to a worker (--name); NULL without one. Names need not be unique.
ALTER TABLE horsies_workers ADD COLUMN name text;
