"""Task, attempt, workflow and node statuses.

Every change to a task's status is one guarded SQL statement; `docs/internals/state-machine.md` lists
them all.
"""

from __future__ import annotations

from enum import StrEnum

# A busy worker updates seen_at every two seconds.
SILENT_AFTER_SECONDS = 15.0


class TaskStatus(StrEnum):
    """The status of a task."""

    PENDING = "PENDING"
    """Waiting in its queue, perhaps for a retry or a later time."""
    CLAIMED = "CLAIMED"
    """Claimed by a worker, but not started."""
    RUNNING = "RUNNING"
    """In a child process."""
    COMPLETED = "COMPLETED"
    """Ended with a value."""
    FAILED = "FAILED"
    """Ended with an error."""
    CANCELLED = "CANCELLED"
    """Ended by a cancel."""
    EXPIRED = "EXPIRED"
    """The task had not started by its ``good_until``."""

    @property
    def is_terminal(self) -> bool:
        """Whether a task in this status has ended, so that its status no longer changes."""
        return self in TASK_TERMINAL_STATES


TASK_TERMINAL_STATES: frozenset[TaskStatus] = frozenset(
    {TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.EXPIRED}
)
"""The statuses in which a task has ended."""


class TaskAttemptOutcome(StrEnum):
    """The outcome of one attempt: a value, an error, or a lost process."""

    COMPLETED = "COMPLETED"
    """The attempt returned a value."""
    FAILED = "FAILED"
    """The attempt ended with an error."""
    WORKER_FAILURE = "WORKER_FAILURE"
    """The process died or its worker was lost before the attempt reported a result."""


class SignalDelivery(StrEnum):
    """The effect of a signal: a waiting node or step has received it, or it is stored for a later node or
    step.
    """

    DELIVERED = "delivered"
    """A waiting node has received the value."""
    STORED = "stored"
    """The value is stored for a node that will wait for it."""


class WorkflowStatus(StrEnum):
    """The status of a workflow run."""

    PENDING = "PENDING"
    """Stored, but not started; no run is in this status at present."""
    RUNNING = "RUNNING"
    """In progress."""
    PAUSED = "PAUSED"
    """Paused until it is resumed."""
    COMPLETED = "COMPLETED"
    """Ended successfully."""
    FAILED = "FAILED"
    """Ended because nodes failed."""
    CANCELLED = "CANCELLED"
    """Ended by a cancel."""
    EXPIRED = "EXPIRED"
    """Ended because it was paused for too long."""

    @property
    def is_terminal(self) -> bool:
        """Whether a run in this status has ended."""
        return self in WORKFLOW_TERMINAL_STATES


WORKFLOW_TERMINAL_STATES: frozenset[WorkflowStatus] = frozenset(
    {
        WorkflowStatus.COMPLETED,
        WorkflowStatus.FAILED,
        WorkflowStatus.CANCELLED,
        WorkflowStatus.EXPIRED,
    }
)
"""The statuses in which a run has ended."""


class WorkflowTaskStatus(StrEnum):
    """The status of a node in a run."""

    PENDING = "PENDING"
    """Waiting for other nodes."""
    READY = "READY"
    """Its dependencies are met; a map is in this status until its items are created."""
    ENQUEUED = "ENQUEUED"
    """Its task is in the queue, or the node sleeps or waits for a signal."""
    RUNNING = "RUNNING"
    """Its task, its items or its child run are in progress."""
    COMPLETED = "COMPLETED"
    """Ended with a value."""
    FAILED = "FAILED"
    """Ended with an error."""
    SKIPPED = "SKIPPED"
    """Never run, because nodes that it depends on failed or were skipped."""

    @property
    def is_terminal(self) -> bool:
        """Whether a node in this status has ended."""
        return self in WORKFLOW_TASK_TERMINAL_STATES


WORKFLOW_TASK_TERMINAL_STATES: frozenset[WorkflowTaskStatus] = frozenset(
    {WorkflowTaskStatus.COMPLETED, WorkflowTaskStatus.FAILED, WorkflowTaskStatus.SKIPPED}
)
"""The statuses in which a node has ended."""
