"""The state machine of task rows as data, and the statuses of workflows and their nodes.

Every verb is one guarded SQL statement; the guards, the tests and the documentation agree on the
table here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias


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
TASK_OPEN_STATES: frozenset[TaskStatus] = frozenset(TaskStatus) - TASK_TERMINAL_STATES
TASK_IN_FLIGHT_STATES: frozenset[TaskStatus] = frozenset({TaskStatus.CLAIMED, TaskStatus.RUNNING})
TASK_UNSTARTED_STATES: frozenset[TaskStatus] = frozenset({TaskStatus.PENDING, TaskStatus.CLAIMED})


class TaskAttemptOutcome(StrEnum):
    """The outcome of one attempt: a value, an error, or the loss of its process."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    WORKER_FAILURE = "WORKER_FAILURE"


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
WORKFLOW_OPEN_STATES: frozenset[WorkflowStatus] = (
    frozenset(WorkflowStatus) - WORKFLOW_TERMINAL_STATES
)


class WorkflowTaskStatus(StrEnum):
    """The status of a node of a run."""

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
WORKFLOW_TASK_WAITING_STATES: frozenset[WorkflowTaskStatus] = frozenset(
    {WorkflowTaskStatus.PENDING, WorkflowTaskStatus.READY}
)


TaskVerb: TypeAlias = Literal[
    "claim_and_start",
    "claim",
    "start",
    "complete",
    "fail",
    "retry",
    "release",
    "expire",
    "cancel",
]


@dataclass(frozen=True, slots=True)
class Transition:
    """One verb: the statuses it applies to and the status it leads to."""

    verb: TaskVerb
    from_statuses: frozenset[TaskStatus]
    to_status: TaskStatus


_PENDING = frozenset({TaskStatus.PENDING})
_CLAIMED = frozenset({TaskStatus.CLAIMED})
_RUNNING = frozenset({TaskStatus.RUNNING})

# A claimed task goes straight to an idle child, so claim and start are one verb; CLAIMED is the status
# of tasks prefetched ahead of a free child. Release takes back tasks that no child received: such a
# row may be RUNNING although user code never saw it. Cancelling a RUNNING task takes two steps, the
# request and the end that its worker records. A crash is not a verb of its own: it ends in fail or
# retry like any other failed attempt.
TASK_TRANSITIONS: tuple[Transition, ...] = (
    Transition("claim_and_start", _PENDING, TaskStatus.RUNNING),
    Transition("claim", _PENDING, TaskStatus.CLAIMED),
    Transition("start", _CLAIMED, TaskStatus.RUNNING),
    Transition("complete", _RUNNING, TaskStatus.COMPLETED),
    Transition("fail", _RUNNING, TaskStatus.FAILED),
    Transition("retry", _RUNNING, TaskStatus.PENDING),
    Transition("release", _CLAIMED | _RUNNING, TaskStatus.PENDING),
    Transition("expire", _PENDING, TaskStatus.EXPIRED),
    Transition("cancel", _PENDING | _CLAIMED | _RUNNING, TaskStatus.CANCELLED),
)

_BY_VERB: dict[TaskVerb, Transition] = {item.verb: item for item in TASK_TRANSITIONS}


def allowed(verb: TaskVerb, status: TaskStatus) -> TaskStatus | None:
    """Return the status that the verb leads to, or None when it does not apply."""
    transition = _BY_VERB[verb]
    return transition.to_status if status in transition.from_statuses else None
