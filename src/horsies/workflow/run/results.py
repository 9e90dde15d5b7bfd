"""Converts the stored rows of a run to results, errors and descriptions, decoded by declared types. The
types come from the started specification's nodes; for a run started elsewhere, they are looked up by its
rows. Without types, values are plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import groupby
from typing import Any, Protocol, TypeAlias, assert_never, get_args

from pydantic_core import from_json, to_json

from horsies.codec.results import ResultCodec, decode_untyped, encode_task_error
from horsies.db.statements.tasks import OutcomeRow
from horsies.db.statements.workflows import (
    ItemRow,
    NodeOutcome,
    NodeRow,
    ResultPart,
    RunOutcome,
    RunRow,
)
from horsies.encryption import missing_key, unmarked
from horsies.error_codes import BuiltInTaskCode, OperationalErrorCode, OutcomeCode, RetrievalCode
from horsies.result import Ok
from horsies.states import TaskStatus, WorkflowStatus, WorkflowTaskStatus
from horsies.task_result import SubWorkflowSummary, TaskError, TaskResult
from horsies.tasks.handle import error_result, read_result, result_of
from horsies.workflow.nodes.nodes import AnyNode, SignalNode, codec_for, result_codec
from horsies.workflow.run.info import (
    HandleErrorCode,
    HandleOperationError,
    WorkflowInfo,
    WorkflowTaskInfo,
)


class ResultTypes(Protocol):
    """The types of a run's results."""

    def codec(self, node_id: str) -> ResultCodec | None:
        """Return the codec for a node's result, or None if its type is unknown."""

    def signal_type(self, name: str) -> Any:
        """Return the type of a signal's values, or Any if it is unknown."""


FindTypes: TypeAlias = Callable[[Sequence[NodeRow]], ResultTypes]


class DeclaredTypes:
    """The types that nodes declare, looked up on demand."""

    __slots__ = ("_by_id", "_nodes")

    def __init__(self, nodes: Iterable[AnyNode]) -> None:
        self._nodes = nodes
        self._by_id: dict[str | None, AnyNode] | None = None

    def codec(self, node_id: str) -> ResultCodec | None:
        if self._by_id is None:
            self._by_id = {node.node_id: node for node in self._nodes}
        node = self._by_id.get(node_id)
        return None if node is None else result_codec(node)

    def signal_type(self, name: str) -> Any:
        waiting = (node for node in self._nodes if isinstance(node, SignalNode))
        return next((node.value_type for node in waiting if node.name == name), Any)


NO_TYPES = DeclaredTypes(())

# The maximum number of bytes of results per call: the maximum size of a value in PostgreSQL.
READ_BYTES_MAX = 1 << 30

_ENDS = {
    WorkflowStatus.FAILED: (OutcomeCode.WORKFLOW_FAILED, "failed"),
    WorkflowStatus.CANCELLED: (OutcomeCode.WORKFLOW_CANCELLED, "was cancelled"),
    WorkflowStatus.EXPIRED: (OutcomeCode.WORKFLOW_EXPIRED, "was paused for too long"),
}


def whole_results(parts: Iterable[ResultPart]) -> Iterator[tuple[ResultPart, str | None]]:
    """Yield one part per node with the text of the node's result, or None if the result was omitted."""
    for _, group in groupby(parts, key=lambda part: (part.workflow_id, part.task_index)):
        first, *others = group
        text = first.result
        if text is not None and first.item_index is not None:
            text = f'{{"ok":[{",".join([text, *(part.result or "null" for part in others)])}]}}'
        yield first, text


def run_result(
    run: RunOutcome,
    types: ResultTypes,
    output: ResultCodec | None = None,
    ends: Mapping[str, str] | None = None,
) -> TaskResult[Any, TaskError]:
    """Return a run's result; ``output`` is the codec of its output node, if known.

    ``ends`` has the nodes' results by id if the run's row was read without them.
    """
    status = WorkflowStatus(run.status)
    match status:
        case WorkflowStatus.COMPLETED:
            return _completed(run, types, output, ends)
        case WorkflowStatus.FAILED | WorkflowStatus.CANCELLED | WorkflowStatus.EXPIRED:
            code, verb = _ENDS[status]
            message = f"Workflow {run.id} {verb}."
            unknown = TaskError(error_code=code, message=message, data={"workflow_id": run.id})
            return TaskResult(err=read_error(run.error) or unknown)
        case WorkflowStatus.PAUSED:
            reason = read_error(run.error)
            suffix = f": {reason.message}" if reason and reason.message else "."
            message = f"Workflow {run.id} is paused{suffix}"
            return error_result(OutcomeCode.WORKFLOW_PAUSED, message, {"workflow_id": run.id})
        case WorkflowStatus.PENDING | WorkflowStatus.RUNNING:
            return error_result(
                RetrievalCode.RESULT_NOT_READY,
                f"Workflow {run.id} is {run.status}; there is no result yet.",
                {"workflow_id": run.id, "status": run.status},
            )
        case _:
            assert_never(status)


def _completed(
    run: RunOutcome, types: ResultTypes, output: ResultCodec | None, ends: Mapping[str, str] | None
) -> TaskResult[Any, TaskError]:
    output_id = run.output_node_id
    text = run.result if ends is None or output_id is None else ends.get(output_id)
    if text is None and (ends is None or output_id is not None):
        return error_result(
            RetrievalCode.RESULT_NOT_AVAILABLE, f"Workflow {run.id} has no stored result."
        )
    if text is not None and output_id is not None:
        return read_result(text, output or types.codec(output_id), f"workflow {run.id}")
    try:
        ends = _ends_of(text) if ends is None else ends
    except (ValueError, LookupError, TypeError, AttributeError):
        return error_result(
            OperationalErrorCode.RESULT_DESERIALIZATION_ERROR,
            f"The stored result of workflow {run.id} cannot be read.",
        )
    return TaskResult(
        ok={
            node_id: read_result(result, types.codec(node_id), f"node {node_id}")
            for node_id, result in ends.items()
        }
    )


def _ends_of(text: str | None) -> dict[str, str]:
    """Return the results of all end nodes of a graph, which are stored together."""
    stored = from_json(text or "")["ok"]
    ends = {node_id: to_json(result).decode() for node_id, result in stored.items()}
    if missing_key(text or "") is not None:
        return ends
    return {node_id: unmarked(result) for node_id, result in ends.items()}


def too_large(owner: str, size: int) -> TaskResult[Any, TaskError]:
    """Return the error that replaces an unread, too large result."""
    return error_result(
        RetrievalCode.RESULT_TOO_LARGE,
        f"The result of {owner} is {size:,} bytes; one call reads at most {READ_BYTES_MAX:,}. Read nodes "
        "and items one by one: tasks(include_results=False) lists the ids of their tasks.",
        {"bytes": size},
    )


def read_error(text: str | None) -> TaskError | None:
    """Return a run's stored error, or None if it has no readable error."""
    read = None if text is None else decode_untyped(f'{{"err":{text}}}')
    return read.value.err_value if isinstance(read, Ok) else None


def write_error(error: TaskError) -> str:
    """Return an error in the form in which a run stores it."""
    return encode_task_error(error).removeprefix('{"err":')[:-1]


def node_result(
    workflow_id: str, node_id: str, row: NodeOutcome, text: str | None, codec: ResultCodec | None
) -> TaskResult[Any, TaskError]:
    if row.status is None:
        return error_result(
            RetrievalCode.NODE_NOT_FOUND, f"Workflow {workflow_id} has no node {node_id!r}."
        )
    if row.result_bytes is None:
        return error_result(
            RetrievalCode.RESULT_NOT_READY,
            f"Node {node_id!r} is {row.status}; there is no result yet.",
            {"workflow_id": workflow_id, "status": row.status},
        )
    if text is None:
        return too_large(f"node {node_id}", row.result_bytes)
    return read_result(text, codec, f"node {node_id}")


_CODES: dict[HandleErrorCode, BuiltInTaskCode] = {
    HandleErrorCode.WORKFLOW_NOT_FOUND: RetrievalCode.WORKFLOW_NOT_FOUND,
    HandleErrorCode.WAIT_TIMEOUT: RetrievalCode.WAIT_TIMEOUT,
    HandleErrorCode.BROKER_NOT_CONFIGURED: RetrievalCode.RESULT_NOT_AVAILABLE,
    HandleErrorCode.LOOP_RUNNER_FAILED: RetrievalCode.EVENT_LOOP_RUNNING,
}


def as_error_result(error: HandleOperationError) -> TaskResult[Any, TaskError]:
    """Return the failure of an operation on a run as a task result."""
    code = _CODES.get(error.code, OperationalErrorCode.BROKER_ERROR)
    data = {"workflow_id": error.workflow_id}
    return TaskResult(
        err=TaskError(error_code=code, message=error.message, data=data, exception=error.exception)
    )


def node_results(
    rows: Iterable[NodeRow], parts: Iterable[ResultPart], types: ResultTypes
) -> dict[str, TaskResult[Any, TaskError]]:
    """Return the results of nodes by their ids."""
    names = {row.task_index: row.node_id for row in rows}
    results = {}
    for part, text in whole_results(parts):
        node_id = names[part.task_index]
        owner = f"node {node_id}"
        results[node_id] = (
            too_large(owner, part.result_bytes)
            if text is None
            else read_result(text, types.codec(node_id), owner)
        )
    return results


def node_info(row: NodeRow, result: TaskResult[Any, TaskError] | None) -> WorkflowTaskInfo:
    """Describe a node; raise ValueError if its sub-workflow's summary cannot be read."""
    summary, child_status = row.sub_workflow_summary, row.sub_workflow_status
    return WorkflowTaskInfo(
        **_shared_fields(WorkflowTaskInfo, row),
        index=row.task_index,
        name=row.sub_workflow_name or row.task_name,
        status=WorkflowTaskStatus(row.status),
        result=result,
        sub_workflow_summary=None
        if summary is None
        else SubWorkflowSummary[Any].model_validate_json(summary),
        retry_count=row.retry_count or 0,
        sub_workflow_status=None if child_status is None else WorkflowStatus(child_status),
        items_failed=row.items_bad,
    )


def item_info(
    row: ItemRow, node: NodeRow, types: ResultTypes, *, with_result: bool
) -> WorkflowTaskInfo:
    """Describe one item of a map node by the item's task."""
    status = TaskStatus(row.status)
    result = None
    if with_result and row.result is None and row.result_bytes is not None:
        result = too_large(f"task {row.id}", row.result_bytes)
    elif with_result and status.is_terminal:
        outcome = OutcomeRow(
            row.id, node.task_name, row.status, row.result, row.failed_reason, row.error_code
        )
        result = result_of(outcome, _item_codec(types.codec(node.node_id)))
    return WorkflowTaskInfo(
        **_shared_fields(WorkflowTaskInfo, row),
        node_id=node.node_id,
        index=node.task_index,
        name=node.task_name,
        status=_item_status(status, row.retry_count),
        result=result,
        kind=node.kind,
        task_id=row.id,
        retry_count=row.retry_count,
    )


def run_info(run: RunRow, below: Iterable[RunRow]) -> WorkflowInfo:
    """Describe a run, with the paused runs below it."""
    return WorkflowInfo(
        **_shared_fields(WorkflowInfo, run),
        workflow_id=run.id,
        status=WorkflowStatus(run.status),
        error=read_error(run.error),
        paused_descendants=[one.id for one in below if one.status == WorkflowStatus.PAUSED],
    )


# Fields that the description converts from the row: enums, decoded results, and fields that are
# never None.
_CONVERTED = {
    *("status", "error", "result", "retry_count"),
    *("sub_workflow_summary", "sub_workflow_status"),
}


def _shared_fields(kind: type, row: Any) -> dict[str, Any]:
    """Return the columns of a row that have the same names in its description."""
    return {name: getattr(row, name) for name in _shared_names(kind, row._fields)}


@cache
def _shared_names(kind: type, columns: tuple[str, ...]) -> list[str]:
    names = (one.name for one in fields(kind) if one.name not in _CONVERTED)
    return [name for name in names if name in columns]


def _item_codec(of_map: ResultCodec | None) -> ResultCodec | None:
    """Return the codec for one member of the list that a map node returns."""
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
