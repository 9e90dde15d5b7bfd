"""Workflows: graphs of tasks that advance in the transaction that finishes a task."""
