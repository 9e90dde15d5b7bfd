"""TaskFunction: the public object that ``@app.task`` turns a function into.

A type checker checks the arguments against the decorated function's signature, and ``tasks/request.py``
checks them again at run time before anything is stored.
"""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Never,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

import typing_extensions

from horsies.modules import Deferred
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.bulk import send_many, send_many_async
from horsies.tasks.definition import TaskDefinition, name_used_twice
from horsies.tasks.handle import TaskHandle
from horsies.tasks.invoke import call_plain, invoke, invoke_async
from horsies.tasks.options import NO_OPTIONS, SendKeywords, SendOptions, send_options
from horsies.tasks.request import TaskSendError, TaskSendResult
from horsies.tasks.send import (
    Producer,
    Sender,
    TaskCall,
    store_prepared,
    store_prepared_async,
)
from horsies.tasks.waiters import is_loop_running

if TYPE_CHECKING:
    from horsies.durable.async_context import AsyncDurable
    from horsies.durable.context import Durable
    from horsies.workflow.nodes import factory
    from horsies.workflow.nodes.factory import NodeFactory, NodeOptions
else:
    factory = Deferred("horsies.workflow.nodes.factory")

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
# The return type of a direct call. Annotations can omit it, because TaskFunction[P, T] fits every
# task.
R_co = typing_extensions.TypeVar("R_co", covariant=True, default=Any)


class TaskSendFailed(Exception):
    """``enqueue`` stored no task; ``error`` is the same TaskSendError that ``send`` would return."""

    def __init__(self, error: TaskSendError) -> None:
        super().__init__(error)
        self.error = error

    def __str__(self) -> str:
        return f"{self.error.code}: {self.error.message}"


class TaskDecorator(Protocol):
    """The type of ``@app.task(...)``: it keeps the parameters and adds a typed send."""

    # A coroutine that returns a TaskResult also fits the third overload; the first fitting overload
    # is used.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Awaitable[TaskResult[T, TaskError]]], /
    ) -> TaskFunction[P, T, TaskResult[T, TaskError]]: ...
    @overload
    def __call__(
        self, function: Callable[P, TaskResult[T, TaskError]], /
    ) -> TaskFunction[P, T, TaskResult[T, TaskError]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> TaskFunction[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> TaskFunction[P, T, T]: ...


class BatchDecorator(Protocol):
    """The type of ``@app.task(batch=...)``: the function takes a list of items, and a send takes one
    item.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        function: Callable[[list[Item]], Coroutine[Any, Any, Sequence[TaskResult[T, TaskError]]]],
        /,
    ) -> TaskFunction[[Item], T, TaskResult[T, TaskError]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Item]], Sequence[TaskResult[T, TaskError]]], /
    ) -> TaskFunction[[Item], T, TaskResult[T, TaskError]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Item]], Coroutine[Any, Any, Sequence[T]]], /
    ) -> TaskFunction[[Item], T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Item]], Coroutine[Any, Any, None]], /
    ) -> TaskFunction[[Item], None, Coroutine[Any, Any, None]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Item]], Sequence[T]], /
    ) -> TaskFunction[[Item], T, T]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Item]], None], /
    ) -> TaskFunction[[Item], None, None]: ...


class DurableDecorator(Protocol):
    """The type of ``@app.durable(...)``; callers pass all parameters except the context."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        function: Callable[
            Concatenate[AsyncDurable, P], Coroutine[Any, Any, TaskResult[T, TaskError]]
        ],
        /,
    ) -> TaskFunction[P, T, TaskResult[T, TaskError]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncDurable, P], Coroutine[Any, Any, T]], /
    ) -> TaskFunction[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Durable, P], TaskResult[T, TaskError]], /
    ) -> TaskFunction[P, T, TaskResult[T, TaskError]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Durable, P], T], /
    ) -> TaskFunction[P, T, T]: ...


class TaskSendOptions(Generic[P, T]):
    """A task with send options, created by ``task.with_options(...)``."""

    def __init__(
        self, producer: Producer, definition: TaskDefinition, options: SendOptions
    ) -> None:
        self._sender = Sender(producer, definition, options)

    def send(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskSendResult[TaskHandle[T]]:
        """Store one task for a worker to run and return its handle.

        Never raises for operational reasons. If the call does not fit the signature, a value cannot be
        stored exactly, or the database cannot be reached, the result is an Err with the reason, and
        nothing is stored.
        """
        return store_prepared(self._sender, self._sender.prepare(args, kwargs))

    async def send_async(
        self, /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskSendResult[TaskHandle[T]]:
        """Run ``send`` without blocking the event loop."""
        return await store_prepared_async(self._sender, self._sender.prepare(args, kwargs))

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[T]:
        """Store one task for a worker to run and return its handle, or raise TaskSendFailed."""
        return handle_of(self.send(*args, **kwargs))

    async def enqueue_async(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[T]:
        """Run ``enqueue`` without blocking the event loop."""
        return handle_of(await self.send_async(*args, **kwargs))

    def schedule(
        self, /, delay_seconds: float, *args: P.args, **kwargs: P.kwargs
    ) -> TaskSendResult[TaskHandle[T]]:
        """Store one task that can be claimed after the delay, which is measured on the database's clock."""
        return store_prepared(self._sender, self._sender.prepare(args, kwargs, delay_seconds))

    async def schedule_async(
        self, /, delay_seconds: float, *args: P.args, **kwargs: P.kwargs
    ) -> TaskSendResult[TaskHandle[T]]:
        """Run ``schedule`` without blocking the event loop."""
        return await store_prepared_async(
            self._sender, self._sender.prepare(args, kwargs, delay_seconds)
        )

    @overload
    def send_many(self, calls: Sequence[TaskCall[T]]) -> TaskSendResult[list[TaskHandle[T]]]: ...
    @overload
    def send_many(
        self, calls: Iterable[TaskCall[T]]
    ) -> TaskSendResult[Sequence[TaskHandle[T]]]: ...
    def send_many(self, calls: Iterable[TaskCall[T]]) -> TaskSendResult[Any]:
        """Store many tasks in one transaction: all of them, or none.

        The calls are read in chunks while earlier chunks are stored. For a list of calls, the result is
        a list of handles. For a generator, the result is a sequence that creates each handle on access,
        so a million calls need little memory.

        Example:
            handles = add.send_many(add.bind(n, n) for n in range(1000)).unwrap()
        """
        return send_many(self._sender, calls)

    @overload
    async def send_many_async(
        self, calls: Sequence[TaskCall[T]]
    ) -> TaskSendResult[list[TaskHandle[T]]]: ...
    @overload
    async def send_many_async(
        self, calls: Iterable[TaskCall[T]]
    ) -> TaskSendResult[Sequence[TaskHandle[T]]]: ...
    async def send_many_async(self, calls: Iterable[TaskCall[T]]) -> TaskSendResult[Any]:
        """Run ``send_many`` without blocking the event loop for longer than a chunk takes to encode."""
        return await send_many_async(self._sender, calls)


def handle_of(sent: TaskSendResult[TaskHandle[T]]) -> TaskHandle[T]:
    """Return the handle from a send, or raise TaskSendFailed."""
    if isinstance(sent, Err):
        raise TaskSendFailed(sent.value) from sent.value.exception
    return sent.value


# Names of a send in other task queues.
_OTHER_SENDS = {
    "delay": "send(...)",
    "apply_async": "with_options(...).send(...)",
    "apply": "send(...)",
    "defer": "send(...)",
    "defer_async": "send_async(...)",
    "kiq": "send_async(...)",
    "message": "bind(...)",
    "s": "bind(...), or a workflow of .node()(...)",
    "signature": "bind(...), or a workflow of .node()(...)",
}


class TaskFunction(TaskSendOptions[P, T], Generic[P, T, R_co]):
    """A registered task, with its function's parameters and the type of its value.

    Example:
        @app.task
        def add(a: int, b: int) -> int:
            return a + b

        print(add.enqueue(1, 2).result(timeout_ms=10_000))
    """

    def __init__(self, producer: Producer, definition: TaskDefinition) -> None:
        super().__init__(producer, definition, NO_OPTIONS)
        # Set only in this class: a workflow node accepts any object with a definition as its task,
        # and would ignore the options of a TaskSendOptions.
        self.definition = definition
        self.__name__ = definition.function.__name__
        self.__doc__ = definition.function.__doc__

    def __repr__(self) -> str:
        return f"TaskFunction({self.definition.name!r})"

    if not TYPE_CHECKING:  # Type checkers reject these names anyway.

        def __getattr__(self, name: str) -> Never:
            hint = _OTHER_SENDS.get(name)
            advice = f"; write {self.__name__}.{hint}" if hint else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            )

    @property
    def task_name(self) -> str:
        """The name under which the task is registered and stored."""
        return self.definition.name

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function directly, without a queue, retries or a row.

        The arguments of a plain function are checked (TypeError); then it returns its value or coroutine,
        and raises its exceptions, like any function. A function that returns a TaskResult is checked as
        in a worker, and its exceptions become errors.
        """
        direct: Any = call_plain if self.definition.is_plain else self._invoke
        returned: R_co = direct(self.definition, args, kwargs)
        return returned

    def _invoke(
        self, definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TaskResult[Any, TaskError]:
        if self.definition.is_async and is_loop_running():
            raise RuntimeError(
                f"Task {self.definition.name!r} is async and an event loop is running; "
                "write `await task.call_async(...)`, or send it."
            )
        return invoke(self._sender.producer.config, self.definition, args, kwargs)

    @overload
    async def call_async(
        self: TaskFunction[P, T, TaskResult[T, TaskError]], /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskResult[T, TaskError]: ...
    @overload
    async def call_async(self, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def call_async(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function directly, like a plain call, on the running event loop.

        Example:
            async def test_charge() -> None:
                assert await charge.call_async(7) == "paid"
        """
        definition = self.definition
        if not definition.is_plain:
            return await invoke_async(self._sender.producer.config, definition, args, kwargs)
        returned = call_plain(definition, args, kwargs)
        return await returned if definition.is_async else returned

    @property
    def function(self) -> Callable[..., Any]:
        """The decorated function itself, whose calls are not checked."""
        batch = self.definition.batch
        return self.definition.function if batch is None else batch.function

    def bind(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskCall[T]:
        """Bind arguments for ``send_many``."""
        return TaskCall(self.definition.name, args, kwargs)

    def with_options(self, **options: Unpack[SendKeywords]) -> TaskSendOptions[P, T]:
        """Attach options to the next send.

        ``good_until``: the task expires if it has not started by then. ``at`` (a time) or ``delay``: when
        the task becomes claimable. ``priority``: 1 (first) to 100. ``queue_name``, ``timeout_ms``,
        ``retry_policy``: used in place of the task's own. ``headers``: strings stored with the task and
        with the tasks it sends. ``retention``: how long the task's row is kept after it has ended.
        ``idempotency_key``: a second send with the same key and request returns the first one's handle;
        ``unique`` sets how long the key stays in use: "forever", "while_open" until the task has ended,
        or "while_waiting" until a worker has claimed it. ``debounce``: run once after the last of many
        sends with this key, with the newest arguments. ``key``: whom the task works for, in place of the
        key that the task function defines; None for no key. ``transaction``: your open psycopg, asyncpg,
        SQLAlchemy or Django connection; the task commits or rolls back with it.

        Example:
            with psycopg.connect(url) as connection:
                connection.execute("INSERT INTO orders ...")
                confirm.with_options(transaction=connection).send(order_id)
        """
        return TaskSendOptions(self._sender.producer, self.definition, send_options(options))

    def node(self, **options: Unpack[NodeOptions]) -> NodeFactory[P, T]:
        """Create a workflow node; call the returned factory with the task's parameters, by name.

        The options are those of ``TaskNode``. ``from_node(other)`` passes another node's value or
        result, depending on the parameter's annotation, and makes that node a dependency.

        Example:
            first = fetch.node()(url="https://example.org")
            total = count.node(queue="slow")(page=from_node(first))
        """
        return factory.NodeFactory(self, options)

    def retry_send(self, error: TaskSendError) -> TaskSendResult[TaskHandle[T]]:
        """Repeat a send that failed with ENQUEUE_FAILED; the task is stored at most once."""
        return store_prepared(self._sender, self._sender.prepare_retry(error, scheduled=False))

    async def retry_send_async(self, error: TaskSendError) -> TaskSendResult[TaskHandle[T]]:
        """Run ``retry_send`` without blocking the event loop."""
        return await store_prepared_async(
            self._sender, self._sender.prepare_retry(error, scheduled=False)
        )

    def retry_schedule(self, error: TaskSendError) -> TaskSendResult[TaskHandle[T]]:
        """Repeat a call of ``schedule`` that failed with ENQUEUE_FAILED; the delay starts over."""
        return store_prepared(self._sender, self._sender.prepare_retry(error, scheduled=True))

    async def retry_schedule_async(self, error: TaskSendError) -> TaskSendResult[TaskHandle[T]]:
        """Run ``retry_schedule`` without blocking the event loop."""
        return await store_prepared_async(
            self._sender, self._sender.prepare_retry(error, scheduled=True)
        )


AnyTask = TaskFunction[Any, Any]


def register(tasks: dict[str, AnyTask], producer: Producer, definition: TaskDefinition) -> AnyTask:
    """Add a task to an application's tasks and return it; raise an error if its name is already used."""
    known = tasks.get(definition.name)
    if known is None:
        tasks[definition.name] = TaskFunction(producer, definition)
        return tasks[definition.name]
    first, second = known.definition.location, definition.location
    if first is not None and first == second and not first.file.startswith("<"):
        return known  # The module was imported again.
    raise name_used_twice(definition, first)


class RegisteredTasks(Mapping[str, AnyTask]):
    """The registered tasks by name: ``app.tasks["add"]``. A call, ``app.tasks()``, returns a copy."""

    def __init__(self, tasks: Mapping[str, AnyTask]) -> None:
        self._tasks = tasks

    def __getitem__(self, task_name: str) -> AnyTask:
        return self._tasks[task_name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __call__(self) -> dict[str, AnyTask]:
        """Return the registered tasks in a new dictionary."""
        return dict(self._tasks)
