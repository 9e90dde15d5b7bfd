"""Workflows: graphs of tasks, advanced by the same transaction that finishes a task."""
