"""The scheduler: turns due slots of schedules into tasks and workflow runs, once per slot."""
