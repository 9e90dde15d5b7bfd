"""Explain: all reasons why a task, node, run, queue or schedule is not making progress."""
