"""Task results as JSON text, and back, by the task function's annotation.

A result is stored as `{"ok": …}` or `{"err": …}`.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json, to_json

from horsies.codec.form import CodecError, JsonForm
from horsies.codec.shape import AnnotationProblem, Part, ValueShape, type_text
from horsies.error_codes import OperationalErrorCode
from horsies.result import Err, Ok, Result
from horsies.task_result import (
    SubWorkflowError,
    TaskError,
    TaskResult,
    adopted_error,
    storable_text,
)


def _err(err_type: Any) -> Part:
    # A tuple in an error's data is stored as a list; if it were rejected, the data would be lost.
    return Part("err", err_type, untyped=False)


_TASK_ERROR = JsonForm(ValueShape(_err(TaskError)))
_SUB_WORKFLOW_ERROR = JsonForm(ValueShape(_err(SubWorkflowError)))
_UNTYPED_OK = JsonForm(ValueShape(Part("ok", Any)))
_UNTYPED_ERR = JsonForm(ValueShape(Part("err", Any)))
_HEADS = (("ok", '{"ok":'), ("err", '{"err":'))
_NOT_A_RESULT = CodecError(
    'The stored text is not a result, an object with either "ok" or "err"; '
    "store only text that this library wrote.",
    "",
)
# The result of a task that returns nothing, as most tasks do: checking and writing it takes 3 µs.
_EMPTY: Ok[str] = Ok('{"ok":null}')
_LAST_RESORT = (
    '{"error_code":{"__builtin_task_code__":"WORKER_SERIALIZATION_ERROR"},'
    '"message":"The error of this task could not be stored.","data":null,"exception":null}'
)


class ResultCodec:
    """The two sides of a task's result, ready to encode and decode.

    An error's path starts with the wrong side; it is empty if the text is not a result. `ok_text` and
    `err_text` name the declared types, and `ok_type` is the type of the value.

    Example:
        codec = ResultCodec.of(int, TaskError)
        text = codec.encode(TaskResult(ok=3)).unwrap()
        assert codec.decode(text).unwrap() == TaskResult(ok=3)
    """

    __slots__ = ("_err", "_foreign_errors", "_is_empty", "_ok", "err_text", "ok_text", "ok_type")

    def __init__(self, ok_type: Any, err_type: Any) -> None:
        self.ok_type: Final = ok_type
        self.ok_text: Final = type_text(ok_type)
        self.err_text: Final = type_text(err_type)
        self._foreign_errors = not (isinstance(err_type, type) and issubclass(err_type, TaskError))
        self._is_empty = ok_type is None or ok_type is type(None)
        self._ok = JsonForm(ValueShape(Part("ok", ok_type)))
        self._err = _TASK_ERROR if err_type is TaskError else JsonForm(ValueShape(_err(err_type)))

    @classmethod
    def of(cls, ok_type: Any, err_type: Any) -> ResultCodec:
        """Build the codec for TaskResult[ok_type, err_type]; raise ValueError if a type cannot be used."""
        try:
            return cls(ok_type, err_type)
        except AnnotationProblem as error:
            raise ValueError(f"In the result type, {error}") from error

    def encode(self, result: TaskResult[Any, Any]) -> Result[str, CodecError]:
        """Return the JSON text of a result.

        The error is a TypeMismatch if the value does not fit the declared type without conversion; any
        other CodecError means that the value fits but cannot be stored.
        """
        if result.is_ok():
            value = result.ok_value
            if value is None and self._is_empty:
                return _EMPTY
            text = self._ok.encode(value)
            return Err(text) if isinstance(text, CodecError) else Ok(f'{{"ok":{text}}}')
        text = self._err_form(result.err_value).encode(result.err_value)
        return Err(text) if isinstance(text, CodecError) else Ok(f'{{"err":{text}}}')

    def decode(self, text: str) -> Result[TaskResult[Any, Any], CodecError]:
        """Read a stored result. An error that was created by the library is returned as a TaskError."""
        match split_result(text):
            case ("ok", value_text):
                return self._ok.decode(value_text).map(lambda value: TaskResult(ok=value))
            case ("err", value_text):
                return self._decode_err(value_text).map(lambda error: TaskResult(err=error))
            case _:
                return Err(_NOT_A_RESULT)

    def _err_form(self, error: Any) -> JsonForm:
        # A failed sub-workflow's error may be returned where a plain TaskError is declared.
        if type(error) is SubWorkflowError and self._err is _TASK_ERROR:
            return _SUB_WORKFLOW_ERROR
        return self._err

    def _decode_err(self, text: str) -> Result[Any, CodecError]:
        # The library's own error is recognised first, because almost any object fits a lenient model.
        if self._foreign_errors and _holds_task_error(text):
            return _decode_task_error(text)
        decoded = self._err.decode(text)
        if isinstance(decoded, Ok):
            return decoded
        made_here = _decode_task_error(text)
        return made_here if isinstance(made_here, Ok) else decoded


def encode_task_error(error: TaskError) -> str:
    """Return the JSON text of a result with an error created by the library. This cannot fail: parts that
    cannot be stored are omitted, so that the error is never lost.
    """
    form = _SUB_WORKFLOW_ERROR if type(error) is SubWorkflowError else _TASK_ERROR
    text = form.encode(error)
    if isinstance(text, CodecError):
        text = _TASK_ERROR.encode(_bare_error(error, text))
    return f'{{"err":{_LAST_RESORT if isinstance(text, CodecError) else text}}}'


def decode_untyped(text: str) -> Result[TaskResult[Any, TaskError], CodecError]:
    """Read a stored result without the task's types: as plain JSON, or as a TaskError.

    An error of a user's type becomes the `data` of a TaskError, which takes its code and message from
    the fields of those names if they exist.
    """
    match split_result(text):
        case ("ok", value_text):
            return _UNTYPED_OK.decode(value_text).map(lambda value: TaskResult(ok=value))
        case ("err", value_text):
            error = _decode_task_error(value_text)
            if isinstance(error, Err):
                error = _UNTYPED_ERR.decode(value_text).map(adopted_error)
            return error.map(lambda error: TaskResult(err=error))
        case _:
            return Err(_NOT_A_RESULT)


def split_result(text: str) -> tuple[str, str] | None:
    """Return the side of a stored result, "ok" or "err", and the JSON text of its value."""
    for side, head in _HEADS:
        if text.startswith(head) and text.endswith("}"):
            return side, text[len(head) : -1]
    # The text may have been reformatted in the database.
    try:
        ((side, value),) = from_json(text).items()
        return side, to_json(value).decode()
    except Exception:
        return None


def _holds_task_error(text: str) -> bool:
    stored = _UNTYPED_ERR.decode(text).unwrap_or(None) if '"error_code"' in text else None
    return isinstance(stored, dict) and stored.keys() >= TaskError.model_fields.keys()


def _decode_task_error(text: str) -> Result[Any, CodecError]:
    decoded = _TASK_ERROR.decode(text)
    return decoded if isinstance(decoded, Ok) else _SUB_WORKFLOW_ERROR.decode(text)


def _bare_error(error: TaskError, problem: CodecError) -> TaskError:
    """Return the error without the parts that cannot be stored."""
    try:
        message = None if error.message is None else storable_text(error.message)
        data = {"left_out": problem.message}
        return TaskError(error_code=error.error_code, message=message, data=data)
    except Exception:
        return TaskError(error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR)
