"""Durable functions: tasks whose steps are recorded, so that a run continues after any crash or wait."""
