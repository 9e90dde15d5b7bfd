"""Webhooks: built-in tasks that notify other systems when tasks and runs end."""
