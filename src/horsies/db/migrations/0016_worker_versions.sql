-- The release of horsies that a worker runs, NULL for one older than this column.
ALTER TABLE horsies_workers ADD COLUMN version varchar(32);
