"""Explains why a task, node, run, queue or schedule is not making progress."""
