"""The worker: one parent loop and its pool of child processes."""
