"""The return values of starting, reading and controlling a run; errors are values, not exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from horsies.result import Result
from horsies.states import SignalDelivery as SignalDelivery
from horsies.states import WorkflowStatus, WorkflowTaskStatus
from horsies.task_result import SubWorkflowSummary, TaskError, TaskResult, json_object

T = TypeVar("T")


class WorkflowStartErrorCode(StrEnum):
    """The reason why a run was not started."""

    BROKER_NOT_CONFIGURED = "BROKER_NOT_CONFIGURED"
    """The workflow was built without an application."""
    VALIDATION_FAILED = "VALIDATION_FAILED"
    """The id is not a UUID, the key cannot be stored, or the id or key belongs to a run of another workflow.
    """
    ENQUEUE_FAILED = "ENQUEUE_FAILED"
    """The database did not store the run, or its confirmation was lost; ``error.retryable`` shows
    whether to try again.
    """
    INTERNAL_FAILED = "INTERNAL_FAILED"
    """An unexpected error occurred while the start was prepared."""
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    """The id or key belongs to a run of this workflow with other nodes or arguments."""
    SEND_SUPPRESSED = "SEND_SUPPRESSED"
    """Starts are suppressed, like sends, while task modules are imported."""


@dataclass(frozen=True, slots=True)
class WorkflowStartError:
    """The error of a start that stored nothing, or whose COMMIT is in doubt (``retryable``: use
    ``retry_start``). If ``in_transaction`` is set, the start belonged to the caller's transaction;
    repeat it in a transaction.
    """

    code: WorkflowStartErrorCode
    """The reason why the run was not started, or why its start is in doubt."""
    message: str
    """A sentence that names the place of the mistake and the fix."""
    retryable: bool
    """Whether ``retry_start`` may repeat the start."""
    workflow_name: str
    """The name of the workflow."""
    workflow_id: str
    """The id that the run has, or would have."""
    exception: BaseException | None = field(default=None, repr=False)
    """The exception behind the error, if there is one."""
    workflow_key: str | None = None
    """The ``workflow_key`` passed to ``start``."""
    in_transaction: bool = False
    """Whether the start belonged to your own transaction."""
    key: str | None = None
    """The ``key`` of the run's tasks, passed to ``start``."""


WorkflowStartResult: TypeAlias = Result[T, WorkflowStartError]
"""The result of a start: ``Ok`` with a handle, or ``Err`` with a ``WorkflowStartError``."""


class HandleErrorCode(StrEnum):
    """The reason why a run could not be read or controlled."""

    WORKFLOW_NOT_FOUND = "WORKFLOW_NOT_FOUND"
    """There is no run with this id."""
    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    """The run has no node with this id."""
    SIGNAL_NOT_FOUND = "SIGNAL_NOT_FOUND"
    """No node of the run waits for a signal of this name; the message lists the existing names."""
    NOTHING_TO_RETRY = "NOTHING_TO_RETRY"
    """No node has failed, or the given node has not failed."""
    WORKFLOW_NOT_RETRYABLE = "WORKFLOW_NOT_RETRYABLE"
    """The run completed, was cancelled or has expired, or its parent run continued without it."""
    WORKFLOW_ENDED = "WORKFLOW_ENDED"
    """The run has ended and accepts no more signals."""
    VALIDATION_FAILED = "VALIDATION_FAILED"
    """The value of a signal does not have the declared type, its name is not printable text, ``until`` names
    no status, or ``timeout_ms`` is not a whole number.
    """
    WAIT_TIMEOUT = "WAIT_TIMEOUT"
    """The run did not reach the awaited status in time."""
    BROKER_NOT_CONFIGURED = "BROKER_NOT_CONFIGURED"
    """The handle has no connection."""
    DB_OPERATION_FAILED = "DB_OPERATION_FAILED"
    """The database did not respond; ``error.retryable`` shows whether to try again."""
    LOOP_RUNNER_FAILED = "LOOP_RUNNER_FAILED"
    """``wait`` was called inside a running event loop; await ``wait_async``."""
    INTERNAL_FAILED = "INTERNAL_FAILED"
    """Stored data cannot be read, or there is a bug in Horsies."""


@dataclass(frozen=True, slots=True)
class HandleOperationError:
    """The error of an operation that had no effect on a run; ``retryable`` if a later call may succeed."""

    code: HandleErrorCode
    """The reason why the run could not be read or controlled."""
    message: str
    """A sentence with the reason and the fix."""
    retryable: bool
    """Whether the same call may succeed later."""
    workflow_id: str
    """The run to which the call applied."""
    exception: BaseException | None = field(default=None, repr=False)
    """The exception behind the error, if there is one."""


HandleResult: TypeAlias = Result[T, HandleOperationError]
"""The result of a call on a run's handle: ``Ok``, or ``Err`` with a ``HandleOperationError``."""


@dataclass(frozen=True, slots=True)
class WorkflowTaskInfo:
    """A node in a run or, if ``item_index`` is set, one item of a map node.

    ``name`` is the name of the task or sub-workflow. ``sub_workflow_status`` is the status of the child
    run, which may be paused while this run continues.
    """

    node_id: str
    """The id of the node."""
    index: int
    """The position of the node in the workflow."""
    name: str
    """The name of the task or sub-workflow."""
    status: WorkflowTaskStatus
    """The status at the time of the query."""
    result: TaskResult[Any, TaskError] | None = None
    """The outcome, if the node has one and the caller requested results."""
    started_at: datetime | None = None
    """When the node started."""
    completed_at: datetime | None = None
    """When the node ended."""
    sub_workflow_id: str | None = None
    """The id of the child run."""
    sub_workflow_summary: SubWorkflowSummary[Any] | None = None
    """How the child run ended."""
    kind: str = "task"
    """The kind of node, such as ``task``, ``map`` or ``sleep``."""
    item_index: int | None = None
    """The position of the item in its map, or None for a node."""
    task_id: str | None = None
    """The id of the node's task."""
    retry_count: int = 0
    """How many retries the node's task has used."""
    enqueued_at: datetime | None = None
    """When the node's task became claimable by workers."""
    sub_workflow_status: WorkflowStatus | None = None
    """The status of the child run."""
    items_total: int | None = None
    """How many items a map has."""
    items_open: int | None = None
    """How many items of the map have not ended."""
    items_failed: int | None = None
    """How many items of the map failed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the node as plain JSON values."""
        return json_object(self)


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """A run as stored in the database.

    ``paused_descendants`` are the paused runs below this one; it waits for them even while its own
    status is RUNNING. ``matched_case`` is the position of the success case that was met.
    """

    workflow_id: str
    """The id of the run."""
    name: str
    """The name of the workflow."""
    status: WorkflowStatus
    """The status at the time of the query."""
    definition_key: str
    """The identity of the workflow's definition."""
    workflow_key: str | None
    """The key passed to ``start``, or None."""
    error: TaskError | None
    """The error of a failed run."""
    matched_case: int | None
    """The position of the success case that was met."""
    parent_workflow_id: str | None
    """The run that contains this one as a sub-workflow, or None."""
    root_workflow_id: str
    """The outermost run above this one, or the run itself."""
    depth: int
    """How many runs are above this one."""
    total_nodes: int
    """How many nodes the run has."""
    open_nodes: int
    """How many nodes of the run have not ended."""
    failed_nodes: int
    """How many nodes of the run failed."""
    sent_at: datetime | None
    """When the run was started, or the slot of the schedule that started it."""
    started_at: datetime
    """When the run was stored."""
    paused_at: datetime | None
    """When the run was paused, or None."""
    completed_at: datetime | None
    """When the run ended, or None."""
    paused_descendants: list[str] = field(default_factory=list)
    """The ids of the paused runs below this run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain JSON values."""
        error = None if self.error is None else self.error.to_dict()
        return json_object(self) | {"error": error}
