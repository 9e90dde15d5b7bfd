"""SQL statements: each catalogue module declares the statements of the .sql file beside it."""
