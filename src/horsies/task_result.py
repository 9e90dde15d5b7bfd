"""TaskResult, the outcome of a task: a value or a TaskError.

Error codes are built-in members from `error_codes` or the user's own. Built-in names are reserved, so
that a stored code shows whether the library or the task set it.
"""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated, Any, ClassVar, Generic, NoReturn, TypeVar, get_args, overload

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema, to_jsonable_python

from horsies.error_codes import (
    BUILTIN_CODE_REGISTRY,
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
    error_code_text,
)
from horsies.states import WorkflowStatus

_MESSAGE_CHARACTERS_MAX = 4_000
_TRACEBACK_CHARACTERS_MAX = 16_000
_SHOWN_CHARACTERS_MAX = 200
# The limit saves time as well as space: a list of a million items is never formatted in full.
_shortened = reprlib.Repr()
_shortened.maxlist = _shortened.maxtuple = _shortened.maxset = _shortened.maxdict = 10
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = _SHOWN_CHARACTERS_MAX
_BUILTIN_TAG = "__builtin_task_code__"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)


def storable_text(text: str) -> str:
    """Escape NUL and lone surrogates, which PostgreSQL cannot store."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


def exception_text(exception: BaseException) -> str:
    """Return an exception's message as storable text of limited length; never raises."""
    return _text_or(lambda: str(exception), "<unprintable>")


def describe_exception(exception: BaseException) -> dict[str, str]:
    """Return an exception as JSON-ready text of limited length; never raises."""
    return {
        "type": _text_or(lambda: type(exception).__name__, "<unknown type>"),
        "message": exception_text(exception),
        "traceback": _text_or(
            lambda: "".join(traceback.format_exception(exception)),
            "<traceback unavailable>",
            _TRACEBACK_CHARACTERS_MAX,
        ),
    }


def _text_or(make: Callable[[], str], fallback: str, limit: int = _MESSAGE_CHARACTERS_MAX) -> str:
    # User code such as __str__ may raise any exception here; the task's failure must be reported
    # anyway.
    try:
        text = storable_text(make())
        half = limit // 2
        if len(text) <= limit:
            return text
        left_out = len(text) - 2 * half
        return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
    except BaseException:
        return fallback


def json_object(value: Any) -> dict[str, Any]:
    """Return an object of this package as plain JSON values: times as text, codes by name."""
    written: dict[str, Any] = to_jsonable_python(value, bytes_mode="base64", fallback=_as_plain)
    return written


def _as_plain(value: Any) -> Any:
    match value:
        case TaskResult():
            return value.to_dict()
        case BaseException():
            return describe_exception(value)
        case _:
            return str(value)


def _checked_code(code: object) -> BuiltInTaskCode | str | None:
    match code:
        case None | OperationalErrorCode() | ContractCode() | RetrievalCode() | OutcomeCode():
            return code
        case Enum():
            raise ValueError(
                f"error_code must be a plain string or a built-in code, not a member of "
                f"{type(code).__name__}; pass its value as str"
            )
        case str() if code in BUILTIN_CODE_REGISTRY:
            family = type(BUILTIN_CODE_REGISTRY[code]).__name__
            raise ValueError(
                f"error_code {code!r} is reserved; use {family}.{code} or another name"
            )
        case str():
            return str(code)
        case dict():
            return _untagged_code(code)
        case _:
            raise ValueError(f"error_code must be a string, not {type(code).__name__}")


def _untagged_code(tagged: dict[Any, Any]) -> BuiltInTaskCode:
    value = tagged.get(_BUILTIN_TAG)
    if len(tagged) != 1 or not isinstance(value, str) or value not in BUILTIN_CODE_REGISTRY:
        raise ValueError(f'error_code as an object must be {{"{_BUILTIN_TAG}": "<built-in code>"}}')
    return BUILTIN_CODE_REGISTRY[value]


def _dumped_code(code: BuiltInTaskCode | str | None) -> dict[str, str] | str | None:
    return {_BUILTIN_TAG: code.value} if isinstance(code, Enum) else code


def _dumped_exception(
    exception: dict[str, Any] | BaseException | None,
) -> dict[str, Any] | None:
    return describe_exception(exception) if isinstance(exception, BaseException) else exception


_CodeField = Annotated[
    BuiltInTaskCode | str | None,
    BeforeValidator(_checked_code),
    PlainSerializer(_dumped_code),
]
_ExceptionField = Annotated[
    dict[str, Any] | BaseException | None,
    PlainSerializer(_dumped_exception),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
]


class TaskError(BaseModel):
    """The reason why a task failed.

    `error_code` is a built-in member or your own name. In this process, the exception is an object; it
    is stored as its type name, message and traceback text.

    Example:
        return TaskResult(err=TaskError(error_code="CARD_DECLINED", message="the bank said no"))
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    error_code: _CodeField = None
    """A built-in member, or your own upper-case name."""
    message: str | None = None
    """A sentence for people."""
    data: Any = None
    """Any value that JSON can represent."""
    exception: _ExceptionField = None
    """The exception that caused the error; its stored form has the type name, message and traceback."""

    def to_dict(self) -> dict[str, Any]:
        """Return the error as plain JSON values; a built-in code becomes plain text."""
        return json_object(dict(self)) | {"error_code": error_code_text(self.error_code)}

    def __repr_args__(self) -> Iterator[tuple[str, str | None]]:
        # Pydantic prints through this method. Show only the type of the data, because it may
        # contain task arguments.
        message, limit = self.message, _SHOWN_CHARACTERS_MAX
        if message is not None and len(message) > limit:
            message = f"{message[:limit]}..."
        yield "error_code", error_code_text(self.error_code)
        yield "message", message
        if self.data is not None:
            yield "data_type", type(self.data).__name__
        if isinstance(self.exception, dict):  # The error in its stored form.
            yield "exception_type", self.exception.get("type")
        elif self.exception is not None:
            yield "exception_type", type(self.exception).__name__


class SubWorkflowSummary(BaseModel, Generic[T]):
    """The outcome of a child run: its status, its output, and its node counts."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    status: WorkflowStatus
    """The final status of the child run."""
    output: T | None = None
    """The value of the run's output node, if it has one."""
    total_tasks: int = 0
    """How many nodes the run has."""
    completed_tasks: int = 0
    """How many nodes completed."""
    failed_tasks: int = 0
    """How many nodes failed."""
    skipped_tasks: int = 0
    """How many nodes were skipped."""
    error_summary: str | None = None
    """The error of the run as one line, or None."""

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        # Do not show the output, because it may contain any value that a task has returned.
        for name in type(self).model_fields:
            if name != "output":
                yield name, getattr(self, name)


class SubWorkflowError(TaskError):
    """A sub-workflow ended without success."""

    sub_workflow_id: str | None = None
    """The id of the child run."""
    sub_workflow_summary: SubWorkflowSummary[Any] | None = None
    """The outcome of the child run."""


class _Missing(Enum):
    """Marks the missing part of a TaskResult, because None is a valid value and error."""

    MISSING = "missing"


_MISSING = _Missing.MISSING


class TaskResult(Generic[T_co, E_co]):
    """The outcome of a task: exactly one of `ok=` and `err=`; immutable.

    Example:
        @app.task("add")
        def add(a: int, b: int) -> TaskResult[int, TaskError]:
            return TaskResult(ok=a + b)
    """

    __slots__ = ("_err", "_ok")

    # Marks a TaskResult for Ok and Err, whose module must not import this module.
    holds_outcome: ClassVar[bool] = True
    """Always true: it distinguishes a task's result from ``Ok`` and ``Err``."""

    _ok: T_co | _Missing
    _err: E_co | _Missing

    @overload
    def __init__(self, *, ok: T_co) -> None: ...
    @overload
    def __init__(self, *, err: E_co) -> None: ...
    def __init__(
        self, *unnamed: object, ok: T_co | _Missing = _MISSING, err: E_co | _Missing = _MISSING
    ) -> None:
        if unnamed:
            raise TypeError(
                "TaskResult takes its value by name; write TaskResult(ok=value) or TaskResult(err=error)"
            )
        if (ok is _MISSING) == (err is _MISSING):
            given = "neither" if ok is _MISSING else "both"
            raise ValueError(f"TaskResult takes exactly one of ok= and err=, {given} was given")
        object.__setattr__(self, "_ok", ok)
        object.__setattr__(self, "_err", err)

    def is_ok(self) -> bool:
        """Return whether the task succeeded."""
        return self._err is _MISSING

    def is_err(self) -> bool:
        """Return whether the task failed."""
        return self._ok is _MISSING

    @property
    def ok(self) -> T_co | None:
        """The value, or None if the task failed."""
        return None if self._ok is _MISSING else self._ok

    @property
    def err(self) -> E_co | None:
        """The error, or None if the task succeeded."""
        return None if self._err is _MISSING else self._err

    @property
    def ok_value(self) -> T_co:
        """The value. Raises ValueError if the task failed, with the exception of a direct call as its
        cause, if any.
        """
        if self._ok is _MISSING:
            raised = self._err.exception if isinstance(self._err, TaskError) else None
            cause = raised if isinstance(raised, BaseException) else None
            raise ValueError(f"a failed task has no value: {self!r}") from cause
        return self._ok

    @property
    def err_value(self) -> E_co:
        """The error. Raises ValueError if the task succeeded."""
        if self._err is _MISSING:
            # Do not show the value, because an exception's message may be logged.
            raise ValueError(f"a successful task has no error: ok=<{type(self._ok).__name__}>")
        return self._err

    def unwrap(self) -> T_co:
        """Return the value; raise ValueError if the task failed."""
        return self.ok_value

    def unwrap_err(self) -> E_co:
        """Return the error; raise ValueError if the task succeeded."""
        return self.err_value

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"ok": value}`` or ``{"err": error}`` as plain JSON values."""
        if self._err is _MISSING:
            return json_object({"ok": self._ok})
        err = self._err
        return {"err": err.to_dict() if isinstance(err, TaskError) else json_object({"": err})[""]}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        # Iterate over pairs as pydantic models do, because encoders without a schema call dict().
        return iter(_sides(self).items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskResult):
            return NotImplemented
        return bool(self._ok == other._ok and self._err == other._err)

    def __hash__(self) -> int:
        return hash((self._ok, self._err))

    def __repr__(self) -> str:
        if self._err is _MISSING:
            return f"TaskResult(ok={_shortened.repr(self._ok)})"
        if isinstance(self._err, TaskError):
            return f"TaskResult(err={self._err!r})"
        return f"TaskResult(err={_shortened.repr(self._err)})"

    def __setattr__(self, name: str, _value: object) -> NoReturn:
        raise AttributeError(f"a TaskResult is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a TaskResult is immutable; {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        # The default restores slots by assignment, which an immutable object rejects.
        return (_from_sides, (_sides(self),))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Allow results inside other values: as parameters, and as list members."""
        ok_type, err_type = get_args(source) or (Any, TaskError)
        ok, err = handler.generate_schema(ok_type), handler.generate_schema(err_type)
        if err_type is not TaskError:
            return _result_schema(_sides_schema(ok, err), _sides_schema(ok, err))
        # A failed sub-workflow's error may be passed where a plain TaskError is declared. For
        # Python objects this class is tried first, because the object is also a TaskError. For JSON
        # this class is tried second, because its stored text differs.
        child = handler.generate_schema(SubWorkflowError)
        adopted = core_schema.no_info_after_validator_function(
            adopted_error, core_schema.any_schema()
        )
        return _result_schema(
            _sides_schema(ok, _first_of(child, err)),
            _sides_schema(ok, _first_of(err, child, adopted)),
        )


def _sides(result: TaskResult[Any, Any]) -> dict[str, Any]:
    return {"ok": result.ok_value} if result.is_ok() else {"err": result.err_value}


def _from_sides(sides: dict[str, Any]) -> TaskResult[Any, Any]:
    return TaskResult(**sides)


def adopted_error(stored: Any) -> TaskError:
    """Return a TaskError with a stored error of an unknown type as its data. The code and the message
    are copied from fields with these names, if any.
    """
    fields = stored if isinstance(stored, dict) else {}
    try:
        code, message = fields.get("error_code"), fields.get("message")
        return TaskError(error_code=code, message=message, data=stored)
    except ValueError:
        return TaskError(data=stored)


def _first_of(*choices: CoreSchema) -> CoreSchema:
    return core_schema.union_schema(list(choices), mode="left_to_right")


def _sides_schema(ok: CoreSchema, err: CoreSchema) -> CoreSchema:
    return core_schema.typed_dict_schema(
        {
            "ok": core_schema.typed_dict_field(ok, required=False),
            "err": core_schema.typed_dict_field(err, required=False),
        },
        extra_behavior="forbid",
    )


def _result_schema(live_sides: CoreSchema, stored_sides: CoreSchema) -> CoreSchema:
    """Describe the stored form of a result: an object with either "ok" or "err"."""
    live = core_schema.chain_schema(
        [
            core_schema.is_instance_schema(TaskResult),
            core_schema.no_info_plain_validator_function(_sides),
            live_sides,
        ]
    )
    # In lax mode, which web frameworks use, accept a dictionary too; codecs are strict.
    from_python = core_schema.lax_or_strict_schema(_first_of(live, stored_sides), live)
    return core_schema.no_info_after_validator_function(
        _from_sides,
        core_schema.json_or_python_schema(stored_sides, from_python),
        serialization=core_schema.plain_serializer_function_ser_schema(
            _sides, return_schema=live_sides
        ),
    )
