"""Durable functions: tasks with recorded steps, so that a run continues after any crash or wait."""
