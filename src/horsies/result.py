"""Ok and Err: the return values of calls that may fail for operational reasons.

Sending, reading and operator calls return them instead of raising. The outcome of a task itself is
a TaskResult, defined in `task_result`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from typing_extensions import TypeIs

T = TypeVar("T")
E = TypeVar("E")
U = TypeVar("U")
F = TypeVar("F")
T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Ok(Generic[T_co]):
    """The result of a call that succeeded.

    Example:
        match task.send(1):
            case Ok(handle):
                handle.get()
            case Err(error):
                log.error("not sent: %s", error.message)
    """

    value: T_co

    def __repr__(self) -> str:
        return f"Ok({self.value!r})"

    def is_ok(self) -> Literal[True]:
        """Return True."""
        return True

    def is_err(self) -> Literal[False]:
        """Return False."""
        return False

    @property
    def ok_value(self) -> T_co:
        """The value."""
        return self.value

    @property
    def err_value(self) -> NoReturn:
        """Raise UnwrapError: there is no error."""
        raise _unwrap_error(self, "err_value")

    def unwrap(self) -> T_co:
        """Return the value."""
        return self.value

    def unwrap_err(self) -> NoReturn:
        """Raise UnwrapError: there is no error."""
        raise _unwrap_error(self, "unwrap_err()")

    def unwrap_or(self, default: object) -> T_co:
        """Return the value; only an Err returns the default."""
        return self.value

    def map(self, function: Callable[[T_co], U]) -> Ok[U]:
        """Return Ok with the function applied to the value."""
        return Ok(function(self.value))

    def map_err(self, function: object) -> Ok[T_co]:
        """Return this result unchanged."""
        return self


@dataclass(frozen=True, slots=True)
class Err(Generic[E_co]):
    """The result of a call that failed."""

    value: E_co

    def __repr__(self) -> str:
        return f"Err({self.value!r})"

    def is_ok(self) -> Literal[False]:
        """Return False."""
        return False

    def is_err(self) -> Literal[True]:
        """Return True."""
        return True

    @property
    def ok_value(self) -> NoReturn:
        """Raise UnwrapError: there is no value."""
        raise _unwrap_error(self, "ok_value")

    @property
    def err_value(self) -> E_co:
        """The error."""
        return self.value

    def unwrap(self) -> NoReturn:
        """Raise UnwrapError; an error that is an exception becomes its cause."""
        raise _unwrap_error(self, "unwrap()")

    def unwrap_err(self) -> E_co:
        """Return the error."""
        return self.value

    def unwrap_or(self, default: U) -> U:
        """Return the default."""
        return default

    def map(self, function: object) -> Err[E_co]:
        """Return this result unchanged."""
        return self

    def map_err(self, function: Callable[[E_co], F]) -> Err[F]:
        """Return Err with the function applied to the error."""
        return Err(function(self.value))


Result: TypeAlias = Ok[T] | Err[E]


class UnwrapError(Exception):
    """The value of an Err or the error of an Ok was asked for; `result` is that result."""

    def __init__(self, result: Result[Any, Any], message: str) -> None:
        super().__init__(result, message)
        self.result = result
        self.message = message

    def __str__(self) -> str:
        return self.message


def is_ok(result: Result[T, E]) -> TypeIs[Ok[T]]:
    """Tell whether the result is an Ok, in a way type checkers follow on both branches."""
    return isinstance(result, Ok)


def is_err(result: Result[T, E]) -> TypeIs[Err[E]]:
    """Tell whether the result is an Err, in a way type checkers follow on both branches."""
    return isinstance(result, Err)


def _unwrap_error(result: Result[Any, Any], member: str) -> UnwrapError:
    # A success may be the user's data, so only its type is named; an error is made to be read.
    inner = result.value
    shown = repr(inner) if isinstance(result, Err) else type(inner).__name__
    error = UnwrapError(result, f"called {member} on {type(result).__name__}: {shown}")
    if isinstance(inner, BaseException):
        error.__cause__ = inner
    return error
