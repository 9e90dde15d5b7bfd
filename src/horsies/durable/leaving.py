"""The ways in which a call of a durable function ends without an outcome.

They do not inherit from ``Exception``, so an ``except Exception`` in user code cannot keep a run in its
process.
"""

from __future__ import annotations

from horsies.parking import ParkRequest
from horsies.task_result import TaskError


class Leaving(BaseException):
    """Ends the call of a durable function."""


class Parked(Leaving):
    """The run waits; another call continues it."""

    def __init__(self, request: ParkRequest) -> None:
        super().__init__(request)
        self.request = request


class RunLost(Leaving):
    """The run belongs to another attempt."""


class RunCancelled(Leaving):
    """The run was cancelled before its next step; ``text`` describes its end once its clean-up is done."""

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
