"""The code that runs in a child process. It imports nothing from the parent."""
