"""Explain: all reasons why a task, node, run, queue or schedule does not move."""
