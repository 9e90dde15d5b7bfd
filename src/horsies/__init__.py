"""Horsies: a task queue and workflow engine whose only server is PostgreSQL."""
