"""Step functions: their names, the JSON of their values, and the records of their failures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pydantic_core import from_json, to_json

from horsies.codec.calls import payload_bytes
from horsies.codec.form import CodecError, JsonForm
from horsies.codec.shape import Part, ValueShape, bare
from horsies.durable.past import checked_name
from horsies.durable.time_limit import StepTimeout
from horsies.encryption import unmarked
from horsies.error_codes import (
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    error_code_text,
)
from horsies.errors import DurableMisuse, StepFailed, TaskFailed
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult, exception_text, storable_text

RESULT_BYTES_MAX = 1024 * 1024
_MESSAGE_CHARACTERS_MAX = 2_000


class Failure(NamedTuple):
    """A failed step as it is recorded and raised again: a code and a message, never an exception."""

    code: str
    message: str
    data: Any = None

    def to_json(self) -> str:
        try:
            text = to_json(self._asdict()).decode()
        except ValueError:
            text = to_json(self._replace(data=None)._asdict()).decode()
        if payload_bytes(text) > RESULT_BYTES_MAX or "\\u0000" in text:
            message = storable_text(self.message)[:_MESSAGE_CHARACTERS_MAX]
            text = to_json(Failure(self.code, message)._asdict()).decode()
        return unmarked(text)

    @classmethod
    def from_json(cls, text: str) -> Failure:
        fields = from_json(text)
        return cls(str(fields["code"]), str(fields["message"]), fields.get("data"))

    def raised(self, step: str) -> StepFailed:
        return StepFailed(step, self.code, self.message, self.data)


# Determines the error code of an exception with the mappers of the task and the application.
CodeOf = Callable[[BaseException], BuiltInTaskCode | str]


def failure_of(error: BaseException, code_of: CodeOf) -> Failure:
    """Return the record of an exception that a step raised."""
    if isinstance(error, StepFailed):
        return Failure(error.code, error.message, error.data)
    if isinstance(error, StepTimeout):
        return Failure(OutcomeCode.STEP_TIMEOUT.value, str(error))
    if isinstance(error, TaskFailed) and error.code is not None:
        code = str(error_code_text(error.code))
        return Failure(code, storable_text(error.message or code), error.data)
    code = str(error_code_text(code_of(error)))
    text = f"{type(error).__name__}: {exception_text(error)}"
    return Failure(code, storable_text(text)[:_MESSAGE_CHARACTERS_MAX])


def excess(text: str) -> str | None:
    """Describe by how much a JSON text exceeds the limit of a recorded value; None if it fits."""
    if (size := payload_bytes(text)) <= RESULT_BYTES_MAX:
        return None
    return f"has {size:,} bytes of JSON, more than {RESULT_BYTES_MAX:,}"


def too_large(subject: str, text: str) -> Failure | None:
    """Return the failure of a step whose result is too large to be recorded; None if it fits."""
    if (problem := excess(text)) is None:
        return None
    message = f"{subject} {problem}; return a reference to the data instead."
    return Failure(OperationalErrorCode.PAYLOAD_TOO_LARGE.value, message)


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A function called as a step: its name, and the form of its value."""

    name: str | None
    form: JsonForm
    returns_result: bool
    is_async: bool

    def encode(self, step: str, value: Any) -> str | Failure:
        """Return the JSON text of a value, or the failure of the step if the value is invalid."""
        if self.returns_result:
            if not isinstance(value, TaskResult):
                text = f"Step {step!r} returned {type(value).__name__} instead of a TaskResult."
                return Failure(ContractCode.RETURN_TYPE_MISMATCH, text)
            if value.is_err():
                return _failure_of_result(step, value.err_value)
            value = value.ok_value
        encoded = self.form.encode(value)
        if isinstance(encoded, CodecError):
            text = f"The result of step {step!r} cannot be recorded: {encoded.message}"
            return Failure(OperationalErrorCode.WORKER_SERIALIZATION_ERROR, text)
        return too_large(f"The result of step {step!r}", encoded) or encoded

    def unwrapped(self, value: Any) -> Any:
        """Return the value of a successful step; take it out of a TaskResult if the function returns
        one.
        """
        return value.ok_value if self.returns_result else value

    def decode(self, step: str, text: str) -> Any:
        return decoded(self.form, step, text)


def decoded(form: JsonForm, step: str, text: str) -> Any:
    """Decode the recorded value of a step; raise StepFailed if the annotation no longer fits the value."""
    value = form.decode(text)
    if isinstance(value, Err):
        code = OperationalErrorCode.RESULT_DESERIALIZATION_ERROR.value
        raise StepFailed(step, code, f"Its recorded value cannot be read: {value.value.message}")
    return value.value


def _failure_of_result(step: str, error: object) -> Failure:
    if not isinstance(error, TaskError):
        return Failure(OperationalErrorCode.TASK_EXCEPTION, f"Step {step!r} returned {error!r}.")
    code = str(error_code_text(error.error_code) or OperationalErrorCode.TASK_EXCEPTION.value)
    return Failure(code, error.message or code, error.data)


def step_function(function: Any) -> tuple[Callable[..., Any], StepFunction]:
    """Return the function to call and its description; for a registered task, call the task's function."""
    called = getattr(function, "definition", None)
    if called is not None:
        function = called.function
    if not callable(function):
        raise DurableMisuse(f"A step takes a function, not {type(function).__name__}.")
    try:
        return function, _described(function)
    except TypeError:  # Some callables cannot be dictionary keys.
        return function, _describe(function)


def _describe(function: Callable[..., Any]) -> StepFunction:
    hints = _hints(function)
    declared = bare(hints.get("return", Any))
    returns_result = (get_origin(declared) or declared) is TaskResult
    value_type = hints.get("return", Any)
    if returns_result:
        value_type = (*get_args(declared), Any)[0]
    name = getattr(function, "__name__", None)
    return StepFunction(
        name if isinstance(name, str) and name != "<lambda>" else None,
        form_of(value_type, f"the return annotation of step function {name}"),
        returns_result,
        inspect.iscoroutinefunction(function),
    )


_described = lru_cache(maxsize=512)(_describe)


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:
        if not hasattr(function, "__annotations__"):
            return {}
        raise DurableMisuse(
            f"The annotations of step function {getattr(function, '__name__', function)!r} cannot be "
            f"resolved ({error}); import or define the names they use at module level."
        ) from error


def form_of(declared: Any, where: str) -> JsonForm:
    """Return the form of values of a declared type; raise DurableMisuse if JSON cannot represent them."""
    try:
        return _form_of(declared, where)
    except TypeError:
        return _new_form(declared, where)


def _new_form(declared: Any, where: str) -> JsonForm:
    try:
        return JsonForm(ValueShape(Part("value", declared)))
    except ValueError as error:
        raise DurableMisuse(f"In {where}, {error}.") from error


# Building a form takes milliseconds, so forms are cached.
_form_of = lru_cache(maxsize=256)(_new_form)


def base_name(given: str | None, function: StepFunction) -> str:
    """Return the name of a step without its occurrence: the given name, or the name of its function."""
    return checked_name(given) if given is not None else _own_name(function.name)


@lru_cache(maxsize=512)
def _own_name(name: str | None) -> str:
    if name is None:
        raise DurableMisuse(
            "A lambda or a partial has no name by which its step is found again; give the step one with "
            "ctx.with_options(name=...)."
        )
    return checked_name(name)
