"""The parent's side of the child processes."""
