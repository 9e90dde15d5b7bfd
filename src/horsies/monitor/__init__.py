"""Operator functions: read queues, tasks and workers, and act on them."""
