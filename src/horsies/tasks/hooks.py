"""The application's task hooks: checks of the hook functions, and the generators that wrap each call of a
task.

An ``around_task`` generator receives the running task and yields once where the task is called;
``yield`` returns the task's result or raises its exception.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar, cast

from horsies.current_task import CurrentTask, current_task
from horsies.errors import ConfigurationError, ErrorCode
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.invoke import run_coroutine

ChildProcessHook = Callable[[], None] | Callable[[], Awaitable[None]]
AroundTask = Callable[[CurrentTask], Iterator[None]] | Callable[[CurrentTask], AsyncIterator[None]]

Register = TypeVar("Register", bound=Callable[..., Any])


@dataclass(slots=True)
class Hooks:
    """An application's hooks, in order of registration."""

    start: list[ChildProcessHook] = field(default_factory=list)
    stop: list[ChildProcessHook] = field(default_factory=list)
    around: list[AroundTask] = field(default_factory=list)


def add_once(hooks: list[Any], hook: object) -> None:
    """Append a hook unless it is already registered, which it is if its module is imported twice."""
    if not any(hook is known for known in hooks):
        hooks.append(hook)


def registers(refuse: Callable[[object], None]) -> Callable[[Register], Register]:
    """Wrap a decorator that takes only a function, so that it rejects parentheses, options and unsuitable
    functions.
    """

    def decorate(register: Register) -> Register:
        @functools.wraps(register)
        def checked(app: object, *functions: object, **options: Any) -> Any:
            given = [*functions, *options.values()]
            if len(given) != 1 or not options.keys() <= {"fn"}:
                raise ConfigurationError(
                    f"@app.{register.__name__} takes the function alone, without parentheses and options.",
                    code=ErrorCode.CONFIG_INVALID_CHILD_HOOK,
                    help_text=f"write @app.{register.__name__} above `def`",
                )
            refuse(given[0])
            return register(app, given[0])

        return cast("Register", checked)

    return decorate


def refuse_bad_hook(hook: object) -> None:
    """Reject a child process hook that cannot be called without arguments."""
    is_generator = _is(hook, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if not callable(hook) or is_generator or not _takes(hook):
        raise ConfigurationError(
            "A child process hook must be a function without parameters that does not yield.",
            code=ErrorCode.CONFIG_INVALID_CHILD_HOOK,
            help_text="use `def` or `async def` without parameters and without `yield`",
        )


def refuse_bad_around(hook: object) -> None:
    """Reject a function that cannot be run around a task."""
    is_generator = _is(hook, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if not is_generator or not _takes(hook, "the running task"):
        raise ConfigurationError(
            "An around_task hook must be a generator function with one parameter, the running task.",
            code=ErrorCode.CONFIG_INVALID_CHILD_HOOK,
            help_text="def session(task: CurrentTask) -> Iterator[None]: ...; yield; ...",
        )


def refuse_bad_send_hook(hook: object) -> None:
    """Reject an ``on_send`` hook that cannot be called with the outgoing task alone."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    if not callable(hook) or _is(hook, *kinds) or not _takes(hook, "the outgoing task"):
        raise ConfigurationError(
            "An on_send hook must be a plain function that takes the outgoing task.",
            code=ErrorCode.CONFIG_INVALID_CHILD_HOOK,
            help_text="def hook(outgoing: OutgoingTask) -> None: ...; without `async` and `yield`, because "
            "synchronous sends call it too",
        )


def _is(hook: object, *kinds: Callable[[Any], bool]) -> bool:
    """Return whether a call of `hook` would only create an object of one of these kinds."""
    called = getattr(type(hook), "__call__", None)  # noqa: B004 - asked for its kind, not called
    return any(is_kind(function) for is_kind in kinds for function in (hook, called))


def _takes(hook: Any, *arguments: object) -> bool:
    """Return whether `hook` accepts these arguments; True if its signature is unknown."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def as_plain_calls(hooks: Sequence[ChildProcessHook]) -> list[Callable[[], object]]:
    """Return the hooks as synchronous functions; coroutines run on the event loop that asynchronous tasks use
    later.
    """
    return [_to_its_end(hook) for hook in hooks]


def _to_its_end(hook: Callable[[], Any]) -> Callable[[], object]:
    def call() -> object:
        # the kind is determined at the call, because a wrapped coroutine function does not reveal it
        returned = hook()
        return run_coroutine(returned) if inspect.iscoroutine(returned) else returned

    functools.update_wrapper(call, hook)
    call.__qualname__ = getattr(hook, "__qualname__", repr(hook))
    return call


def surround(definition: TaskDefinition, hooks: Sequence[AroundTask]) -> TaskDefinition:
    """Return the definition with its function wrapped in the hooks; the first hook is the outermost."""
    function = definition.function
    for hook in reversed(hooks):
        make = _async_call if definition.is_async else _call
        function = make(hook, function)
    return replace(definition, function=function)


def _call(hook: AroundTask, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        around = _Around(hook)
        run = run_coroutine if around.is_async else _run_without_waiting
        run(around.enter())
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            run(around.fail(error))
            raise
        run(around.leave(value))
        return value

    return call


def _async_call(hook: AroundTask, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        around = _Around(hook)
        await around.enter()
        try:
            value = await function(*args, **kwargs)
        except BaseException as error:
            await around.fail(error)
            raise
        await around.leave(value)
        return value

    return call


def _run_without_waiting(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that awaits nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration:
        return


class _Around:
    """One use of a hook: the hook's generator during an attempt."""

    def __init__(self, hook: AroundTask) -> None:
        self._name = getattr(hook, "__qualname__", repr(hook))
        self._generator: Any = hook(current_task())
        self.is_async = hasattr(self._generator, "asend")

    async def enter(self) -> None:
        if not await self._step("send", None):
            raise RuntimeError(
                f"The around_task hook {self._name} did not yield; the task was not called."
            )

    async def leave(self, value: object) -> None:
        if await self._step("send", value):
            await self._refuse_second_yield()

    async def fail(self, error: BaseException) -> None:
        """Throw the task's exception into the hook, which may replace the exception but not turn it into a
        success.
        """
        try:
            has_yielded = await self._step("throw", error)
        except BaseException as raised:
            # Python wraps an exception that would end a generator, such as StopIteration, in a RuntimeError.
            ends = isinstance(error, StopIteration | StopAsyncIteration)
            is_wrapped = ends and raised.__cause__ is error
            if raised is error or is_wrapped:
                return
            raise
        if has_yielded:
            await self._refuse_second_yield()

    async def _step(self, method: str, argument: object) -> bool:
        """Resume the hook's generator; return True if it yielded, False if it has finished."""
        try:
            if self.is_async:
                await getattr(self._generator, f"a{method}")(argument)
            else:
                getattr(self._generator, method)(argument)
        except (StopIteration, StopAsyncIteration):
            return False
        return True

    async def _refuse_second_yield(self) -> NoReturn:
        if self.is_async:
            await self._generator.aclose()
        else:
            self._generator.close()
        raise RuntimeError(
            f"The around_task hook {self._name} yielded twice; it must yield once, around the task."
        )
