"""The code that runs in a child process. It imports none of the parent's modules."""
