"""Horsies: the application object, which ties together configuration, tasks and the broker.

Producers, workers and commands all start from an application. It
registers tasks and creates the broker on first use.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from horsies.config.app import AppConfig, Rate
from horsies.config.sources import as_app_config, environment_migrates
from horsies.db.database import resolve_url
from horsies.errors import HorsiesError
from horsies.modules import (
    Deferred,
    expand_module_globs,
    import_entries,
    import_entry,
    importing_module,
    module_of,
    refuse_single_module,
)
from horsies.monitor.operations import Operations
from horsies.result import Ok
from horsies.retry import RetryPolicy
from horsies.task import (
    AnyTask,
    BatchDecorator,
    DurableDecorator,
    RegisteredTasks,
    TaskDecorator,
    TaskFunction,
    handle_of,
    register,
)
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.batch import Batch
from horsies.tasks.broker import BrokerResult, PostgresBroker, build_broker
from horsies.tasks.by_name import Arguments, prepare_by_name, prepare_retry
from horsies.tasks.definition import (
    DecoratorOptions,
    DurableTraits,
    KeySource,
    OnStop,
    TaskDefinition,
    choose_queue,
    define,
    durable_policy,
    is_decorated,
    versioned_name,
)
from horsies.tasks.handle import TaskHandle
from horsies.tasks.hooks import (
    AroundTask,
    ChildProcessHook,
    Hooks,
    add_once,
    refuse_bad_around,
    refuse_bad_hook,
    refuse_bad_send_hook,
    registers,
)
from horsies.tasks.options import SendHook, SendKeywords
from horsies.tasks.request import TaskSendError, TaskSendResult
from horsies.tasks.send import Producer, store_prepared, store_prepared_async

if TYPE_CHECKING:
    from horsies.monitor.diagnose import explain
    from horsies.scheduler import api as schedules
    from horsies.scheduler import entry
    from horsies.scheduler.api import Schedules
    from horsies.tasks import check
    from horsies.webhooks import task as webhooks
    from horsies.workflow import checks, handles, spec
    from horsies.workflow.checks import Builder, Case, RegisteredBuilder
    from horsies.workflow.handles import WorkflowHandles
    from horsies.workflow.spec import WorkflowMaker
else:  # Modules that a producer may not need
    check = Deferred("horsies.tasks.check")
    explain = Deferred("horsies.monitor.diagnose.explain")
    schedules = Deferred("horsies.scheduler.api")
    entry = Deferred("horsies.scheduler.entry")
    webhooks = Deferred("horsies.webhooks.task")
    checks = Deferred("horsies.workflow.checks")
    handles = Deferred("horsies.workflow.handles")
    spec = Deferred("horsies.workflow.spec")

ChildProcessStartHook = ChildProcessHook
"""A start or stop hook of a child process: a plain or ``async def`` function without parameters."""
P = ParamSpec("P")
T = TypeVar("T")
Hook = TypeVar("Hook", bound=ChildProcessHook)
Around = TypeVar("Around", bound=AroundTask)
SendHookType = TypeVar("SendHookType", bound=SendHook)
SUPPRESSION_VARIABLES = ("HORSIES_SUPPRESS_SENDS", "TASKLIB_SUPPRESS_SENDS")

logger = logging.getLogger("horsies.app")
_current: list[Horsies] = []


class Horsies(Operations):
    """An application: configuration, tasks and broker.

    Example:
        app = Horsies("postgresql://localhost/shop")

        @app.task
        def add(a: int, b: int) -> int:
            return a + b

    A URL is short for ``AppConfig(broker=PostgresConfig(database_url=url))``. Without a configuration,
    the environment variable HORSIES_DATABASE_URL or DATABASE_URL names the database. With
    ``migrate=False``, ``run_schema_migrations=False`` or HORSIES_MIGRATE=0, only `horsies migrate`
    changes the schema.
    """

    def __init__(
        self,
        config: AppConfig | str | None = None,
        *,
        migrate: bool = True,
        run_schema_migrations: bool = True,
    ) -> None:
        self.config = as_app_config(config)
        self.migrates = migrate and run_schema_migrations and environment_migrates()
        self._role = "producer"
        self._tasks: dict[str, AnyTask] = {}
        self.tasks = RegisteredTasks(self._tasks)
        self._modules: list[str] = []
        self._home = importing_module()
        self.hooks = Hooks()
        self._builders: list[RegisteredBuilder] = []
        self._broker: PostgresBroker | None = None
        self._broker_lock = threading.Lock()
        self._suppressed = False
        self._running_imports: list[object] = []
        self._producer = Producer(self.config, self.get_broker, self.are_sends_suppressed)
        if self.config.webhooks:
            for task in webhooks.builtin_tasks(self.config, self.get_broker):
                register(self._tasks, self._producer, task)

    # Defining tasks

    # Repeats the overloads of TaskDecorator for the decorator without parentheses.
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Awaitable[TaskResult[T, TaskError]]], /
    ) -> TaskFunction[P, T, TaskResult[T, TaskError]]: ...
    @overload
    def task(
        self, function: Callable[P, TaskResult[T, TaskError]], /
    ) -> TaskFunction[P, T, TaskResult[T, TaskError]]: ...
    @overload
    def task(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> TaskFunction[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def task(self, function: Callable[P, T], /) -> TaskFunction[P, T, T]: ...
    @overload
    def task(
        self,
        task_name: str | None = None,
        *,
        queue_name: str | None = None,
        retry_policy: RetryPolicy | None = None,
        exception_mapper: Mapping[type[BaseException], str] | None = None,
        default_unhandled_error_code: str | None = None,
        timeout_ms: int | None = None,
        memory_limit_mb: int | None = None,
        on_stop: OnStop = "finish",
        burst: bool = False,
        key: KeySource | None = None,
        rate: Rate | None = None,
    ) -> TaskDecorator: ...
    @overload
    def task(
        self,
        task_name: str | None = None,
        *,
        batch: Batch,
        queue_name: str | None = None,
        retry_policy: RetryPolicy | None = None,
        exception_mapper: Mapping[type[BaseException], str] | None = None,
        default_unhandled_error_code: str | None = None,
        timeout_ms: int | None = None,
        memory_limit_mb: int | None = None,
        on_stop: OnStop = "finish",
        key: KeySource | None = None,
        rate: Rate | None = None,
    ) -> BatchDecorator: ...
    def task(
        self,
        task_name: Any = None,
        *,
        queue_name: str | None = None,
        retry_policy: RetryPolicy | None = None,
        exception_mapper: Mapping[type[BaseException], str] | None = None,
        default_unhandled_error_code: str | None = None,
        timeout_ms: int | None = None,
        memory_limit_mb: int | None = None,
        on_stop: OnStop = "finish",
        burst: bool = False,
        key: KeySource | None = None,
        rate: Rate | None = None,
        batch: Batch | None = None,
        **unknown: object,
    ) -> Any:
        """Register a function as a task; its default name is ``module.function``.

        The function either returns a value, and raises ``TaskFailed`` for its own errors, or it returns a
        ``TaskResult[T, TaskError]``.

        ``queue_name`` is required in CUSTOM mode and rejected in DEFAULT mode. ``retry_policy`` lists the
        error codes and exceptions after which the task is retried, and the waits. ``exception_mapper``
        maps exceptions that the function raises to codes. ``timeout_ms`` (at least 100) stops an attempt
        that takes longer. ``memory_limit_mb`` ends an attempt with MEMORY_LIMIT if its process uses more
        resident memory. ``on_stop`` decides what happens to an attempt that is running when its worker
        stops: ``"finish"`` lets it finish within the grace period and otherwise fails it with
        WORKER_STOPPED; ``"requeue"`` returns the task to its queue instead, without using up a retry;
        ``"fail"`` fails it immediately. ``burst`` lets a child hold several very short tasks; see the
        guarantees. ``key`` names whom the task works for, either by a parameter that contains a text or
        by a function of the arguments; within a queue, keys take turns. ``rate`` limits how many calls
        start per period, in the whole cluster. With ``batch``, the function takes a list with the items
        of several tasks, and returns a list with the outcome of each task; a send passes one item.

        Example:
            @app.task("charge", retry_policy=RetryPolicy.fixed([1, 5], auto_retry_for=["DOWN"]))
            def charge(order_id: int) -> str: ...
        """
        options = DecoratorOptions(
            queue_name,
            retry_policy,
            exception_mapper,
            default_unhandled_error_code,
            timeout_ms,
            unknown,
            on_stop,
            burst,
            key=key,
            memory_limit_mb=memory_limit_mb,
            rate=rate,
            batch=batch,
        )

        def decorate(function: Any, name: str | None = None) -> AnyTask:
            return register(
                self._tasks, self._producer, define(self.config, function, name, options)
            )

        return decorate(task_name) if is_decorated(task_name) else partial(decorate, name=task_name)

    def durable(
        self,
        task_name: str,
        *,
        queue_name: str | None = None,
        retry_policy: RetryPolicy | None = None,
        exception_mapper: Mapping[type[BaseException], str] | None = None,
        default_unhandled_error_code: str | None = None,
        timeout_ms: int | None = None,
        memory_limit_mb: int | None = None,
        on_stop: OnStop = "requeue",
        version: int | None = None,
        signals: Mapping[str, Any] | None = None,
        deadline: timedelta | float | None = None,
    ) -> DurableDecorator:
        """Register a durable function: a task whose steps are recorded, so that its runs survive any crash.

        The function takes a ``Durable`` first, or an ``AsyncDurable`` if it is ``async def``. Apart from
        that it is a task: it is sent, scheduled, retried and cancelled like other tasks, and may be a
        node of a workflow. Without a ``retry_policy`` a run survives a hundred crashes; a
        ``retry_policy`` must list WORKER_CRASHED. ``timeout_ms`` limits each stay in a process, but not
        the waits. ``version`` becomes part of the stored name (``onboard@2``), so that only workers with
        that version continue its runs. ``signals`` declares the names and types of signals, which
        ``app.signal`` then checks. ``deadline`` limits the whole run from its first start, including its
        waits: a run that has not ended in this time is cancelled, and its clean-up steps run.

        Example:
            @app.durable("onboard")
            def onboard(ctx: Durable, user_id: int) -> str:
                account = ctx.step(create_account, user_id)
                ctx.sleep(timedelta(days=3))
                return ctx.step(send_tips, account)
        """
        options = DecoratorOptions(
            queue_name,
            durable_policy(retry_policy),
            exception_mapper,
            default_unhandled_error_code,
            timeout_ms,
            {},
            on_stop,
            durable=DurableTraits(signals, deadline),
            memory_limit_mb=memory_limit_mb,
        )

        def decorate(function: Any) -> AnyTask:
            name = versioned_name(function, task_name, version)
            return register(
                self._tasks, self._producer, define(self.config, function, name, options)
            )

        return decorate

    def list_tasks(self) -> list[str]:
        """Return the names of the registered tasks."""
        return list(self._tasks)

    def get_task(self, task_name: str) -> AnyTask | None:
        """Return a registered task, or None."""
        return self._tasks.get(task_name)

    # Defining workflows

    @property
    def workflow(self) -> WorkflowMaker:
        """Create a workflow specification: ``app.workflow(name, nodes, ...)``."""
        return spec.WorkflowMaker(self._producer)

    @property
    def workflow_handle(self) -> WorkflowHandles:
        """Create a handle for a run that was started elsewhere: ``app.workflow_handle(workflow_id)``."""
        return handles.WorkflowHandles(self.get_broker, self.get_task)

    @overload
    def workflow_builder(self, cases: Builder, /) -> Builder: ...
    @overload
    def workflow_builder(
        self, cases: Sequence[Case] | None = None
    ) -> Callable[[Builder], Builder]: ...
    def workflow_builder(self, cases: Any = None) -> Any:
        """Register a function that builds a WorkflowSpec; ``check`` then calls it once for each set of
        parameters.

        Example:
            @app.workflow_builder(cases=[{"order_id": 7}])
            def fulfil(order_id: int) -> WorkflowSpec[str]: ...
        """
        return checks.register_builder(self._builders, cases)

    def definitions(self) -> dict[str, TaskDefinition]:
        """Return the definitions of the registered tasks by name."""
        return {name: task.definition for name, task in self._tasks.items()}

    @property
    def schedules(self) -> Schedules:
        """The schedules in the database, with ``add``, ``remove``, ``list``, ``pause``, ``run`` and more."""
        return schedules.Schedules(self._producer, self.definitions, self)

    # Queues

    def get_valid_queue_names(self) -> list[str]:
        """Return the names of the configured queues."""
        return [queue.name for queue in self.config.queues()]

    def validate_queue_name(self, queue_name: str | None) -> str:
        """Return the queue for a task with this ``queue_name``, or raise HRS-200 or HRS-103."""
        return choose_queue(self.config, queue_name, None).name

    # Sending without the task's code

    def send_by_name(
        self, task_name: str, arguments: Arguments = None, **options: Unpack[SendKeywords]
    ) -> TaskSendResult[TaskHandle[Any]]:
        """Send a task whose code this program does not import; the worker checks the arguments.

        ``arguments`` are JSON values by parameter name; the options are the same as for
        ``with_options``. ``queue_name`` may be a queue of another application. If the task is not
        registered here, pass its retry policy and time limit; otherwise it has none.

        Example:
            app.send_by_name("mail", {"to": "ada@example.org"}, queue_name="mail").unwrap()
        """
        ready = prepare_by_name(self._producer, self.get_task, task_name, arguments, options)
        return store_prepared(*ready)

    async def send_by_name_async(
        self, task_name: str, arguments: Arguments = None, **options: Unpack[SendKeywords]
    ) -> TaskSendResult[TaskHandle[Any]]:
        """Run ``send_by_name`` without blocking the event loop."""
        ready = prepare_by_name(self._producer, self.get_task, task_name, arguments, options)
        return await store_prepared_async(*ready)

    def enqueue_by_name(
        self, task_name: str, arguments: Arguments = None, **options: Unpack[SendKeywords]
    ) -> TaskHandle[Any]:
        """Send a task like ``send_by_name``, but return the handle or raise TaskSendFailed."""
        return handle_of(self.send_by_name(task_name, arguments, **options))

    async def enqueue_by_name_async(
        self, task_name: str, arguments: Arguments = None, **options: Unpack[SendKeywords]
    ) -> TaskHandle[Any]:
        """Run ``enqueue_by_name`` without blocking the event loop."""
        return handle_of(await self.send_by_name_async(task_name, arguments, **options))

    def retry_send(self, error: TaskSendError) -> TaskSendResult[TaskHandle[Any]]:
        """Repeat a send of any task that failed with ENQUEUE_FAILED; the task is stored at most once."""
        return store_prepared(*prepare_retry(self._producer, self.get_task, error))

    async def retry_send_async(self, error: TaskSendError) -> TaskSendResult[TaskHandle[Any]]:
        """Run ``retry_send`` without blocking the event loop."""
        return await store_prepared_async(*prepare_retry(self._producer, self.get_task, error))

    @registers(refuse_bad_send_hook)
    def on_send(self, fn: SendHookType) -> SendHookType:
        """Register a function that is called with an ``OutgoingTask`` before every send of this
        application.

        The function may change the headers. If it raises, nothing is stored and the send returns an error.

        Example:
            @app.on_send
            def add_tenant(outgoing: OutgoingTask) -> None:
                outgoing.headers["tenant"] = current_tenant()
        """
        self._producer.hooks.append(fn)
        return fn

    # Where tasks are defined

    def discover_tasks(self, modules: Sequence[str]) -> None:
        """Set the modules that define tasks; workers import them. A second call replaces the list."""
        refuse_single_module(modules)
        if self._modules:
            logger.warning(
                "discover_tasks was called again; the earlier list of modules is replaced"
            )
        self._modules = list(modules)

    def expand_module_globs(
        self, patterns: Sequence[str], exclude: Sequence[str] | None = None
    ) -> list[str]:
        """Expand glob patterns to file paths for ``discover_tasks``; dotted names are returned
        unchanged.
        """
        return expand_module_globs(patterns, exclude)

    def get_discovered_task_modules(self) -> list[str]:
        """Return the modules set by ``discover_tasks``."""
        return list(self._modules)

    def import_task_modules(self, modules: Sequence[str] | None = None) -> list[str]:
        """Import the modules and return the imported modules; skip a missing file with a warning."""
        return import_entries(self._modules if modules is None else modules)

    # Suppressing sends

    def suppress_sends(self, value: bool = True) -> None:
        """Make every send in this process return SEND_SUPPRESSED; ``suppress_sends(False)`` allows sends
        again.
        """
        self._suppressed = value

    def are_sends_suppressed(self) -> bool:
        """Return whether sends are suppressed, by the application or by the environment."""
        named = any(os.environ.get(name) == "1" for name in SUPPRESSION_VARIABLES)
        return named or self._suppressed or bool(self._running_imports)

    @contextmanager
    def sends_suppressed(self) -> Iterator[None]:
        """Suppress this process's sends while task modules are imported."""
        own = object()  # Each import ends only its own suppression; a list needs no lock.
        self._running_imports.append(own)
        try:
            yield
        finally:
            self._running_imports.remove(own)

    # Child process hooks

    @registers(refuse_bad_hook)
    def on_child_process_start(self, fn: Hook) -> Hook:
        """Register a function that runs once in every worker child, after the task modules are imported
        and before the first task.

        Example:
            @app.on_child_process_start
            def reset_engine() -> None:
                engine.dispose(close=False)
        """
        add_once(self.hooks.start, fn)
        return fn

    @registers(refuse_bad_hook)
    def on_child_process_stop(self, fn: Hook) -> Hook:
        """Register a function that runs in every worker child that shuts down cleanly, after the child's
        last task. Hooks run in reverse order of registration. An exception is logged.
        """
        add_once(self.hooks.stop, fn)
        return fn

    @registers(refuse_bad_around)
    def around_task(self, fn: Around) -> Around:
        """Register a generator that runs around every task in worker children; the generator registered
        first is the outermost.

        ``yield`` returns the task's return value, or raises its exception.

        Example:
            @app.around_task
            def in_session(task: CurrentTask) -> Iterator[None]:
                with Session.begin():
                    yield
        """
        add_once(self.hooks.around, fn)
        return fn

    def get_child_process_start_hooks(self) -> list[ChildProcessStartHook]:
        """Return the hooks in the order they were registered."""
        return list(self.hooks.start)

    # The broker, checking and closing

    @property
    def database_url(self) -> str:
        """The database's postgresql:// URL, including the password, for other libraries. For embedded://,
        the private server is started, or joined if it already runs.

        Example: with psycopg.connect(app.database_url) as connection: ...
        """
        return resolve_url(self.config.broker.database_url)

    def get_broker(self) -> PostgresBroker:
        """Return the broker, built on first use without connecting."""
        if self._broker is None:
            built = build_broker(
                self.config.broker,
                self.role,
                migrates=self.migrates,
                find_obstacle=lambda task_id: explain.obstacle_script(task_id),
            )
            # Without the lock, two threads could create two brokers on first use.
            with self._broker_lock:
                self._broker = self._broker or built
        return self._broker

    @property
    def role(self) -> str:
        """This process's role, which decides the size of its connection pool."""
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        self._role = role
        # A module of the application used the broker during its import.
        if self._broker is not None:
            self._broker.database.role = role

    def set_role(self, role: str) -> None:
        """Set the role of this process: 'producer', 'worker' or 'scheduler'."""
        self.role = role
        logger.info("running as %s", role)

    def check(self, *, live: bool = False) -> list[HorsiesError]:
        """Validate the application before it runs, and return the errors of the first failing phase.

        Imports the discovered modules; builds their workflows, and the workflows in the application's own
        module, while sends are suppressed; and checks error codes, policies and schedules. With ``live``,
        it also connects to the database, checks the tables and the privileges on them, and tests LISTEN.
        Codes in ``auto_retry_for`` that no task can produce are logged as warnings.
        """
        home = module_of(self._home, self)
        modules = [] if home is None else [home]
        with self.sends_suppressed():
            errors = check.import_errors(
                self._modules, lambda name: modules.append(import_entry(name))
            )
            errors = errors or checks.workflow_errors(self, modules, self._builders)
        errors = errors or check.policy_errors(self.config, self.definitions().values())
        for warning in (
            [] if errors else check.policy_warnings(self.config, self.definitions().values())
        ):
            logger.warning("%s", warning)
        if not errors and self.role != "worker":  # A worker runs the tasks of any schedule.
            with self.sends_suppressed():
                errors = entry.schedule_errors(
                    entry.Application(self.config, self.definitions(), self)
                )
        if errors or not live:
            return errors
        return check.live_errors(self.config.broker, role=self.role, migrates=self.migrates)

    def close(self) -> BrokerResult[None]:
        """Close this process's connections; the next use reconnects."""
        return Ok(None) if self._broker is None else self._broker.close()

    async def close_async(self) -> BrokerResult[None]:
        """Close this process's connections, including those of the running event loop."""
        return Ok(None) if self._broker is None else await self._broker.close_async()


def producer_on(app: Horsies, broker: PostgresBroker) -> Producer:
    """Return a producer that sends for this application on another broker's connections."""
    return replace(app._producer, get_broker=lambda: broker)


def set_current_app(app: Horsies) -> None:
    """Set the application of this process; worker children call this."""
    _current[:] = [app]


def get_current_app() -> Horsies | None:
    """Return the application of this worker child, or None in any other process."""
    return _current[0] if _current else None
