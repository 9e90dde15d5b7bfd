"""The worker: one parent loop and a supervisor of child processes."""
