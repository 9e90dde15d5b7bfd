"""Webhooks: built-in tasks that tell other systems about the ends of tasks and runs."""
