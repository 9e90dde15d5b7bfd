"""Operator functions: read queues, tasks and workers, and control them."""
