"""Horsies: the application object, where configuration, tasks and the broker meet.

The composition root of a process. It registers tasks, remembers where they are defined, and lends
the broker to whatever sends or reads. Producers, workers and the command line all start from one of
these.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Never, ParamSpec, Protocol, TypeVar, overload

from horsies.broker import BrokerResult, PostgresBroker
from horsies.check import import_errors, live_errors, policy_errors
from horsies.config import AppConfig, PostgresConfig
from horsies.db.connect import describe
from horsies.definition import (
    TaskDefinition,
    choose_queue,
    read_code,
    read_function,
    read_mapper,
    read_name,
    read_results,
    read_retry_policy,
    read_signature,
    read_timeout,
    refuse_unknown_options,
)
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    HorsiesError,
    RegistryError,
    SourceLocation,
)
from horsies.handle import TaskActionError, TaskCancelled, TaskHandle, TaskInfo
from horsies.modules import MissingModuleFile, expand_module_globs, import_entry
from horsies.outcome import TaskError, TaskResult
from horsies.result import Result
from horsies.retry import RetryPolicy
from horsies.send import Producer
from horsies.task import AnyTask, TaskFunction

P = ParamSpec("P")
T = TypeVar("T")

ChildProcessStartHook = Callable[[], None]
Hook = TypeVar("Hook", bound=ChildProcessStartHook)
SUPPRESSION_VARIABLES = ("HORSIES_SUPPRESS_SENDS", "TASKLIB_SUPPRESS_SENDS")

logger = logging.getLogger("horsies.app")
_current: list[Horsies] = []


class TaskDecorator(Protocol):
    """What ``@app.task(...)`` does to a function: the same parameters, a typed send."""

    @overload
    def __call__(
        self, function: Callable[P, Awaitable[TaskResult[T, TaskError]]], /
    ) -> TaskFunction[P, T]: ...
    @overload
    def __call__(
        self, function: Callable[P, TaskResult[T, TaskError]], /
    ) -> TaskFunction[P, T]: ...


class Horsies:
    """An application: its configuration, its tasks, its broker.

    Example:
        app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/shop")))

        @app.task("add")
        def add(a: int, b: int) -> TaskResult[int, TaskError]:
            return TaskResult(ok=a + b)

    Without a configuration the database is the one named by HORSIES_DATABASE_URL or DATABASE_URL.
    """

    def __init__(self, config: AppConfig | None = None) -> None:
        self.config = config or AppConfig(broker=PostgresConfig.from_env())
        self.role = "producer"
        self._tasks: dict[str, AnyTask] = {}
        self._modules: list[str] = []
        self._hooks: list[ChildProcessStartHook] = []
        self._broker: PostgresBroker | None = None
        self._broker_lock = threading.Lock()
        self._suppressed = False
        self._producer = Producer(self.config, self.get_broker, self.are_sends_suppressed)

    # Defining tasks

    def task(
        self,
        task_name: str,
        *,
        queue_name: str | None = None,
        retry_policy: RetryPolicy | None = None,
        exception_mapper: Mapping[type[BaseException], str] | None = None,
        default_unhandled_error_code: str | None = None,
        timeout_ms: int | None = None,
        **unknown: Never,
    ) -> TaskDecorator:
        """Register a function as a task.

        ``queue_name`` is required in CUSTOM mode and refused in DEFAULT mode. ``retry_policy`` says
        which error codes run again and when. ``exception_mapper`` names exceptions that escape the
        function. ``timeout_ms`` (at least 100) stops a run that takes longer.

        Example:
            @app.task("charge", retry_policy=RetryPolicy.fixed([1, 5],
            auto_retry_for=["GATEWAY_DOWN"])) def charge(order_id: int) -> TaskResult[str,
            TaskError]: ...
        """

        def decorate(function: Any) -> Any:
            location = SourceLocation.from_function(function) if callable(function) else None
            refuse_unknown_options(unknown, location)
            plain = read_function(function, location)
            definition = TaskDefinition(
                name=read_name(task_name, location),
                function=plain,
                is_async=inspect.iscoroutinefunction(plain),
                queue_name=(queue := choose_queue(self.config, queue_name, location)).name,
                priority=queue.priority,
                retry_policy=read_retry_policy(retry_policy, location),
                exception_mapper=read_mapper(exception_mapper, location),
                default_unhandled_error_code=read_code(default_unhandled_error_code, location),
                timeout_ms=read_timeout(timeout_ms, location),
                signature=read_signature(plain, location),
                results=read_results(plain, location),
                location=location,
            )
            return self._register(definition)

        return decorate

    def _register(self, definition: TaskDefinition) -> AnyTask:
        known = self._tasks.get(definition.name)
        if known is None:
            self._tasks[definition.name] = TaskFunction(self._producer, definition)
            return self._tasks[definition.name]
        first, second = known.definition.location, definition.location
        if first is not None and first == second and not first.file.startswith("<"):
            return known  # the module was imported again
        raise RegistryError(
            f"The task name {definition.name!r} is used twice.",
            code=ErrorCode.TASK_DUPLICATE_NAME,
            location=second,
            notes=[f"first defined at {first or 'an unknown place'}"],
            help_text="give one of the two tasks another name",
        )

    def list_tasks(self) -> list[str]:
        """Return the names of the registered tasks."""
        return list(self._tasks)

    def tasks(self) -> dict[str, AnyTask]:
        """Return the registered tasks by name."""
        return dict(self._tasks)

    def get_task(self, task_name: str) -> AnyTask | None:
        """Return a registered task, or None."""
        return self._tasks.get(task_name)

    # Queues

    def get_valid_queue_names(self) -> list[str]:
        """Return the names of the configured queues."""
        return [queue.name for queue in self.config.queues()]

    def validate_queue_name(self, queue_name: str | None) -> str:
        """Return the queue a task with this ``queue_name`` goes to, or raise HRS-200 or HRS-103."""
        return choose_queue(self.config, queue_name, None).name

    # Where tasks are defined

    def discover_tasks(self, modules: Sequence[str]) -> None:
        """Remember which modules define tasks; workers import them. A second call replaces the
        list.
        """
        if isinstance(modules, str):
            raise ConfigurationError(
                f"discover_tasks takes a list of modules, not the text {modules!r}.",
                code=ErrorCode.CLI_INVALID_ARGS,
                help_text=f"app.discover_tasks([{modules!r}])",
            )
        if self._modules:
            logger.warning(
                "discover_tasks was called again; the earlier list of modules is replaced"
            )
        self._modules = list(modules)

    def expand_module_globs(
        self, patterns: Sequence[str], exclude: Sequence[str] | None = None
    ) -> list[str]:
        """Turn glob patterns into file paths for ``discover_tasks``; dotted names pass through."""
        return expand_module_globs(patterns, exclude)

    def get_discovered_task_modules(self) -> list[str]:
        """Return the remembered modules."""
        return list(self._modules)

    def import_task_modules(self, modules: Sequence[str] | None = None) -> list[str]:
        """Import the modules now and return those imported; a missing file is skipped with a
        warning.
        """
        imported = []
        for entry in self._modules if modules is None else modules:
            try:
                import_entry(entry)
            except MissingModuleFile:
                logger.warning("task module %s does not exist; skipped", entry)
            else:
                imported.append(entry)
        return imported

    # Suppressing sends

    def suppress_sends(self, value: bool = True) -> None:
        """Make every send of this process return SEND_SUPPRESSED, or stop doing so."""
        self._suppressed = value

    def are_sends_suppressed(self) -> bool:
        """Tell whether sends are suppressed, by the application or by the environment."""
        return self._suppressed or any(
            os.environ.get(name) == "1" for name in SUPPRESSION_VARIABLES
        )

    @contextmanager
    def sends_suppressed(self) -> Iterator[None]:
        """Suppress sends while task modules are imported."""
        before, self._suppressed = self._suppressed, True
        try:
            yield
        finally:
            self._suppressed = before

    # Child process hooks

    def on_child_process_start(self, fn: Hook) -> Hook:
        """Run this function once in every worker child, after task imports, before the first task.

        Example:
            @app.on_child_process_start
            def reset_engine() -> None:
                engine.dispose(close=False)
        """
        if not callable(fn) or _is_async(fn):
            raise ConfigurationError(
                "A child process hook must be a plain function without parameters.",
                code=ErrorCode.CONFIG_INVALID_CHILD_HOOK,
                help_text="hooks run before any event loop exists: use `def`, not `async def`",
            )
        if not any(fn is known for known in self._hooks):
            self._hooks.append(fn)
        return fn

    def get_child_process_start_hooks(self) -> list[ChildProcessStartHook]:
        """Return the hooks in the order they were registered."""
        return list(self._hooks)

    # Reading results by id

    def handle(self, task_id: str, task_name: str | None = None) -> TaskHandle[Any]:
        """Return a handle for a task sent elsewhere; its result is typed by ``task_name`` if given."""
        task = self._tasks.get(task_name) if task_name else None
        return TaskHandle(task_id, self.get_broker(), task.definition.results if task else None)

    def get_result(self, task_id: str, timeout_ms: int | None = None) -> TaskResult[Any, TaskError]:
        """Wait for the result of a task by its id; see ``TaskHandle.get``."""
        return self.handle(task_id).get(timeout_ms)

    async def get_result_async(
        self, task_id: str, timeout_ms: int | None = None
    ) -> TaskResult[Any, TaskError]:
        """``get_result`` without blocking the event loop."""
        return await self.handle(task_id).get_async(timeout_ms)

    def get_task_info(
        self,
        task_id: str,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """Describe a task by its id; see ``TaskHandle.info``."""
        return self.handle(task_id).info(
            include_result=include_result,
            include_failed_reason=include_failed_reason,
            include_attempts=include_attempts,
        )

    async def get_task_info_async(
        self,
        task_id: str,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """``get_task_info`` without blocking the event loop."""
        return await self.handle(task_id).info_async(
            include_result=include_result,
            include_failed_reason=include_failed_reason,
            include_attempts=include_attempts,
        )

    def cancel_task(
        self, task_id: str, *, include_running: bool = True
    ) -> Result[TaskCancelled, TaskActionError]:
        """Cancel a task by its id; see ``TaskHandle.cancel``."""
        return self.handle(task_id).cancel(include_running=include_running)

    async def cancel_task_async(
        self, task_id: str, *, include_running: bool = True
    ) -> Result[TaskCancelled, TaskActionError]:
        """``cancel_task`` without blocking the event loop."""
        return await self.handle(task_id).cancel_async(include_running=include_running)

    # The broker and the life of the application

    def get_broker(self) -> PostgresBroker:
        """Return the broker, built on first use; nothing is connected yet."""
        if self._broker is None:
            built = self._build_broker()
            with self._broker_lock:  # of two threads that come first, both get the same one
                self._broker = self._broker or built
        return self._broker

    def _build_broker(self) -> PostgresBroker:
        try:
            return PostgresBroker(self.config.broker, role=self.role)
        except HorsiesError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"The broker could not be built: {describe(error)}",
                code=ErrorCode.BROKER_INIT_FAILED,
            ) from error

    def set_role(self, role: str) -> None:
        """Say what this process is: 'producer', 'worker' or 'scheduler'."""
        self.role = role
        logger.info("running as %s", role)

    def check(self, *, live: bool = False) -> list[HorsiesError]:
        """Validate everything that can be validated before running; an empty list means all is
        well.

        Imports the discovered modules with sends suppressed, checks error codes and policies, and
        with ``live`` connects to the database and proves that LISTEN works. A phase with errors
        ends the run.
        """
        with self.sends_suppressed():
            errors = import_errors(self._modules, import_entry)
        if not errors:
            errors = policy_errors(self.config, [task.definition for task in self._tasks.values()])
        if not errors and live:
            errors = live_errors(self.config.broker)
        return errors

    def close(self) -> BrokerResult[None]:
        """Close the connections of this process; the next use opens new ones."""
        return self.get_broker().close()

    async def close_async(self) -> BrokerResult[None]:
        """Close the connections of this process, the running event loop's included."""
        return await self.get_broker().close_async()


def set_current_app(app: Horsies) -> None:
    """Make this the application of the process, as a worker child does."""
    _current[:] = [app]


def get_current_app() -> Horsies | None:
    """Return the application of this worker child, or None elsewhere."""
    return _current[0] if _current else None


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - asked for its kind, not called
    )
