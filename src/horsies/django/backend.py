"""The backend stores a Django task as a task of the application, named by its dotted path."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import Any

try:
    from django.tasks.backends.base import BaseTaskBackend
except ImportError as missing:
    raise ImportError(
        "horsies.django needs Django 6 or newer, which has django.tasks."
    ) from missing
from django.db import connections
from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
from django.tasks.exceptions import InvalidTask, InvalidTaskBackend, TaskResultDoesNotExist
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from horsies.app import Horsies
from horsies.config.app import QueueMode
from horsies.current_task import current_task
from horsies.db.statements.monitor import TaskDetail
from horsies.db.statements.tasks import OutcomeRow
from horsies.monitor.overview import TaskReport, task_script
from horsies.states import TaskStatus
from horsies.task_result import TaskError as HorsiesError
from horsies.task_result import TaskResult as HorsiesResult
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.handle import result_of

_STATUSES = {
    TaskStatus.PENDING: TaskResultStatus.READY,
    TaskStatus.CLAIMED: TaskResultStatus.READY,
    TaskStatus.RUNNING: TaskResultStatus.RUNNING,
    TaskStatus.COMPLETED: TaskResultStatus.SUCCESSFUL,
}
_OPTIONS = {"app", "database"}


class HorsiesBackend(BaseTaskBackend):  # type: ignore[misc]
    """Run ``django.tasks`` tasks in Horsies workers.

    The option ``app`` is the dotted path of the Horsies application. The option ``database`` is the
    alias under which Django uses the application's database; with it, a task enqueued inside
    ``atomic()`` is part of that transaction.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.app = _application(alias, self.options)
        self._database: str | None = self.options.get("database")

    def validate_task(self, task: Task) -> None:
        """Reject a task that this backend cannot run; register any other task with the application.

        Django calls this method for every ``@task``, so a worker only needs to import the modules that
        define tasks.
        """
        super().validate_task(task)
        if task.queue_name not in (names := self.app.get_valid_queue_names()):
            raise InvalidTask(
                f"The Horsies application has no queue {task.queue_name!r}; choose one of {', '.join(names)}."
            )
        if self.app.get_task(task.module_path) is None:
            is_custom = self.app.config.queue_mode is QueueMode.CUSTOM
            queue_name = task.queue_name if is_custom else None
            self.app.task(task.module_path, queue_name=queue_name)(_runner(self, task))

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Store the task; raise TaskSendFailed if it cannot be stored."""
        self.validate_task(task)
        result = _new_result(self.alias, task, "", args, kwargs)
        sender = self.app.tasks[task.module_path].with_options(
            queue_name=task.queue_name,
            priority=_priority(task.priority),
            at=task.run_after and _aware(task.run_after),
            transaction=self._transaction(),
        )
        handle = sender.enqueue(args=result.args, kwargs=result.kwargs)
        _set(result, id=handle.task_id, enqueued_at=timezone.now())
        task_enqueued.send(type(self), task_result=result)
        return result

    def _transaction(self) -> Any:
        if self._database is None or not connections[self._database].in_atomic_block:
            return None
        return connections[self._database]

    def get_result(self, result_id: str) -> TaskResult:
        """Read the state of a task; raise TaskResultDoesNotExist for an unknown id."""
        script = task_script(result_id, payload=True)
        broker = self.app.get_broker()
        report = broker.perform(BrokerErrorCode.MONITORING_QUERY_FAILED, script).unwrap()
        if report is None or not isinstance(task := _imported(report.task.task_name), Task):
            raise TaskResultDoesNotExist(result_id)
        return _stored_result(self.alias, task, report)


def _application(alias: str, options: Mapping[str, Any]) -> Horsies:
    place = f"TASKS[{alias!r}]['OPTIONS']"
    if unknown := sorted(set(options) - _OPTIONS):
        raise InvalidTaskBackend(f"{place} has no option {unknown[0]!r}; use app and database.")
    found = _imported(str(options.get("app")))
    if not isinstance(found, Horsies):
        raise InvalidTaskBackend(
            f"{place}['app'] must be the dotted path of a Horsies application, "
            f'such as "website.background.app", not {options.get("app")!r}.'
        )
    return found


def _imported(path: str) -> Any:
    try:
        return import_string(path)
    except ImportError:
        return None


def _priority(priority: int) -> int:
    """Map Django's 100 (first) to -100 (last) onto 1 to 100; two neighbouring values share one priority."""
    return max(1, 50 - priority // 2)


def _aware(moment: Any) -> Any:
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)


def _set(result: TaskResult, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(
            result, name, value
        )  # The class is frozen; Django's own backends set attributes in the same way.


def _new_result(
    alias: str, task: Task, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TaskResult:
    return TaskResult(
        task=task,
        id=task_id,
        status=TaskResultStatus.READY,
        enqueued_at=None,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=args,
        kwargs=kwargs,
        backend=alias,
        errors=[],
        worker_ids=[],
    )


def _stored_result(alias: str, task: Task, report: TaskReport) -> TaskResult:
    stored = report.task
    status = _STATUSES.get(TaskStatus(stored.status), TaskResultStatus.FAILED)
    call = json.loads(stored.kwargs or "{}")
    task = task.using(queue_name=stored.queue_name)
    result = _new_result(alias, task, stored.id, call.get("args", []), call.get("kwargs", {}))
    attempts = report.attempts[::-1]
    started = [attempt.started_at for attempt in attempts if attempt.started_at]
    workers = [attempt.worker_id or "" for attempt in attempts]
    if status is TaskResultStatus.RUNNING:
        workers.append(stored.claimed_by_worker_id or "")
    _set(
        result,
        status=status,
        enqueued_at=stored.sent_at or stored.enqueued_at,
        started_at=started[0] if started else stored.started_at,
        last_attempted_at=stored.started_at,
        finished_at=stored.completed_at or stored.failed_at,
        worker_ids=workers,
    )
    if status is TaskResultStatus.SUCCESSFUL:
        _set(result, _return_value=_outcome(stored).ok)
    elif status is TaskResultStatus.FAILED:
        result.errors.append(_stored_error(stored))
    return result


def _outcome(stored: TaskDetail) -> HorsiesResult[Any, HorsiesError]:
    return result_of(OutcomeRow(*(getattr(stored, name) for name in OutcomeRow._fields)), None)


def _stored_error(stored: TaskDetail) -> TaskError:
    """Return the last attempt's error; an error without an exception has the class
    ``horsies.TaskFailed``.
    """
    error = _outcome(stored).err_value
    if not isinstance(error.exception, dict):
        text = f"{stored.error_code or error.error_code}: {error.message}"
        return TaskError(exception_class_path="horsies.TaskFailed", traceback=text)
    name, text = error.exception["type"], error.exception["traceback"]
    return TaskError(exception_class_path=_class_path(name, text), traceback=text)


def _class_path(name: str, traceback: str) -> str:
    """Find an exception's module in its traceback, whose last line begins with ``module.Name:``."""
    found = re.findall(rf"^((?:\w+\.)*{re.escape(name)})(?=:|$)", traceback, re.MULTILINE)
    path = str(found[-1]) if found else name
    return path if "." in path else f"builtins.{path}"


def _runner(backend: HorsiesBackend, task: Task) -> Any:
    """Return the function that Horsies registers for a Django task."""

    def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
        with _signalled(backend, task, args, kwargs) as result:
            _set(
                result, _return_value=normalize_json(task.func(*_context(result), *args, **kwargs))
            )
        return result.return_value

    async def run_async(args: list[Any], kwargs: dict[str, Any]) -> Any:
        with _signalled(backend, task, args, kwargs) as result:
            value = await task.func(*_context(result), *args, **kwargs)
            _set(result, _return_value=normalize_json(value))
        return result.return_value

    return run_async if iscoroutinefunction(task.func) else run


def _context(result: TaskResult) -> tuple[TaskContext, ...]:
    return (TaskContext(task_result=result),) if result.task.takes_context else ()


@contextmanager
def _signalled(
    backend: HorsiesBackend, task: Task, args: list[Any], kwargs: dict[str, Any]
) -> Iterator[TaskResult]:
    """Send Django's signals at the start and the end of an attempt."""
    running = current_task()
    result = _new_result(backend.alias, task, running.id, args, kwargs)
    _set(
        result,
        status=TaskResultStatus.RUNNING,
        enqueued_at=running.sent_at,
        started_at=running.started_at,
        last_attempted_at=running.started_at,
        # Django uses the length of this list as the number of attempts; only get_result reads the
        # workers of earlier attempts.
        worker_ids=[f"{socket.gethostname()}:{os.getpid()}"] * running.attempt,
    )
    task_started.send(type(backend), task_result=result)
    try:
        yield result
    except BaseException as error:
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        text = "".join(format_exception(error))
        result.errors.append(TaskError(exception_class_path=path, traceback=text))
        _set(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
        task_finished.send(type(backend), task_result=result)
        raise
    _set(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now())
    task_finished.send(type(backend), task_result=result)
