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
    CLAIMED = "CLAIMED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def is_terminal(self) -> bool:
        """Whether a row in this status never changes again."""
        return self in TASK_TERMINAL_STATES


TASK_TERMINAL_STATES: frozenset[TaskStatus] = frozenset(
    {TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.EXPIRED}
)


class TaskAttemptOutcome(StrEnum):
    """The outcome of one attempt: a value, an error, or the loss of its process."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    WORKER_FAILURE = "WORKER_FAILURE"


class SignalDelivery(StrEnum):
    """The effect of a signal: a waiting node or step received it, or it is stored for a later one."""

    DELIVERED = "delivered"
    STORED = "stored"


class WorkflowStatus(StrEnum):
    """The status of a workflow run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

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


class WorkflowTaskStatus(StrEnum):
    """The status of a node in a run."""

    PENDING = "PENDING"
    READY = "READY"
    ENQUEUED = "ENQUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"

    @property
    def is_terminal(self) -> bool:
        """Whether a node in this status has ended."""
        return self in WORKFLOW_TASK_TERMINAL_STATES


WORKFLOW_TASK_TERMINAL_STATES: frozenset[WorkflowTaskStatus] = frozenset(
    {WorkflowTaskStatus.COMPLETED, WorkflowTaskStatus.FAILED, WorkflowTaskStatus.SKIPPED}
)
