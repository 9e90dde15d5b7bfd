"""Run control: waits for a run, and scripts that read, pause, resume, retry, cancel or signal a run.

Handles, the module functions and the operator's commands run the same scripts. Each script is one
statement on the server, for any number of nodes; the server decides a run's next state while holding the
lock on its tree. Scripts return errors as values. A wait that ends early is removed from the broker's
waiters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from horsies.codec.form import CodecError, JsonForm
from horsies.codec.shape import Part, ValueShape
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.workflows import (
    NodeOutcome,
    NodeRow,
    RunId,
    RunOutcome,
    RunRow,
    cancel_run,
    list_signal_names,
    pause_run,
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
from horsies.states import WORKFLOW_TERMINAL_STATES, WorkflowStatus
from horsies.task_result import TaskError
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
    failure,
)
from horsies.tasks.recording import Action, perform_action, perform_action_async
from horsies.tasks.waiters import is_loop_running, seconds_to_wait, timeout_problem, wait_for
from horsies.words import listed
from horsies.workflow.nodes.type_compat import cached_by_annotation
from horsies.workflow.run.info import (
    HandleErrorCode,
    HandleOperationError,
    HandleResult,
    SignalDelivery,
    WorkflowInfo,
)
from horsies.workflow.run.results import run_info, write_error

T = TypeVar("T")

CONTROL = BrokerErrorCode.MONITORING_QUERY_FAILED
# The maximum number of descendant runs to read for the description of a run.
FAMILY_MAX = 1_000

# Programming errors and damaged data; any other exception is a database error.
_INTERNAL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


RunScript: TypeAlias = Callable[[str], Script[HandleResult[T]]]


def perform(
    broker: PostgresBroker | None, workflow_id: str, make_script: RunScript[T]
) -> HandleResult[T]:
    """Convert the run's id to the form the database uses, then run a script for it."""
    if broker is None:
        return no_broker(workflow_id)
    if (run_id := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    return _unwrap(workflow_id, broker.perform(CONTROL, make_script(run_id)))


async def perform_async(
    broker: PostgresBroker | None, workflow_id: str, make_script: RunScript[T]
) -> HandleResult[T]:
    if broker is None:
        return no_broker(workflow_id)
    if (run_id := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    return _unwrap(workflow_id, await broker.perform_async(CONTROL, make_script(run_id)))


def change(
    broker: PostgresBroker | None,
    workflow_id: str,
    verb: str,
    make_script: RunScript[T],
    reason: str | None = None,
) -> HandleResult[T]:
    """Run a script that changes a run, and record the change in the same transaction."""
    if broker is None:
        return no_broker(workflow_id)
    action, script = _change(workflow_id, verb, make_script, reason)
    return _unwrap(workflow_id, perform_action(broker, CONTROL, action, script))


async def change_async(
    broker: PostgresBroker | None,
    workflow_id: str,
    verb: str,
    make_script: RunScript[T],
    reason: str | None = None,
) -> HandleResult[T]:
    if broker is None:
        return no_broker(workflow_id)
    action, script = _change(workflow_id, verb, make_script, reason)
    return _unwrap(workflow_id, await perform_action_async(broker, CONTROL, action, script))


def _change(
    workflow_id: str, verb: str, make_script: RunScript[T], reason: str | None
) -> tuple[Action, Script[HandleResult[T]]]:
    run_id = stored_form(workflow_id)
    script = _refusal(no_such_run(workflow_id)) if run_id is None else make_script(run_id)
    return Action(verb, f"run {run_id or workflow_id}", reason), script


def _refusal(refusal: Err[HandleOperationError]) -> Script[HandleResult[T]]:
    yield from ()
    return refusal


def _unwrap(workflow_id: str, done: BrokerResult[HandleResult[T]]) -> HandleResult[T]:
    """Return a script's value, or the failure of the broker that ran it."""
    return Err(operation_failed(workflow_id, done.value)) if isinstance(done, Err) else done.value


def operation_failed(workflow_id: str, error: BrokerOperationError) -> HandleOperationError:
    """Convert a broker's failure into the failure of an operation on a run."""
    internal = isinstance(error.exception, _INTERNAL_ERRORS)
    code = HandleErrorCode.INTERNAL_FAILED if internal else HandleErrorCode.DB_OPERATION_FAILED
    return HandleOperationError(code, error.message, error.retryable, workflow_id, error.exception)


def refused(workflow_id: str, code: HandleErrorCode, message: str) -> Err[HandleOperationError]:
    return Err(HandleOperationError(code, message, False, workflow_id))


def no_such_run(workflow_id: str) -> Err[HandleOperationError]:
    code = HandleErrorCode.WORKFLOW_NOT_FOUND
    return refused(workflow_id, code, f"There is no workflow run {workflow_id}.")


def no_broker(workflow_id: str) -> Err[HandleOperationError]:
    message = "This handle is not connected to a broker."
    return refused(workflow_id, HandleErrorCode.BROKER_NOT_CONFIGURED, message)


def status_script(run_id: str) -> Script[HandleResult[WorkflowStatus]]:
    row = one_or_none((yield read_run_status(run_id)))
    return no_such_run(run_id) if row is None else Ok(WorkflowStatus(row.status))


def info_script(run_id: str) -> Script[HandleResult[WorkflowInfo]]:
    """Read a run, and the paused runs below it."""
    family: list[RunRow] = yield read_tree(run_id, FAMILY_MAX)
    for run in family:
        if run.id == run_id:
            return Ok(run_info(run, (one for one in family if one is not run)))
    return no_such_run(run_id)


def nodes_script(run_id: str) -> Script[HandleResult[list[NodeRow]]]:
    """Read the nodes of a run; every run has at least one."""
    rows: list[NodeRow] = yield read_nodes(run_id)
    return Ok(rows) if rows else no_such_run(run_id)


def pause_script(run_id: str) -> Script[HandleResult[bool]]:
    """Change RUNNING to PAUSED; return False in any other status."""
    (row,) = yield pause_run(run_id)
    return no_such_run(run_id) if row.answer is None else Ok(row.answer == WorkflowStatus.RUNNING)


def resume_script(run_id: str, *, retry_failed: bool) -> Script[HandleResult[bool]]:
    """Change PAUSED to RUNNING; with ``retry_failed`` also change FAILED to RUNNING and retry failed
    nodes.
    """
    (row,) = yield resume_retrying_run if retry_failed else resume_run, RunId(run_id)
    if row.answer is None:
        return no_such_run(run_id)
    return Ok(row.answer in ("resumed", WorkflowStatus.PAUSED))


def cancel_script(
    run_id: str, *, interrupt: bool, reason: str | None
) -> Script[HandleResult[bool]]:
    """Change any open status to CANCELLED; return False for an ended run, which does not change."""
    error = TaskError(
        error_code=OutcomeCode.WORKFLOW_CANCELLED,
        message=f"Workflow {run_id} was cancelled{f': {reason}' if reason else '.'}",
        data={"workflow_id": run_id, "reason": reason},
    )
    (row,) = yield cancel_run(run_id, write_error(error), interrupt)
    if row.answer is None:
        return no_such_run(run_id)
    return Ok(not WorkflowStatus(row.answer).is_terminal)


def retry_script(run_id: str, node_ids: Sequence[str] | None) -> Script[HandleResult[None]]:
    """Retry the given failed nodes, or all of them; see ``horsies_retry_v1``."""
    (row,) = yield retry_run(run_id, node_ids)
    if row.answer == "NO_FAILED_NODE" and node_ids:
        node_id = node_ids[0]
        node: NodeOutcome | None = one_or_none((yield read_node(run_id, node_id, 0)))
        if node is None or node.status is None:
            message = f"Workflow {run_id} has no node {node_id!r}."
            return refused(run_id, HandleErrorCode.NODE_NOT_FOUND, message)
        message = f"Node {node_id!r} is {node.status}; only a failed node can be tried again."
        return refused(run_id, HandleErrorCode.NOTHING_TO_RETRY, message)
    return _retry_result(run_id, row.answer)


def _retry_result(workflow_id: str, answer: str | None) -> HandleResult[None]:
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
                f"Workflow {workflow_id} is part of another, which has continued without it; retry "
                "that one."
            )
        case "REDACTED":
            message = f"Workflow {workflow_id} is redacted: its arguments are gone."
        case "KEY_TAKEN":
            message = f"Another run has the key of workflow {workflow_id}; wait for its end."
        case status:
            message = f"Workflow {workflow_id} is {status}; its nodes cannot be tried again."
    return refused(workflow_id, HandleErrorCode.WORKFLOW_NOT_RETRYABLE, message)


def signal_script(
    run_id: str, name: str, value: object, declared: Any
) -> Script[HandleResult[SignalDelivery]]:
    """Send a value of the declared type to the first node that waits, or will wait, for this signal."""
    text = _encode_signal(name, value, declared)
    if isinstance(text, CodecError):
        message = f"The signal {name!r} was not sent: {text.message}"
        return refused(run_id, HandleErrorCode.VALIDATION_FAILED, message)
    (row,) = yield signal_run(run_id, name, text)
    match row.answer:
        case None:
            return no_such_run(run_id)
        case "delivered" | "stored":
            return Ok(SignalDelivery(row.answer))
        case "UNKNOWN_SIGNAL":
            signals = yield list_signal_names(run_id)
            known = listed([one.name for one in signals])
            has = f"its signals are {known}" if signals else "it has no signal nodes"
            message = f"No node of workflow {run_id} waits for a signal {name!r}; {has}."
            return refused(run_id, HandleErrorCode.SIGNAL_NOT_FOUND, message)
        case status:
            message = f"Workflow {run_id} is {status}; it takes no more signals."
            return refused(run_id, HandleErrorCode.WORKFLOW_ENDED, message)


def _encode_signal(name: object, value: object, declared: Any) -> str | CodecError:
    if not isinstance(name, str):
        return CodecError(f"its name is of type {type(name).__name__}, not text.", "name")
    # No node can have such a signal name, and the database rejects some of these names.
    if not name.isprintable():
        return CodecError("its name has characters that cannot be printed.", "name")
    return _signal_form(declared).encode(value)


@cached_by_annotation(128)  # Building a form takes milliseconds, so forms are cached.
def _signal_form(declared: Any) -> JsonForm:
    return JsonForm(ValueShape(Part("value", declared)))


def wait_for_run(
    broker: PostgresBroker | None,
    workflow_id: str,
    until: frozenset[WorkflowStatus],
    timeout_ms: int | None,
) -> HandleResult[RunOutcome]:
    """Wait until a run has one of these statuses or a terminal one. 0 checks once, None waits forever."""
    if timeout_ms != 0 and is_loop_running():
        message = "This would block the running event loop; await the ..._async method instead."
        return refused(workflow_id, HandleErrorCode.LOOP_RUNNER_FAILED, message)
    if broker is None:
        return no_broker(workflow_id)
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    if problem := _wait_problem(until, timeout_ms):
        return refused(workflow_id, HandleErrorCode.VALIDATION_FAILED, problem)
    future = broker.waiters.watch_run(
        stored, until | WORKFLOW_TERMINAL_STATES, once=timeout_ms == 0
    )
    try:
        # The wait itself does not raise; an exception here comes from the caller's signal handlers.
        wait_for(future, seconds_to_wait(timeout_ms))
    finally:
        unread = broker.waiters.forget(stored, future)
    if not future.done() and unread is None:
        return Err(_timed_out(workflow_id, timeout_ms))
    if error := unread or future.exception():
        return Err(operation_failed(workflow_id, failure(CONTROL, error)))
    return _wait_result(workflow_id, until, future.result())


async def wait_for_run_async(
    broker: PostgresBroker | None,
    workflow_id: str,
    until: frozenset[WorkflowStatus],
    timeout_ms: int | None,
) -> HandleResult[RunOutcome]:
    if broker is None:
        return no_broker(workflow_id)
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    if problem := _wait_problem(until, timeout_ms):
        return refused(workflow_id, HandleErrorCode.VALIDATION_FAILED, problem)
    future = broker.waiters.watch_run(
        stored, until | WORKFLOW_TERMINAL_STATES, once=timeout_ms == 0
    )
    try:
        waiting = asyncio.wrap_future(future)
        row = await asyncio.wait_for(waiting, seconds_to_wait(timeout_ms))
        return _wait_result(workflow_id, until, row)
    except TimeoutError:
        if unread := broker.waiters.forget(stored, future):
            return Err(operation_failed(workflow_id, failure(CONTROL, unread)))
        return Err(_timed_out(workflow_id, timeout_ms))
    except Exception as error:
        return Err(operation_failed(workflow_id, failure(CONTROL, error)))
    finally:
        broker.waiters.forget(stored, future)


def _wait_problem(until: frozenset[WorkflowStatus], timeout_ms: int | None) -> str | None:
    if until <= frozenset(WorkflowStatus):
        return timeout_problem(timeout_ms)
    return f"until takes a set of statuses of a run: {', '.join(WorkflowStatus)}."


def _wait_result(
    workflow_id: str, until: frozenset[WorkflowStatus], row: RunOutcome | None
) -> HandleResult[RunOutcome]:
    if row is None:
        return no_such_run(workflow_id)
    status = WorkflowStatus(row.status)
    if status in until or status.is_terminal:
        return Ok(row)
    return Err(_timed_out(workflow_id, 0, status))


def _timed_out(
    workflow_id: str, timeout_ms: int | None, status: WorkflowStatus | None = None
) -> HandleOperationError:
    late = f"did not get there within {timeout_ms} ms; see `horsies workflow show {workflow_id}`"
    found = f"is {status.value}" if status else late
    message = f"Workflow {workflow_id} {found}."
    return HandleOperationError(HandleErrorCode.WAIT_TIMEOUT, message, True, workflow_id)


async def pause_workflow(broker: PostgresBroker, workflow_id: str) -> HandleResult[bool]:
    """Pause a run by its id; see ``WorkflowHandle.pause``."""
    return await change_async(broker, workflow_id, "pause_run", pause_script)


def pause_workflow_sync(broker: PostgresBroker, workflow_id: str) -> HandleResult[bool]:
    """Pause a run by its id, in code without an event loop."""
    return change(broker, workflow_id, "pause_run", pause_script)


async def resume_workflow(
    broker: PostgresBroker, workflow_id: str, *, retry_failed: bool = False
) -> HandleResult[bool]:
    """Resume a run by its id; see ``WorkflowHandle.resume``."""
    script = partial(resume_script, retry_failed=retry_failed)
    return await change_async(broker, workflow_id, "resume_run", script)


def resume_workflow_sync(
    broker: PostgresBroker, workflow_id: str, *, retry_failed: bool = False
) -> HandleResult[bool]:
    """Resume a run by its id, in code without an event loop."""
    script = partial(resume_script, retry_failed=retry_failed)
    return change(broker, workflow_id, "resume_run", script)
