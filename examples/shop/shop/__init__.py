"""An order system: a checkout that sends tasks in its own transaction, and the tasks."""
