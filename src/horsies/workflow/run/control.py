"""Steering: what can be asked of a run, as scripts of statements and answers that are values.

A handle, the module functions and the operator's commands run the same scripts. Each is one statement
on the server, whatever the number of nodes; what a run does next is decided there, under the lock of
its tree. Beside the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from horsies.codec.form import CodecError, JsonForm
from horsies.codec.shape import Part, ValueShape
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.workflows import (
    CancelRun,
    ItemRow,
    NodeRow,
    ReadNode,
    ReadNodes,
    ReadTree,
    RetryRun,
    RunId,
    RunRow,
    SignalRun,
    cancel_run,
    pause_run,
    read_items,
    read_node,
    read_nodes,
    read_run_status,
    read_tree,
    resume_retrying_run,
    resume_run,
    retry_run,
    signal_run,
)
from horsies.error_codes import OutcomeCode
from horsies.ids import stored_form
from horsies.result import Err, Ok
from horsies.states import WorkflowStatus
from horsies.task_result import TaskError
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.workflow.nodes.nodes import NODE_KINDS, NodeKey
from horsies.workflow.run.info import (
    HandleErrorCode,
    HandleOperationError,
    HandleResult,
    SignalDelivery,
    WorkflowInfo,
)
from horsies.workflow.run.results import run_info, write_error

T = TypeVar("T")

STEERING = BrokerErrorCode.MONITORING_QUERY_FAILED
# Runs below a run that a description looks at.
FAMILY_MAX = 1_000

# What a programmer's mistake or damaged data looks like; everything else is the database's.
_OUR_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def settled(workflow_id: str, done: BrokerResult[HandleResult[T]]) -> HandleResult[T]:
    """Return the answer of a script, or the failure that kept it from giving one."""
    match done:
        case Ok(answer):
            return answer
        case Err(error):
            return Err(operation_failed(workflow_id, error))


def operation_failed(workflow_id: str, error: BrokerOperationError) -> HandleOperationError:
    """Describe a broker's failure as that of an operation on a run."""
    ours = isinstance(error.exception, _OUR_FAULTS)
    code = HandleErrorCode.INTERNAL_FAILED if ours else HandleErrorCode.DB_OPERATION_FAILED
    return HandleOperationError(code, error.message, error.retryable, workflow_id, error.exception)


def refused(workflow_id: str, code: HandleErrorCode, message: str) -> Err[HandleOperationError]:
    """Return the answer to what cannot be done."""
    return Err(HandleOperationError(code, message, False, workflow_id))


def no_such_run(workflow_id: str) -> Err[HandleOperationError]:
    """Return the answer to any question about a run that is not there."""
    code = HandleErrorCode.WORKFLOW_NOT_FOUND
    return refused(workflow_id, code, f"There is no workflow {workflow_id}.")


def no_broker(workflow_id: str) -> Err[HandleOperationError]:
    """Return the answer of a handle that has no connection."""
    message = "This handle is not connected to a broker."
    return refused(workflow_id, HandleErrorCode.BROKER_NOT_CONFIGURED, message)


def status_script(workflow_id: str) -> Script[HandleResult[WorkflowStatus]]:
    """Read where a run stands."""
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    row = one_or_none((yield read_run_status, RunId(stored)))
    return no_such_run(workflow_id) if row is None else Ok(WorkflowStatus(row.status))


def info_script(workflow_id: str) -> Script[HandleResult[WorkflowInfo]]:
    """Read what is known of a run, and which runs below it are paused."""
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    family: list[RunRow] = yield read_tree, ReadTree(stored, FAMILY_MAX)
    for run in family:
        if run.id == stored:
            return Ok(run_info(run, (one for one in family if one is not run)))
    return no_such_run(workflow_id)


def nodes_script(workflow_id: str, *, results: bool) -> Script[HandleResult[list[NodeRow]]]:
    """Read the nodes of a run; every run has some."""
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    rows: list[NodeRow] = yield read_nodes, ReadNodes(stored, results)
    return Ok(rows) if rows else no_such_run(workflow_id)


def items_script(workflow_id: str, *, results: bool) -> Script[list[ItemRow]]:
    """Read the items of a run's map nodes, in the order of nodes and items."""
    rows: list[ItemRow] = yield read_items, ReadNodes(workflow_id, results)
    return rows


def pause_script(workflow_id: str) -> Script[HandleResult[bool]]:
    """RUNNING -> PAUSED; False in any other status."""
    answer = yield from _steered(workflow_id, pause_run)
    return no_such_run(workflow_id) if answer is None else Ok(answer == WorkflowStatus.RUNNING)


def resume_script(workflow_id: str, *, retry_failed: bool) -> Script[HandleResult[bool]]:
    """PAUSED -> RUNNING, or FAILED -> RUNNING too when what failed is tried again."""
    statement = resume_retrying_run if retry_failed else resume_run
    answer = yield from _steered(workflow_id, statement)
    if answer is None:
        return no_such_run(workflow_id)
    return Ok(answer in ("resumed", WorkflowStatus.PAUSED))


def _steered(workflow_id: str, statement: Any) -> Script[str | None]:
    if (stored := stored_form(workflow_id)) is None:
        return None
    (row,) = yield statement, RunId(stored)
    answer: str | None = row.answer
    return answer


def cancel_script(
    workflow_id: str, *, interrupt: bool, reason: str | None
) -> Script[HandleResult[bool]]:
    """Any open status -> CANCELLED; False for a run that had ended."""
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    order = CancelRun(stored, cancel_reason(stored, reason), interrupt)
    (row,) = yield cancel_run, order
    if row.answer is None:
        return no_such_run(workflow_id)
    return Ok(not WorkflowStatus(row.answer).is_terminal)


def cancel_reason(workflow_id: str, reason: str | None) -> str:
    """Return the JSON of the error that a cancelled run holds."""
    error = TaskError(
        error_code=OutcomeCode.WORKFLOW_CANCELLED,
        message=f"Workflow {workflow_id} was cancelled{f': {reason}' if reason else '.'}",
        data={"workflow_id": workflow_id, "reason": reason},
    )
    return write_error(error)


def retry_script(workflow_id: str, node_ids: Sequence[str] | None) -> Script[HandleResult[None]]:
    """Try failed nodes again, these or all of them; see ``horsies_retry_v1``."""
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    (row,) = yield retry_run, RetryRun(stored, node_ids)
    if row.answer == "NO_FAILED_NODE" and node_ids:
        return (yield from _unfailed_script(stored, node_ids[0]))
    return retry_answer(workflow_id, row.answer)


def _unfailed_script(workflow_id: str, node_id: str) -> Script[HandleResult[None]]:
    node = one_or_none((yield read_node, ReadNode(workflow_id, node_id)))
    if node is None or node.status is None:
        code = HandleErrorCode.NODE_NOT_FOUND
        return refused(workflow_id, code, f"Workflow {workflow_id} has no node {node_id!r}.")
    message = f"Node {node_id!r} is {node.status}; only a failed node can be tried again."
    return refused(workflow_id, HandleErrorCode.NOTHING_TO_RETRY, message)


def retry_answer(workflow_id: str, answer: str | None) -> HandleResult[None]:
    """Turn what the server answered to a retry into a value."""
    match answer:
        case None:
            return no_such_run(workflow_id)
        case "retried":
            return Ok(None)
        case "NO_FAILED_NODE":
            message = f"No node of workflow {workflow_id} has failed."
            return refused(workflow_id, HandleErrorCode.NOTHING_TO_RETRY, message)
        case "PARENT_ENDED":
            message = (
                f"Workflow {workflow_id} is part of another, which has gone on without it; retry "
                "that one."
            )
        case "KEY_TAKEN":
            message = f"Another run has the key of workflow {workflow_id}; wait for its end."
        case status:
            message = f"Workflow {workflow_id} is {status}; its nodes cannot be tried again."
    return refused(workflow_id, HandleErrorCode.WORKFLOW_NOT_RETRYABLE, message)


def signal_script(
    workflow_id: str, name: str, value: object, declared: Any
) -> Script[HandleResult[SignalDelivery]]:
    """Hand a value of the declared type to the first node that waits, or will wait, for the name."""
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    if problem := _signal_name_problem(name):
        return _not_sent(workflow_id, name, problem)
    text = _signal_form(declared).encode(value)
    if isinstance(text, CodecError):
        return _not_sent(workflow_id, name, text.message)
    (row,) = yield signal_run, SignalRun(stored, name, text)
    return signal_answer(workflow_id, name, row.answer)


def _signal_name_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"its name is of type {type(name).__name__}, not text."
    # No node can be built with such a name, and the database does not take all of them.
    return None if name.isprintable() else "its name holds characters that cannot be printed."


def _not_sent(workflow_id: str, name: object, problem: str) -> Err[HandleOperationError]:
    message = f"The signal {name!r} was not sent: {problem}"
    return refused(workflow_id, HandleErrorCode.VALIDATION_FAILED, message)


def _signal_form(declared: Any) -> JsonForm:
    try:
        return _kept_form(declared)
    except TypeError:
        # An annotation may hold what has no hash.
        return _form_of(declared)


def _form_of(declared: Any) -> JsonForm:
    return JsonForm(ValueShape(Part("value", declared)))


# Building one takes milliseconds.
_kept_form = lru_cache(maxsize=128)(_form_of)


def signal_answer(workflow_id: str, name: str, answer: str | None) -> HandleResult[SignalDelivery]:
    """Turn what the server answered to a signal into a value."""
    match answer:
        case None:
            return no_such_run(workflow_id)
        case "delivered" | "stored":
            return Ok(SignalDelivery(answer))
        case "UNKNOWN_SIGNAL":
            message = f"No node of workflow {workflow_id} waits for a signal {name!r}."
            return refused(workflow_id, HandleErrorCode.SIGNAL_NOT_FOUND, message)
        case status:
            message = f"Workflow {workflow_id} is {status}; it takes no more signals."
            return refused(workflow_id, HandleErrorCode.WORKFLOW_ENDED, message)


def node_id_of(node: object) -> str | None:
    """Return the id a node is stored under, None when it has none; TypeError for what is no node."""
    if isinstance(node, str):
        return node
    if isinstance(node, (NodeKey, *NODE_KINDS)):
        return node.node_id
    raise TypeError(f"a node or a NodeKey is looked up, not {type(node).__name__}")


async def pause_workflow(broker: PostgresBroker, workflow_id: str) -> HandleResult[bool]:
    """Pause a run by its id; see ``WorkflowHandle.pause``."""
    return settled(workflow_id, await broker.perform_async(STEERING, pause_script(workflow_id)))


def pause_workflow_sync(broker: PostgresBroker, workflow_id: str) -> HandleResult[bool]:
    """``pause_workflow`` without an event loop."""
    return settled(workflow_id, broker.perform(STEERING, pause_script(workflow_id)))


async def resume_workflow(
    broker: PostgresBroker, workflow_id: str, *, retry_failed: bool = False
) -> HandleResult[bool]:
    """Resume a run by its id; see ``WorkflowHandle.resume``."""
    script = resume_script(workflow_id, retry_failed=retry_failed)
    return settled(workflow_id, await broker.perform_async(STEERING, script))


def resume_workflow_sync(
    broker: PostgresBroker, workflow_id: str, *, retry_failed: bool = False
) -> HandleResult[bool]:
    """``resume_workflow`` without an event loop."""
    script = resume_script(workflow_id, retry_failed=retry_failed)
    return settled(workflow_id, broker.perform(STEERING, script))
