"""Reading a run: stored rows become results, errors and descriptions, decoded by declared types.

Pure; at the producer's end of the line producer -> SQL -> turn -> child -> report -> result. The
types come from the nodes of the specification that was started, or are learnt from the rows of a run
that was started elsewhere; without either, values are plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, assert_never, get_args

from pydantic_core import from_json, to_json

from horsies.codec.results import ResultCodec, decode_untyped, encode_task_error
from horsies.db.statements.tasks import OutcomeRow
from horsies.db.statements.workflows import ItemRow, NodeOutcome, NodeRow, RunOutcome, RunRow
from horsies.error_codes import (
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
)
from horsies.result import Ok
from horsies.states import TaskStatus, WorkflowStatus, WorkflowTaskStatus
from horsies.task_result import SubWorkflowSummary, TaskError, TaskResult
from horsies.tasks.info import read_result, result_of
from horsies.workflow.nodes.nodes import AnyNode, SignalNode, codec_for, result_codec
from horsies.workflow.run.info import (
    HandleErrorCode,
    HandleOperationError,
    WorkflowInfo,
    WorkflowTaskInfo,
)


class ResultTypes(Protocol):
    """What knows the types of a run's results by node id."""

    def codec(self, node_id: str) -> ResultCodec | None:
        """Return what reads the result of a node, or None when its type is not known."""

    def signal_type(self, name: str) -> Any:
        """Return the type of the values of a signal, Any when it is not known."""


Learn: TypeAlias = Callable[[Sequence[NodeRow]], ResultTypes]


class DeclaredTypes:
    """The types that nodes declare; nothing is looked at before somebody asks."""

    __slots__ = ("_by_id", "_nodes")

    def __init__(self, nodes: Iterable[AnyNode]) -> None:
        self._nodes = nodes
        self._by_id: dict[str | None, AnyNode] | None = None

    def codec(self, node_id: str) -> ResultCodec | None:
        """Return what reads the result of a node, or None when its type is not known."""
        if self._by_id is None:
            self._by_id = {node.node_id: node for node in self._nodes}
        node = self._by_id.get(node_id)
        return None if node is None else result_codec(node)

    def signal_type(self, name: str) -> Any:
        """Return the type of the values of a signal, Any when it is not known."""
        waiting = (node for node in self._nodes if isinstance(node, SignalNode))
        return next((node.value_type for node in waiting if node.name == name), Any)


NO_TYPES = DeclaredTypes(())


def run_result(
    run: RunOutcome, types: ResultTypes, output: ResultCodec | None = None
) -> TaskResult[Any, TaskError]:
    """Turn a run's row into the result its reader sees; ``output`` reads that of the output node."""
    status = WorkflowStatus(run.status)
    match status:
        case WorkflowStatus.COMPLETED:
            return _completed(run, types, output)
        case WorkflowStatus.FAILED:
            return _ended(run, OutcomeCode.WORKFLOW_FAILED, "failed")
        case WorkflowStatus.CANCELLED:
            return _ended(run, OutcomeCode.WORKFLOW_CANCELLED, "was cancelled")
        case WorkflowStatus.EXPIRED:
            return _ended(run, OutcomeCode.WORKFLOW_EXPIRED, "was paused for too long")
        case WorkflowStatus.PAUSED:
            return _paused(run)
        case WorkflowStatus.PENDING | WorkflowStatus.RUNNING:
            return error_result(
                RetrievalCode.RESULT_NOT_READY,
                f"Workflow {run.id} is {run.status}; there is no result yet.",
                {"workflow_id": run.id, "status": run.status},
            )
        case _:
            assert_never(status)


def _completed(
    run: RunOutcome, types: ResultTypes, output: ResultCodec | None
) -> TaskResult[Any, TaskError]:
    if run.result is None:
        return error_result(
            RetrievalCode.RESULT_NOT_AVAILABLE, f"Workflow {run.id} has no stored result."
        )
    if run.output_node_id is not None:
        codec = output or types.codec(run.output_node_id)
        return read_result(run.result, codec, f"workflow {run.id}")
    return _end_results(run.id, run.result, types)


def _end_results(workflow_id: str, text: str, types: ResultTypes) -> TaskResult[Any, TaskError]:
    """Read the results of all ends of a graph, each by its own type."""
    try:
        stored = from_json(text)["ok"]
        ends = {node_id: to_json(result).decode() for node_id, result in stored.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return error_result(
            OperationalErrorCode.RESULT_DESERIALIZATION_ERROR,
            f"The stored result of workflow {workflow_id} cannot be read.",
        )
    return TaskResult(
        ok={
            node_id: read_result(result, types.codec(node_id), f"node {node_id}")
            for node_id, result in ends.items()
        }
    )


def _ended(run: RunOutcome, code: OutcomeCode, verb: str) -> TaskResult[Any, TaskError]:
    stored = read_error(run.error)
    if stored is not None:
        return TaskResult(err=stored)
    return error_result(code, f"Workflow {run.id} {verb}.", {"workflow_id": run.id})


def _paused(run: RunOutcome) -> TaskResult[Any, TaskError]:
    reason = read_error(run.error)
    message = f"Workflow {run.id} is paused"
    message += f": {reason.message}" if reason and reason.message else "."
    return error_result(OutcomeCode.WORKFLOW_PAUSED, message, {"workflow_id": run.id})


def read_error(text: str | None) -> TaskError | None:
    """Return the stored error of a run, or None when there is none to be read."""
    read = None if text is None else decode_untyped(f'{{"err":{text}}}')
    return read.value.err_value if isinstance(read, Ok) else None


def write_error(error: TaskError) -> str:
    """Return an error the way a run holds it."""
    return encode_task_error(error).removeprefix('{"err":')[:-1]


def node_result(
    workflow_id: str, node_id: str, row: NodeOutcome | None, codec: ResultCodec | None
) -> TaskResult[Any, TaskError]:
    """Turn the row of one node into the result its reader sees."""
    if row is None:
        return not_found(workflow_id)
    if row.status is None:
        return error_result(
            RetrievalCode.NODE_NOT_FOUND, f"Workflow {workflow_id} has no node {node_id!r}."
        )
    if row.result is None:
        return error_result(
            RetrievalCode.RESULT_NOT_READY,
            f"Node {node_id!r} is {row.status}; there is no result yet.",
            {"workflow_id": workflow_id, "status": row.status},
        )
    return read_result(row.result, codec, f"node {node_id}")


def not_found(workflow_id: str) -> TaskResult[Any, TaskError]:
    """Return the error of a run that is not there."""
    return error_result(
        RetrievalCode.WORKFLOW_NOT_FOUND,
        f"There is no workflow {workflow_id}.",
        {"workflow_id": workflow_id},
    )


def folded(error: HandleOperationError) -> TaskResult[Any, TaskError]:
    """Return the failure of an operation as the result that could not be read."""
    match error.code:
        case HandleErrorCode.WORKFLOW_NOT_FOUND:
            return not_found(error.workflow_id)
        case HandleErrorCode.WAIT_TIMEOUT:
            code: BuiltInTaskCode = RetrievalCode.WAIT_TIMEOUT
        case HandleErrorCode.BROKER_NOT_CONFIGURED:
            code = RetrievalCode.RESULT_NOT_AVAILABLE
        case _:
            code = OperationalErrorCode.BROKER_ERROR
    data = {"workflow_id": error.workflow_id}
    return TaskResult(
        err=TaskError(error_code=code, message=error.message, data=data, exception=error.exception)
    )


def without_id() -> TaskResult[Any, TaskError]:
    """Return the error of a question about a node that belongs to no workflow."""
    return error_result(
        ContractCode.WORKFLOW_CTX_MISSING_ID,
        "A node without an id was looked up: build the workflow that holds it first, or look it up "
        "with NodeKey('its id').",
    )


def error_result(
    code: BuiltInTaskCode, message: str, data: Mapping[str, Any] | None = None
) -> TaskResult[Any, TaskError]:
    """Return a result that holds an error of the library."""
    return TaskResult(err=TaskError(error_code=code, message=message, data=data))


def stored_results(
    rows: Iterable[NodeRow], types: ResultTypes
) -> dict[str, TaskResult[Any, TaskError]]:
    """Return the results of the nodes that have one of their own; a skipped node has none."""
    return {
        row.node_id: read_result(row.result, types.codec(row.node_id), f"node {row.node_id}")
        for row in rows
        if row.result is not None and row.status != WorkflowTaskStatus.SKIPPED
    }


def node_info(row: NodeRow, types: ResultTypes) -> WorkflowTaskInfo:
    """Describe a node; ValueError when the summary of its sub-workflow cannot be read."""
    result = None
    if row.result is not None:
        result = read_result(row.result, types.codec(row.node_id), f"node {row.node_id}")
    summary = None
    if row.sub_workflow_summary is not None:
        summary = SubWorkflowSummary[Any].model_validate_json(row.sub_workflow_summary)
    child_status = row.sub_workflow_status
    return WorkflowTaskInfo(
        node_id=row.node_id,
        index=row.task_index,
        name=row.sub_workflow_name or row.task_name,
        status=WorkflowTaskStatus(row.status),
        result=result,
        started_at=row.started_at,
        completed_at=row.completed_at,
        sub_workflow_id=row.sub_workflow_id,
        sub_workflow_summary=summary,
        kind=row.kind,
        task_id=row.task_id,
        retry_count=row.retry_count or 0,
        enqueued_at=row.enqueued_at,
        sub_workflow_status=None if child_status is None else WorkflowStatus(child_status),
        items_total=row.items_total,
        items_open=row.items_open,
        items_failed=row.items_bad,
    )


def item_info(
    row: ItemRow, node: NodeRow, types: ResultTypes, *, with_result: bool
) -> WorkflowTaskInfo:
    """Describe one item of a map node: the task it runs as."""
    status = TaskStatus(row.status)
    result = None
    if with_result and status.is_terminal:
        outcome = OutcomeRow(
            row.id, node.task_name, row.status, row.result, row.failed_reason, row.error_code
        )
        result = result_of(outcome, _item_codec(types.codec(node.node_id)))
    return WorkflowTaskInfo(
        node_id=node.node_id,
        index=node.task_index,
        name=node.task_name,
        status=_item_status(status, row.retry_count),
        result=result,
        started_at=row.started_at,
        completed_at=row.completed_at,
        kind=node.kind,
        item_index=row.item_index,
        task_id=row.id,
        retry_count=row.retry_count,
        enqueued_at=row.enqueued_at,
    )


def _item_codec(of_map: ResultCodec | None) -> ResultCodec | None:
    """Return what reads one member of the list that a map node gives."""
    if of_map is None:
        return None
    (member,) = get_args(of_map.ok_type)
    return codec_for(get_args(member)[0])


def _item_status(status: TaskStatus, retry_count: int) -> WorkflowTaskStatus:
    match status:
        case TaskStatus.PENDING | TaskStatus.CLAIMED:
            return WorkflowTaskStatus.RUNNING if retry_count else WorkflowTaskStatus.ENQUEUED
        case TaskStatus.RUNNING:
            return WorkflowTaskStatus.RUNNING
        case TaskStatus.COMPLETED:
            return WorkflowTaskStatus.COMPLETED
        case TaskStatus.FAILED | TaskStatus.CANCELLED | TaskStatus.EXPIRED:
            return WorkflowTaskStatus.FAILED
        case _:
            assert_never(status)


def run_info(run: RunRow, below: Iterable[RunRow]) -> WorkflowInfo:
    """Describe a run, with those below it that are paused."""
    return WorkflowInfo(
        workflow_id=run.id,
        name=run.name,
        status=WorkflowStatus(run.status),
        definition_key=run.definition_key,
        workflow_key=run.workflow_key,
        error=read_error(run.error),
        matched_case=run.matched_case,
        parent_workflow_id=run.parent_workflow_id,
        root_workflow_id=run.root_workflow_id,
        depth=run.depth,
        total_nodes=run.total_nodes,
        open_nodes=run.open_nodes,
        failed_nodes=run.failed_nodes,
        sent_at=run.sent_at,
        started_at=run.started_at,
        paused_at=run.paused_at,
        completed_at=run.completed_at,
        paused_descendants=[one.id for one in below if one.status == WorkflowStatus.PAUSED],
    )
