"""The scheduler: turns due slots into tasks and workflow runs, once per slot."""
