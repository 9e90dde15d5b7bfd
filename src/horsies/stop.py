"""How a running task is asked to stop: an exception raised inside it.

A time limit, a cancel and a forced shutdown all end in this exception in the child. It is a
BaseException so that ``except Exception`` in user code does not swallow it; ``finally`` blocks and
context managers run as usual.
"""


class TaskStopped(BaseException):
    """Raised inside a task that must stop now; let it pass, or clean up and re-raise it."""
