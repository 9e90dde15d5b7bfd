"""Steering: hold queues back, let them go, and send a finished request again.

An operator's hand on the line producer -> SQL -> turn -> child -> report -> result. What is stored
takes effect on all workers with their next turn. Finished rows are history and stay as they are: to
run one again is to send its request again, as a new task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horsies.db.statement import Nothing, Script, one_or_none
from horsies.db.statements.monitor import QueueName, QueueState, list_known_queues
from horsies.db.statements.queues import (
    ResendTask,
    ResentTask,
    pause_queue,
    resend_task,
    resume_queue,
)
from horsies.ids import new_id, stored_form
from horsies.result import Err, Ok, Result
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.info import TaskActionError, TaskActionErrorCode

_SWITCHING = BrokerErrorCode.QUEUE_SWITCH_FAILED


@dataclass(frozen=True, slots=True)
class TaskRetried:
    """A request that was sent again: the new task, and the one it was copied from."""

    task_id: str
    retried_from_task_id: str
    was_status: TaskStatus


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """An order to pause or resume a queue.

    ``configured`` are the application's queues; None when no application is known, and then the
    database tells which names mean something.
    """

    name: str
    paused: bool
    configured: Sequence[str] | None = None


def switch_queue(broker: PostgresBroker, order: QueueOrder) -> BrokerResult[QueueState]:
    """Pause or resume a queue on all workers; a name nobody knows is refused."""
    return _switched(order, broker.perform(_SWITCHING, _switch_script(order)))


async def switch_queue_async(broker: PostgresBroker, order: QueueOrder) -> BrokerResult[QueueState]:
    """The same without blocking the event loop."""
    return _switched(order, await broker.perform_async(_SWITCHING, _switch_script(order)))


def _switch_script(order: QueueOrder) -> Script[QueueState | list[str]]:
    """Return the new state, or the known names when this one is not among them."""
    known = order.configured
    if known is None:
        rows: list[QueueName] = yield list_known_queues, Nothing()
        known = [row.name for row in rows]
    if order.name not in known:
        return list(known)
    (state,) = yield (pause_queue if order.paused else resume_queue), QueueName(order.name)
    assert isinstance(state, QueueState)
    return state


def _switched(
    order: QueueOrder, done: BrokerResult[QueueState | list[str]]
) -> BrokerResult[QueueState]:
    if isinstance(done, Err):
        return Err(done.err_value)
    found = done.ok_value
    if isinstance(found, QueueState):
        return Ok(found)
    names = ", ".join(found) or "none"
    message = f"There is no queue {order.name!r}; the known ones are: {names}."
    return Err(BrokerOperationError(BrokerErrorCode.UNKNOWN_QUEUE, message))


def retry_task(
    broker: PostgresBroker, task_id: str, *, suppressed: bool = False
) -> Result[TaskRetried, TaskActionError]:
    """Send the request of a finished task again, as a new task that names the old one.

    Same arguments, options, queue, priority and time limit; the idempotency key is dropped, and so
    is a ``good_until`` that has passed. Refused while the task may still run, and for tasks of a
    workflow.
    """
    if suppressed:
        return Err(_suppressed(task_id))
    fresh_id = new_id()
    done = broker.perform(BrokerErrorCode.ENQUEUE_FAILED, _resend_script(task_id, fresh_id))
    return _resent(task_id, fresh_id, done)


async def retry_task_async(
    broker: PostgresBroker, task_id: str, *, suppressed: bool = False
) -> Result[TaskRetried, TaskActionError]:
    """The same without blocking the event loop."""
    if suppressed:
        return Err(_suppressed(task_id))
    fresh_id = new_id()
    script = _resend_script(task_id, fresh_id)
    done = await broker.perform_async(BrokerErrorCode.ENQUEUE_FAILED, script)
    return _resent(task_id, fresh_id, done)


def _resend_script(task_id: str, fresh_id: str) -> Script[ResentTask | None]:
    if (stored := stored_form(task_id)) is None:
        return None
    return one_or_none((yield resend_task, ResendTask(stored, fresh_id)))


def _resent(
    task_id: str, fresh_id: str, done: BrokerResult[ResentTask | None]
) -> Result[TaskRetried, TaskActionError]:
    if isinstance(done, Err):
        return Err(_in_doubt(task_id, fresh_id, done.err_value))
    met = done.ok_value
    if met is None:
        message = f"There is no task {task_id}."
        return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_FOUND, message, task_id))
    status = TaskStatus(met.was_status)
    if met.new_id is not None:
        return Ok(TaskRetried(met.new_id, task_id, status))
    if met.in_workflow:
        message = f"Task {task_id} belongs to a workflow, which decides itself what runs again."
        code = TaskActionErrorCode.TASK_IS_WORKFLOW_TASK
        return Err(TaskActionError(code, message, task_id, status))
    message = f"Task {task_id} is {status.value}; only a finished task can be sent again."
    return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_RETRYABLE, message, task_id, status))


def _in_doubt(task_id: str, fresh_id: str, error: BrokerOperationError) -> TaskActionError:
    message = error.message
    if error.retryable:  # the answer may have been lost after the COMMIT
        message += f" If anything was stored, it is task {fresh_id}: look before trying again."
    return TaskActionError(
        TaskActionErrorCode.DB_OPERATION_FAILED, message, task_id, retryable=error.retryable
    )


def _suppressed(task_id: str) -> TaskActionError:
    message = "Sends are suppressed in this process, and a retry sends a task."
    return TaskActionError(TaskActionErrorCode.SEND_SUPPRESSED, message, task_id)
