"""Ok and Err: the return values of calls that may fail for operational reasons.

Sending, reading and operator calls return them instead of raising. The outcome of a task itself is
a TaskResult, defined in `task_result`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from typing_extensions import TypeIs

T = TypeVar("T")
E = TypeVar("E")
U = TypeVar("U")
F = TypeVar("F")
T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)

# Ok and Err declare their slots themselves, because with dataclass(slots=True), setting an unknown
# attribute raises a TypeError from super() instead of an AttributeError. They therefore need
# __reduce__ for copy and pickle.


if TYPE_CHECKING:
    _Side: TypeAlias = type  # Type checkers narrow types only if isinstance is not overridden.
else:

    class _Side(type):
        """The metaclass of Ok and Err, which rejects matching a TaskResult: it is neither, and would
        fall through both cases.
        """

        def __instancecheck__(cls, instance):
            kind = type(instance)
            if kind is Ok or kind is Err:
                return kind is cls
            if getattr(kind, "holds_outcome", False) is True:
                raise TypeError(
                    "a TaskResult is neither Ok nor Err, so that no such case can match it; write "
                    "`if result.is_ok(): ... result.ok_value` and `else: ... result.err_value`"
                )
            return type.__instancecheck__(cls, instance)


@dataclass(frozen=True)
class Ok(Generic[T_co], metaclass=_Side):
    """The result of a call that succeeded.

    Example:
        match task.send(1):
            case Ok(handle):
                handle.get()
            case Err(error):
                log.error("not sent: %s", error.message)
    """

    __slots__ = ("value",)
    value: T_co
    """The value."""

    def __reduce__(self) -> tuple[Callable[[T_co], Ok[T_co]], tuple[T_co]]:
        return Ok, (self.value,)

    def __repr__(self) -> str:
        return f"Ok({self.value!r})"

    def __bool__(self) -> NoReturn:
        raise _no_truth(self)

    if not TYPE_CHECKING:  # With this method, a type checker would accept every name.

        def __getattr__(self, name: str) -> NoReturn:
            raise _no_attribute(self, name, "unwrap")

        def __add__(self, other: object) -> NoReturn:
            raise _no_sum(self)

        __radd__ = __add__

    def is_ok(self) -> Literal[True]:
        """Return True."""
        return True

    def is_err(self) -> Literal[False]:
        """Return False."""
        return False

    def ok(self) -> T_co:
        """Return the value."""
        return self.value

    unwrap = ok

    def err(self) -> None:
        """Return None: an Ok has no error."""

    @property
    def ok_value(self) -> T_co:
        """The value."""
        return self.value

    @property
    def err_value(self) -> NoReturn:
        """Raise UnwrapError: an Ok has no error."""
        raise _not_this_side(self, "err_value")

    def unwrap_err(self) -> NoReturn:
        """Raise UnwrapError: an Ok has no error."""
        raise _not_this_side(self, "unwrap_err()")

    def unwrap_or(self, default: object) -> T_co:
        """Return the value; only an Err returns the default."""
        return self.value

    def unwrap_or_else(self, function: object) -> T_co:
        """Return the value; only an Err calls the function."""
        return self.value

    def unwrap_or_raise(self, exception_type: object) -> T_co:
        """Return the value; only an Err raises the exception."""
        return self.value

    def expect(self, message: str) -> T_co:
        """Return the value; only an Err raises, with the message."""
        return self.value

    def expect_err(self, message: str) -> NoReturn:
        """Raise UnwrapError with the message: an Ok has no error."""
        raise _unwrap_error(self, message)

    def map(self, function: Callable[[T_co], U]) -> Ok[U]:
        """Apply the function to the value and return the function's result as an Ok."""
        return Ok(function(self.value))

    async def map_async(self, function: Callable[[T_co], Awaitable[U]]) -> Ok[U]:
        """Await the function applied to the value, and return the function's result as an Ok."""
        return Ok(await function(self.value))

    def map_or(self, default: object, function: Callable[[T_co], U]) -> U:
        """Return the result of the function applied to the value; only an Err returns the default."""
        return function(self.value)

    def map_or_else(self, default: object, function: Callable[[T_co], U]) -> U:
        """Return the result of the function applied to the value; only an Err calls the default function."""
        return function(self.value)

    def map_err(self, function: object) -> Ok[T_co]:
        """Return this result unchanged."""
        return self

    or_else = inspect_err = map_err

    def and_then(self, function: Callable[[T_co], Result[U, E]]) -> Result[U, E]:
        """Call the function with the value and return its result."""
        return function(self.value)

    async def and_then_async(
        self, function: Callable[[T_co], Awaitable[Result[U, E]]]
    ) -> Result[U, E]:
        """Call the function with the value, await it, and return its result."""
        return await function(self.value)

    def inspect(self, function: Callable[[T_co], object]) -> Ok[T_co]:
        """Call the function with the value for its side effect and return this result."""
        function(self.value)
        return self


@dataclass(frozen=True)
class Err(Generic[E_co], metaclass=_Side):
    """The result of a call that failed."""

    __slots__ = ("value",)
    value: E_co
    """The error."""

    def __reduce__(self) -> tuple[Callable[[E_co], Err[E_co]], tuple[E_co]]:
        return Err, (self.value,)

    def __repr__(self) -> str:
        return f"Err({self.value!r})"

    def __bool__(self) -> NoReturn:
        raise _no_truth(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _no_attribute(self, name, "unwrap_err")

        def __add__(self, other: object) -> NoReturn:
            raise _no_sum(self)

        __radd__ = __add__

    def is_ok(self) -> Literal[False]:
        """Return False."""
        return False

    def is_err(self) -> Literal[True]:
        """Return True."""
        return True

    def ok(self) -> None:
        """Return None: an Err has no value."""

    def err(self) -> E_co:
        """Return the error."""
        return self.value

    unwrap_err = err

    @property
    def ok_value(self) -> NoReturn:
        """Raise UnwrapError: an Err has no value."""
        raise _not_this_side(self, "ok_value")

    @property
    def err_value(self) -> E_co:
        """The error."""
        return self.value

    def unwrap(self) -> NoReturn:
        """Raise UnwrapError, with the error as its cause if it is an exception."""
        raise _not_this_side(self, "unwrap()")

    def unwrap_or(self, default: U) -> U:
        """Return the default."""
        return default

    def unwrap_or_else(self, function: Callable[[E_co], U]) -> U:
        """Return the result of the function applied to the error."""
        return function(self.value)

    def unwrap_or_raise(self, exception_type: Callable[[E_co], BaseException]) -> NoReturn:
        """Raise the exception that the function returns for the error."""
        raise exception_type(self.value)

    def expect(self, message: str) -> NoReturn:
        """Raise UnwrapError with the message, and with the error as its cause if it is an exception."""
        raise _unwrap_error(self, message)

    def expect_err(self, message: str) -> E_co:
        """Return the error; only an Ok raises, with the message."""
        return self.value

    def inspect(self, function: object) -> Err[E_co]:
        """Return this result unchanged."""
        return self

    async def map_async(self, function: object) -> Err[E_co]:
        """Return this result unchanged."""
        return self

    map = and_then = inspect
    and_then_async = map_async

    def map_or(self, default: U, function: object) -> U:
        """Return the default."""
        return default

    def map_or_else(self, default: Callable[[], U], function: object) -> U:
        """Call the default function and return its result."""
        return default()

    def map_err(self, function: Callable[[E_co], F]) -> Err[F]:
        """Apply the function to the error and return the function's result as an Err."""
        return Err(function(self.value))

    def or_else(self, function: Callable[[E_co], Result[T, F]]) -> Result[T, F]:
        """Call the function with the error and return its result."""
        return function(self.value)

    def inspect_err(self, function: Callable[[E_co], object]) -> Err[E_co]:
        """Call the function with the error for its side effect and return this result."""
        function(self.value)
        return self


Result: TypeAlias = Ok[T] | Err[E]
"""The result of a call that does not raise: ``Ok`` or ``Err``."""


class UnwrapError(Exception):
    """The value of an Err or the error of an Ok was requested; `result` is that result."""

    def __init__(self, result: Result[Any, Any], message: str) -> None:
        super().__init__(result, message)
        self.result = result
        self.message = message

    def __str__(self) -> str:
        return self.message


def is_ok(result: Result[T, E]) -> TypeIs[Ok[T]]:
    """Return whether the result is an Ok; type checkers narrow both branches."""
    return isinstance(result, Ok)


def is_err(result: Result[T, E]) -> TypeIs[Err[E]]:
    """Return whether the result is an Err; type checkers narrow both branches."""
    return isinstance(result, Err)


def _no_truth(result: Result[Any, Any]) -> TypeError:
    kind = type(result).__name__
    return TypeError(f"{kind} is neither true nor false; call is_ok() or is_err(), or match it")


def _no_sum(result: Result[Any, Any]) -> TypeError:
    kind = type(result).__name__
    return TypeError(
        f"{kind} holds the value of a call, or its error, and cannot be added; call .unwrap() first"
    )


def _no_attribute(result: Result[Any, Any], name: str, unwrap: str) -> AttributeError:
    text = f"{type(result).__name__!r} object has no attribute {name!r}"
    if not name.startswith("__") and name != "value" and _has(result.value, name):
        text += f"; call .{unwrap}() first"
    elif isinstance(result, Err) and not name.startswith("_"):
        text += "; it holds the error of a failed call: match it, or call .unwrap() to raise it"
    return AttributeError(text, name=name, obj=result)


def _has(value: object, name: str) -> bool:
    """Look up an attribute without running properties."""
    return hasattr(type(value), name) or name in getattr(value, "__dict__", ())


def _not_this_side(result: Result[Any, Any], member: str) -> UnwrapError:
    return _unwrap_error(result, f"called {member} on {type(result).__name__}")


def _unwrap_error(result: Result[Any, Any], message: str) -> UnwrapError:
    # Show only the type of a success's value, which may be the user's data; an error is meant to be
    # shown.
    inner = result.value
    shown = repr(inner) if isinstance(result, Err) else type(inner).__name__
    error = UnwrapError(result, f"{message}: {shown}")
    if isinstance(inner, BaseException):
        error.__cause__ = inner
    return error
