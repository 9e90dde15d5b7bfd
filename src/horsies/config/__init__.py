"""The configuration of an application, its database and its schedules."""
