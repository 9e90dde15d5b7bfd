"""The answers to starting, reading and controlling a run: values, never exceptions."""

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
    """Why a run was not started."""

    BROKER_NOT_CONFIGURED = "BROKER_NOT_CONFIGURED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    ENQUEUE_FAILED = "ENQUEUE_FAILED"
    INTERNAL_FAILED = "INTERNAL_FAILED"
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    SEND_SUPPRESSED = "SEND_SUPPRESSED"


@dataclass(frozen=True, slots=True)
class WorkflowStartError:
    """A start that stored nothing, or whose COMMIT is in doubt (``retryable``: use ``retry_start``).

    ``in_transaction`` is set if the start belonged to the caller's transaction; repeat it with a
    transaction.
    """

    code: WorkflowStartErrorCode
    message: str
    retryable: bool
    workflow_name: str
    workflow_id: str
    exception: BaseException | None = field(default=None, repr=False)
    workflow_key: str | None = None
    in_transaction: bool = False


WorkflowStartResult: TypeAlias = Result[T, WorkflowStartError]


class HandleErrorCode(StrEnum):
    """Why a run could not be read or controlled."""

    WORKFLOW_NOT_FOUND = "WORKFLOW_NOT_FOUND"
    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    SIGNAL_NOT_FOUND = "SIGNAL_NOT_FOUND"
    NOTHING_TO_RETRY = "NOTHING_TO_RETRY"
    WORKFLOW_NOT_RETRYABLE = "WORKFLOW_NOT_RETRYABLE"
    WORKFLOW_ENDED = "WORKFLOW_ENDED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    WAIT_TIMEOUT = "WAIT_TIMEOUT"
    BROKER_NOT_CONFIGURED = "BROKER_NOT_CONFIGURED"
    DB_OPERATION_FAILED = "DB_OPERATION_FAILED"
    LOOP_RUNNER_FAILED = "LOOP_RUNNER_FAILED"
    INTERNAL_FAILED = "INTERNAL_FAILED"


@dataclass(frozen=True, slots=True)
class HandleOperationError:
    """Why an operation on a run had no effect; ``retryable`` if a later attempt may succeed."""

    code: HandleErrorCode
    message: str
    retryable: bool
    workflow_id: str
    exception: BaseException | None = field(default=None, repr=False)


HandleResult: TypeAlias = Result[T, HandleOperationError]


@dataclass(frozen=True, slots=True)
class WorkflowTaskInfo:
    """A node in a run or, if ``item_index`` is set, one item of a map node.

    ``name`` is the name of the task or sub-workflow. ``sub_workflow_status`` is the status of the child
    run, which may be paused while this run continues.
    """

    node_id: str
    index: int
    name: str
    status: WorkflowTaskStatus
    result: TaskResult[Any, TaskError] | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    sub_workflow_id: str | None = None
    sub_workflow_summary: SubWorkflowSummary[Any] | None = None
    kind: str = "task"
    item_index: int | None = None
    task_id: str | None = None
    retry_count: int = 0
    enqueued_at: datetime | None = None
    sub_workflow_status: WorkflowStatus | None = None
    items_total: int | None = None
    items_open: int | None = None
    items_failed: int | None = None

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
    name: str
    status: WorkflowStatus
    definition_key: str
    workflow_key: str | None
    error: TaskError | None
    matched_case: int | None
    parent_workflow_id: str | None
    root_workflow_id: str
    depth: int
    total_nodes: int
    open_nodes: int
    failed_nodes: int
    sent_at: datetime | None
    started_at: datetime
    paused_at: datetime | None
    completed_at: datetime | None
    paused_descendants: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain JSON values."""
        error = None if self.error is None else self.error.to_dict()
        return json_object(self) | {"error": error}
