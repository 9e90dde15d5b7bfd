"""Exceptions that end a call of a durable function without an outcome. They do not inherit from
``Exception``, so that an ``except Exception`` in user code cannot catch them.
"""

from __future__ import annotations

from horsies.parking import ParkRequest
from horsies.task_result import TaskError


class Leaving(BaseException):
    """Ends the call of a durable function."""


class Parked(Leaving):
    """The run waits, and a later call continues it."""

    def __init__(self, request: ParkRequest) -> None:
        super().__init__(request)
        self.request = request


class RunLost(Leaving):
    """Another attempt owns the run."""


class RunCancelled(Leaving):
    """The run was cancelled before its next step; ``text`` describes the outcome after its clean-up."""

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text)
        self.text = text


class Unreadable(Leaving):
    """A recorded value is encrypted with a key that this application does not have."""

    def __init__(self, key_id: str) -> None:
        super().__init__(key_id)
        self.key_id = key_id


class RecordRefused(Leaving):
    """The database refuses the record of a step, but the step itself did not fail."""

    def __init__(self, error: TaskError) -> None:
        super().__init__(error)
        self.error = error
