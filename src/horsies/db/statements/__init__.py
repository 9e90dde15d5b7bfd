"""SQL statements: each catalogue module declares the statements in the .sql file next to it."""
