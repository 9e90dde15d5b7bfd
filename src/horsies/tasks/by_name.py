"""Sends tasks by name, for producers that do not import the task's code; the worker checks the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from horsies.config.app import (
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE_NAME,
    AppConfig,
    QueueMode,
    queue_name_problem,
)
from horsies.config.postgres import PostgresConfig
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.definition import (
    NAME_LENGTH_MAX,
    RESERVED_PREFIX,
    DecoratorOptions,
    TaskDefinition,
    define,
    is_storable_name,
)
from horsies.tasks.options import SendKeywords, SendOptions, send_options
from horsies.tasks.request import TaskSendError, TaskSendResult, refused
from horsies.tasks.send import PreparedSend, Producer, Sender


def _anything(**arguments: Any) -> TaskResult[Any, TaskError]:
    """Represents a task function whose code this process does not have."""
    raise NotImplementedError


@cache
def _stand_in() -> TaskDefinition:
    broker = PostgresConfig(database_url="postgresql://localhost/none")
    options = DecoratorOptions(None, None, None, None, None, {})
    return define(AppConfig(broker=broker), _anything, "anything", options)


Arguments = Mapping[str, Any] | None


class Defined(Protocol):
    """A registered task."""

    definition: TaskDefinition


FindTask = Callable[[str], Defined | None]
Ready = tuple[Sender, TaskSendResult[PreparedSend]]


def prepare_by_name(
    producer: Producer,
    find: FindTask,
    task_name: str,
    arguments: Arguments,
    keywords: SendKeywords,
) -> Ready:
    """Check a send by name; ``find`` returns the task with that name, if this application has it."""
    known = _known(find, task_name)
    options = send_options(keywords)
    queue_name, options = options.queue_name, replace(options, queue_name=None)
    problem = _problem(producer.config, known, task_name, arguments, queue_name)
    if problem is not None:
        unsendable = replace(_stand_in(), name=task_name)
        return Sender(producer, unsendable, options), Err(refused(unsendable, problem))
    definition = _definition(producer.config, known, task_name, queue_name)
    sender = Sender(producer, definition, options)
    return sender, sender.prepare((), arguments or {})


def prepare_retry(producer: Producer, find: FindTask, error: TaskSendError) -> Ready:
    """Prepare a failed send again, from the payload in the error."""
    payload = getattr(error, "payload", None)
    name = "of another error" if payload is None else payload.task_name
    definition = _known(find, name) or _definition(producer.config, None, name, None)
    sender = Sender(producer, definition, SendOptions())
    return sender, sender.prepare_retry(error, scheduled=None)


def _known(find: FindTask, task_name: object) -> TaskDefinition | None:
    found = find(task_name) if isinstance(task_name, str) else None
    return found.definition if found else None


def _definition(
    config: AppConfig, known: TaskDefinition | None, task_name: str, queue_name: str | None
) -> TaskDefinition:
    stand_in = _stand_in()
    if known is not None and queue_name is None:
        return replace(known, signature=stand_in.signature)
    queue_name = queue_name or DEFAULT_QUEUE_NAME
    priorities = {queue.name: queue.priority for queue in config.queues()}
    priority = priorities.get(queue_name, DEFAULT_PRIORITY)
    definition = known or replace(stand_in, name=task_name)
    return replace(
        definition, signature=stand_in.signature, queue_name=queue_name, priority=priority
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
    if task_name.startswith(RESERVED_PREFIX):
        return f"names that begin with {RESERVED_PREFIX!r} belong to horsies itself"
    if not isinstance(arguments, Mapping | None):
        return (
            "send_by_name takes the arguments as one dictionary of JSON values, "
            f"not {type(arguments).__name__}"
        )
    try:
        dict(arguments or {})
    except Exception as error:  # the application's Mapping may raise any exception
        return f"the arguments could not be read: {type(error).__name__}"
    if queue_name is None:
        is_open = known is None and config.queue_mode is QueueMode.CUSTOM
        return "send_by_name needs a queue_name in CUSTOM queue mode" if is_open else None
    if not isinstance(queue_name, str):
        return f"queue_name must be a text, not {type(queue_name).__name__}"
    return queue_name_problem(queue_name)
