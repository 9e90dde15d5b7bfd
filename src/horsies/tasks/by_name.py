"""Sends by name, for producers that do not import the task's code: the worker checks the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from horsies.codec.calls import CallSignature
from horsies.codec.results import ResultCodec
from horsies.config.app import (
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE_NAME,
    AppConfig,
    QueueMode,
    queue_name_problem,
)
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.definition import NAME_LENGTH_MAX, TaskDefinition, is_storable_name
from horsies.tasks.handle import TaskHandle
from horsies.tasks.options import SendOptions
from horsies.tasks.request import TaskSendError, TaskSendResult, refused
from horsies.tasks.send import PreparedSend, Producer, Sender


def _anything(**arguments: Any) -> TaskResult[Any, TaskError]:
    """Stand in for a task function whose code is elsewhere."""
    raise NotImplementedError


_SIGNATURE = CallSignature.of(_anything)
_RESULTS = ResultCodec.of(Any, TaskError)

Ready = tuple[Sender, TaskSendResult[PreparedSend[TaskHandle[Any]]]]


def prepare_by_name(
    producer: Producer,
    known: TaskDefinition | None,
    task_name: str,
    arguments: Mapping[str, Any] | None,
    options: SendOptions,
) -> Ready:
    """Check a send by name; ``known`` is the task of that name, if this application has one."""
    definition = _definition(producer.config, known, task_name, options.queue_name)
    sender = Sender(producer, definition, replace(options, queue_name=None))
    problem = _problem(producer.config, known, task_name, arguments, options.queue_name)
    if problem is not None:
        return sender, Err(refused(definition, problem))
    return sender, sender.prepare((), arguments or {})


def prepare_retry(producer: Producer, known: TaskDefinition | None, error: TaskSendError) -> Ready:
    """Prepare a failed send once more, by the payload in its error."""
    payload = getattr(error, "payload", None)
    name = "of another error" if payload is None else payload.task_name
    definition = known or _definition(producer.config, None, name, None)
    sender = Sender(producer, definition, SendOptions())
    return sender, sender.prepare_retry(error, scheduled=None)


def _definition(
    config: AppConfig, known: TaskDefinition | None, task_name: str, queue_name: str | None
) -> TaskDefinition:
    if known is not None and queue_name is None:
        return replace(known, signature=_SIGNATURE)
    queue_name = queue_name or DEFAULT_QUEUE_NAME
    priorities = {queue.name: queue.priority for queue in config.queues()}
    priority = priorities.get(queue_name, DEFAULT_PRIORITY)
    if known is not None:
        return replace(known, signature=_SIGNATURE, queue_name=queue_name, priority=priority)
    return TaskDefinition(
        name=task_name,
        function=_anything,
        is_async=False,
        is_plain=True,
        queue_name=queue_name,
        priority=priority,
        retry_policy=None,
        exception_mapper={},
        default_unhandled_error_code=None,
        timeout_ms=None,
        signature=_SIGNATURE,
        results=_RESULTS,
        location=None,
    )


def _problem(
    config: AppConfig,
    known: TaskDefinition | None,
    task_name: object,
    arguments: object,
    queue_name: object,
) -> str | None:
    if not isinstance(task_name, str) or not is_storable_name(task_name):
        return f"a task name is a text of 1 to {NAME_LENGTH_MAX} characters"
    if not isinstance(arguments, Mapping | None):
        return (
            "send_by_name takes the arguments as one dictionary of JSON values, "
            f"not {type(arguments).__name__}"
        )
    if queue_name is None:
        is_open = known is None and config.queue_mode is QueueMode.CUSTOM
        return "send_by_name needs a queue_name in CUSTOM queue mode" if is_open else None
    if not isinstance(queue_name, str):
        return f"queue_name must be a text, not {type(queue_name).__name__}"
    return queue_name_problem(queue_name)
