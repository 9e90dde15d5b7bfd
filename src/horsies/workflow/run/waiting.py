"""Waiting for a run: until it has one of the wanted statuses, or the time is up.

A wait that ends early, however it ends, leaves nothing behind in the broker's waiters.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import wait

from horsies.db.statements.workflows import RunOutcome
from horsies.ids import stored_form
from horsies.result import Err, Ok
from horsies.states import WORKFLOW_TERMINAL_STATES, WorkflowStatus
from horsies.tasks.broker import PostgresBroker, failure
from horsies.tasks.waiters import seconds_to_wait, timeout_problem
from horsies.workflow.run.control import CONTROL, no_broker, no_such_run, operation_failed, refused
from horsies.workflow.run.info import HandleErrorCode, HandleOperationError, HandleResult


def wait_for_run(
    broker: PostgresBroker | None,
    workflow_id: str,
    until: frozenset[WorkflowStatus],
    timeout_ms: int | None,
) -> HandleResult[RunOutcome]:
    """Wait for a run in one of these statuses, or in a terminal one.

    0 looks once, None waits for ever.
    """
    if timeout_ms != 0 and _loop_is_running():
        message = "This would block the running event loop; await the ..._async method instead."
        return refused(workflow_id, HandleErrorCode.LOOP_RUNNER_FAILED, message)
    if broker is None:
        return no_broker(workflow_id)
    if (stored := stored_form(workflow_id)) is None:
        return no_such_run(workflow_id)
    if problem := timeout_problem(timeout_ms):
        return refused(workflow_id, HandleErrorCode.VALIDATION_FAILED, problem)
    future = broker.waiters.watch_run(
        stored, until | WORKFLOW_TERMINAL_STATES, once=timeout_ms == 0
    )
    try:
        # It raises only the exceptions of the caller's own signal handlers.
        wait([future], seconds_to_wait(timeout_ms))
    finally:
        broker.waiters.forget(stored, future)
    if not future.done():
        return Err(_timed_out(workflow_id, timeout_ms))
    if error := future.exception():
        return Err(operation_failed(workflow_id, failure(CONTROL, error)))
    return _outcome(workflow_id, until, future.result())


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
    if problem := timeout_problem(timeout_ms):
        return refused(workflow_id, HandleErrorCode.VALIDATION_FAILED, problem)
    future = broker.waiters.watch_run(
        stored, until | WORKFLOW_TERMINAL_STATES, once=timeout_ms == 0
    )
    try:
        waiting = asyncio.wrap_future(future)
        row = await asyncio.wait_for(waiting, seconds_to_wait(timeout_ms))
        return _outcome(workflow_id, until, row)
    except TimeoutError:
        return Err(_timed_out(workflow_id, timeout_ms))
    except Exception as error:
        return Err(operation_failed(workflow_id, failure(CONTROL, error)))
    finally:
        broker.waiters.forget(stored, future)


def _outcome(
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
    found = f"is {status.value}" if status else f"did not get there within {timeout_ms} ms"
    message = f"Workflow {workflow_id} {found}."
    return HandleOperationError(HandleErrorCode.WAIT_TIMEOUT, message, True, workflow_id)


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
