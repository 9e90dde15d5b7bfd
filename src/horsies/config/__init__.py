"""Everything configurable: the application, its database, its schedules."""
