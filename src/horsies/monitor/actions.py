"""Operator actions: pause and resume queues, retry finished tasks, and send new ones.

A pause takes effect on every worker at its next turn. A retry never changes the finished task: it sends
the same request again, as a new task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horsies.codec.calls import EncodedCall
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.monitor import (
    QueueName,
    QueueState,
    list_known_queues,
    list_queue_states,
)
from horsies.db.statements.queues import (
    ResentTask,
    edit_resent,
    pause_queue,
    resend_tasks,
    resume_queue,
)
from horsies.db.statements.tasks import find_sent_tasks
from horsies.ids import new_id, stored_form
from horsies.result import Err, Ok, Result
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.handle import (
    TaskActionError,
    TaskActionErrorCode,
    TaskHandle,
    action_result,
    no_such_task,
    task_action,
)
from horsies.tasks.recording import Action, Switched, perform_action, perform_action_async
from horsies.tasks.request import Stamp, TaskSendResult
from horsies.tasks.send import PreparedSend, Sender

_SWITCHING = BrokerErrorCode.QUEUE_SWITCH_FAILED
_SENDING = BrokerErrorCode.ENQUEUE_FAILED


@dataclass(frozen=True, slots=True)
class TaskRetried:
    """The result of sending a request again: the new task and the original task."""

    task_id: str
    """The id of the new task."""
    retried_from_task_id: str
    """The id of the task whose request was sent again."""
    was_status: TaskStatus
    """The final status of the original task."""


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """A request to pause or resume a queue.

    ``configured`` lists the application's queues. Without an application it is None, and any queue in
    use in the database is accepted. ``reason`` is stored with the record of the change.
    """

    name: str
    paused: bool
    configured: Sequence[str] | None = None
    reason: str | None = None

    @property
    def action(self) -> Action:
        verb = "pause_queue" if self.paused else "resume_queue"
        return Action(verb, f"queue {self.name}", self.reason)


def switch_queue(broker: PostgresBroker, order: QueueOrder) -> BrokerResult[QueueState]:
    """Pause or resume a queue on all workers; return Err(UNKNOWN_QUEUE) for an unknown name."""
    done = perform_action(broker, _SWITCHING, order.action, _switch_script(order))
    return done.and_then(lambda switched: switched).map(lambda switched: switched.state)


async def switch_queue_async(broker: PostgresBroker, order: QueueOrder) -> BrokerResult[QueueState]:
    done = await perform_action_async(broker, _SWITCHING, order.action, _switch_script(order))
    return done.and_then(lambda switched: switched).map(lambda switched: switched.state)


def check_queue(
    broker: PostgresBroker, name: str, configured: Sequence[str] | None
) -> BrokerResult[None]:
    """Return Err(UNKNOWN_QUEUE) for a name that is neither configured nor in use."""
    done = broker.perform(_SWITCHING, known_queue_script(name, configured))
    return done.and_then(lambda known: known)


def known_queue_script(name: str, configured: Sequence[str] | None) -> Script[BrokerResult[None]]:
    known = configured
    if known is None:
        rows: list[QueueName] = yield list_known_queues()
        known = [row.name for row in rows]
    if name in known:
        return Ok(None)
    names = ", ".join(known) or "none"
    message = f"There is no queue {name!r}; the known ones are: {names}."
    return Err(BrokerOperationError(BrokerErrorCode.UNKNOWN_QUEUE, message))


def _switch_script(order: QueueOrder) -> Script[BrokerResult[Switched[QueueState]]]:
    known = yield from known_queue_script(order.name, order.configured)
    if isinstance(known, Err):
        return known
    before: list[QueueState] = yield list_queue_states()
    was_paused = any(one.name == order.name and one.is_paused for one in before)
    (state,) = yield (pause_queue if order.paused else resume_queue), QueueName(order.name)
    assert isinstance(state, QueueState)
    return Ok(Switched(state, order.paused != was_paused))


def retry_task(
    broker: PostgresBroker,
    task_id: str,
    *,
    suppressed: bool = False,
    reason: str | None = None,
    call: EncodedCall | None = None,
) -> Result[TaskRetried, TaskActionError]:
    """Send a finished task's request again, as a new task that refers to the old one.

    The new task has the same arguments, unless ``call`` has others, and the same options, queue,
    priority and time limit. It has no idempotency key, and no ``good_until`` that has passed.
    Unfinished tasks and workflow tasks are rejected.
    """
    if suppressed:
        return Err(_suppressed(task_id))
    new_task_id = new_id()
    action = task_action("retry_task", task_id, reason)
    done = perform_action(broker, _SENDING, action, _resend_script(task_id, new_task_id, call))
    return _retried(task_id, new_task_id, done)


async def retry_task_async(
    broker: PostgresBroker,
    task_id: str,
    *,
    suppressed: bool = False,
    reason: str | None = None,
    call: EncodedCall | None = None,
) -> Result[TaskRetried, TaskActionError]:
    if suppressed:
        return Err(_suppressed(task_id))
    new_task_id = new_id()
    action = task_action("retry_task", task_id, reason)
    script = _resend_script(task_id, new_task_id, call)
    return _retried(
        task_id, new_task_id, await perform_action_async(broker, _SENDING, action, script)
    )


async def send_task_async(
    sender: Sender, arguments: Mapping[str, Any], stamp: Stamp, reason: str | None = None
) -> TaskSendResult[TaskHandle[Any]]:
    """Send a new task manually and record its author; sending the same stamp again finds the same task."""
    ready = sender.prepare((), arguments, stamp=stamp)
    if isinstance(ready, Err):
        return ready
    prepared = ready.value
    action = task_action("send_task", stamp.task_id, reason)
    done = await perform_action_async(prepared.broker, _SENDING, action, _send_script(prepared))
    stored = done.and_then(lambda sent: sent).map(lambda sent: sent.state)
    return prepared.end(stored)


def _send_script(prepared: PreparedSend) -> Script[BrokerResult[Switched[str]]]:
    row = prepared.request.row
    is_sent = bool((yield find_sent_tasks([row.id])))
    stored = yield from prepared.script()
    return Ok(Switched(stored, stored == row.id and not is_sent, row.task_name))


def _resend_script(
    task_id: str, new_task_id: str, call: EncodedCall | None
) -> Script[Result[TaskRetried, TaskActionError]]:
    resent: ResentTask | None = None
    if (stored := stored_form(task_id)) is not None:
        order = resend_tasks([stored], [new_task_id], once=False)
        resent = one_or_none((yield order))
    if resent is None:
        return Err(no_such_task(task_id))
    status = TaskStatus(resent.was_status)
    if resent.new_id is not None:
        if call is not None:
            yield edit_resent(resent.new_id, call.args_json, call.kwargs_json)
        return Ok(TaskRetried(resent.new_id, task_id, status))
    if resent.is_redacted:
        message = f"Task {task_id} is redacted: its arguments are gone, so it cannot be sent again."
        code = TaskActionErrorCode.TASK_NOT_RETRYABLE
        return Err(TaskActionError(code, message, task_id, status))
    if resent.in_workflow:
        message = f"Task {task_id} belongs to a workflow; retry the node of the workflow instead."
        code = TaskActionErrorCode.TASK_IS_WORKFLOW_TASK
        return Err(TaskActionError(code, message, task_id, status))
    message = f"Task {task_id} is {status.value}; only a finished task can be retried."
    return Err(TaskActionError(TaskActionErrorCode.TASK_NOT_RETRYABLE, message, task_id, status))


def _retried(
    task_id: str, new_task_id: str, done: BrokerResult[Result[TaskRetried, TaskActionError]]
) -> Result[TaskRetried, TaskActionError]:
    result = action_result(task_id, done)
    if isinstance(result, Err) and result.err_value.retryable:
        # The connection may have been lost after the COMMIT, so the task may exist already.
        doubt = f" The new task may exist as {new_task_id}; check before you try again."
        return Err(replace(result.err_value, message=result.err_value.message + doubt))
    return result


def _suppressed(task_id: str) -> TaskActionError:
    message = "Sends are suppressed in this process, and a retry sends a task."
    return TaskActionError(TaskActionErrorCode.SEND_SUPPRESSED, message, task_id)
