"""Task calls and results as JSON text, and back, by the annotations of the task function.

The codec stands at both ends of the line producer -> SQL -> turn -> child -> report -> result: a
producer encodes a call, a child decodes it and encodes what it returned, a handle decodes that.
Stored text is data only. It names no class and nothing is imported because of it; the types come
from the registered function. What would not come back unchanged is refused with its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, get_type_hints

from pydantic_core import from_json, to_json

from horsies.binding import INJECTED_NAMES, ParameterNames, sendable
from horsies.jsonform import CodecError, JsonForm
from horsies.jsonshape import AnnotationProblem, ListShape, ObjectShape, Part, ValueShape, type_text
from horsies.outcome import (
    OperationalErrorCode,
    SubWorkflowError,
    TaskError,
    TaskResult,
    adopted_error,
)
from horsies.result import Err, Ok, Result

__all__ = [
    "BoundCall",
    "CallSignature",
    "CodecError",
    "EncodedCall",
    "ResultCodec",
    "decode_untyped",
    "encode_task_error",
    "payload_bytes",
]


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """The arguments of a call as stored: a JSON list and a JSON object."""

    args_json: str
    kwargs_json: str


class BoundCall(NamedTuple):
    """The arguments of a call as the function takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallSignature:
    """The parameters of a task function, ready to encode and decode calls.

    Example:
        signature = CallSignature.of(add)
        match signature.encode_call((1,), {"b": 2}):
            case Ok(call):
                store(call.args_json, call.kwargs_json)
            case Err(error):
                log.error("%s", error.message)

    `injected` are the parameters that a workflow passes itself, `required_injected` those of them
    that have no default; outside of workflows they are None.
    """

    __slots__ = (
        "_absent",
        "_keywords",
        "_plain_maximum",
        "_plain_minimum",
        "_positional",
        "annotations",
        "injected",
        "names",
        "required_injected",
    )

    def __init__(
        self,
        parameters: Sequence[inspect.Parameter],
        annotations: Mapping[str, Any],
        positional: JsonForm,
        keywords: JsonForm,
    ) -> None:
        sent = sendable(parameters)
        left_out = [p for p in parameters if p.name in INJECTED_NAMES and p not in sent]
        self.names: Final = ParameterNames.of(sent)
        self.annotations: Final = annotations
        self.injected: Final = frozenset(p.name for p in left_out)
        self.required_injected: Final = frozenset(p.name for p in left_out if p.default is p.empty)
        self._absent = dict.fromkeys(self.required_injected)
        self._positional = positional
        self._keywords = keywords
        self._plain_minimum, self._plain_maximum = self.names.plain_range()

    @classmethod
    def of(
        cls, function: Callable[..., Any], local_names: Mapping[str, Any] | None = None
    ) -> CallSignature:
        """Build the signature; ValueError names the annotation that cannot be used.

        `local_names` helps annotations written as text that name things local to a function.
        """
        annotations = _annotations(function, local_names)
        parameters = tuple(inspect.signature(function).parameters.values())
        names = ParameterNames.of(sendable(parameters))
        parts = {p.name: Part(p.name, annotations.get(p.name, Any)) for p in parameters}
        by_position = [parts[name] for name in names.positional]
        by_keyword = [parts[name] for name in names.spots]
        try:
            positional = JsonForm(ListShape(by_position, parts.get(names.rest_positional or "")))
            keywords = JsonForm(ObjectShape(by_keyword, parts.get(names.rest_keyword or "")))
        except AnnotationProblem as error:
            raise ValueError(f"In task function {_name_of(function)}, {error}") from error
        return cls(parameters, annotations, positional, keywords)

    def encode_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Result[EncodedCall, CodecError]:
        """Bind the arguments, check them without any conversion, and return their JSON text."""
        if kwargs or not self._plain_minimum <= len(args) <= self._plain_maximum:
            misfit = self.names.misfit(len(args), kwargs)
            if misfit is not None:
                return Err(self._wrong_call(*misfit))
        if not args and not kwargs:
            return _EMPTY_CALL
        args_json = self._positional.encode(tuple(args)) if args else "[]"
        if isinstance(args_json, CodecError):
            return Err(args_json)
        kwargs_json = self._keywords.encode(dict(kwargs)) if kwargs else "{}"
        if isinstance(kwargs_json, CodecError):
            return Err(kwargs_json)
        return Ok(EncodedCall(args_json, kwargs_json))

    def decode_call(self, args_json: str, kwargs_json: str) -> Result[BoundCall, CodecError]:
        """Return stored arguments as the function takes them today.

        A call stored before the signature changed is an error unless it still fits.
        """
        if args_json == "[]" and kwargs_json == "{}" and not self._plain_minimum:
            return Ok(BoundCall((), dict(self._absent)))
        args = _NO_ARGS if args_json == "[]" else self._positional.decode(args_json)
        if isinstance(args, Err):
            return args
        kwargs = Ok({}) if kwargs_json == "{}" else self._keywords.decode(kwargs_json)
        if isinstance(kwargs, Err):
            return kwargs
        if kwargs.value or not self._plain_minimum <= len(args.value) <= self._plain_maximum:
            misfit = self.names.misfit(len(args.value), kwargs.value)
            if misfit is not None:
                return Err(self._outdated_call(*misfit))
        return Ok(BoundCall(args.value, {**self._absent, **kwargs.value}))

    def encode_keywords(self, kwargs: Mapping[str, Any]) -> Result[str, CodecError]:
        """Return the JSON text of some arguments by name; whether they suffice is not asked."""
        text = self._keywords.encode(dict(kwargs)) if kwargs else "{}"
        return Err(text) if isinstance(text, CodecError) else Ok(text)

    def decode_keywords(self, kwargs_json: str) -> Result[dict[str, Any], CodecError]:
        """Return some stored arguments by name."""
        return Ok({}) if kwargs_json == "{}" else self._keywords.decode(kwargs_json)

    def complete_call(
        self, kwargs: Mapping[str, Any], injected: Mapping[str, Any]
    ) -> Result[BoundCall, CodecError]:
        """Return the call of these arguments by name, with what a workflow passes itself."""
        misfit = self.names.misfit(0, kwargs)
        if misfit is not None:
            return Err(self._outdated_call(*misfit))
        return Ok(BoundCall((), {**self._absent, **kwargs, **injected}))

    def _wrong_call(self, path: str, fault: str) -> CodecError:
        return CodecError(
            f"The call is wrong: {fault}; the parameters are {self.names.shown}.", path
        )

    def _outdated_call(self, path: str, fault: str) -> CodecError:
        return CodecError(
            f"The stored call no longer fits the function: {fault}; keep old parameters and "
            "give new ones a default while calls wait, the parameters are now "
            f"{self.names.shown}.",
            path,
        )


class ResultCodec:
    """The two sides of a task's result, ready to check, encode and decode.

    Stored as `{"ok": …}` or `{"err": …}`. The path of an error starts with the side at fault; it
    is empty when the text is no result at all. `ok_text` and `err_text` name the declared types,
    `ok_type` is the type of the value.

    Example:
        codec = ResultCodec.of(int, TaskError)
        text = codec.encode(TaskResult(ok=3)).unwrap()
        assert codec.decode(text).unwrap() == TaskResult(ok=3)
    """

    __slots__ = ("_err", "_foreign_errors", "_ok", "err_text", "ok_text", "ok_type")

    def __init__(self, ok_type: Any, err_type: Any) -> None:
        self.ok_type: Final = ok_type
        self.ok_text: Final = type_text(ok_type)
        self.err_text: Final = type_text(err_type)
        self._foreign_errors = not _is_task_error_type(err_type)
        self._ok = JsonForm(ValueShape(Part("ok", ok_type)))
        self._err = (
            _TASK_ERROR if err_type is TaskError else JsonForm(ValueShape(Part("err", err_type)))
        )

    @classmethod
    def of(cls, ok_type: Any, err_type: Any) -> ResultCodec:
        """Build the codec for TaskResult[ok_type, err_type]; ValueError when a type is unusable."""
        try:
            return cls(ok_type, err_type)
        except AnnotationProblem as error:
            raise ValueError(f"In the result type, {error}") from error

    def validate(self, result: TaskResult[Any, Any]) -> Result[TaskResult[Any, Any], CodecError]:
        """Return the result when its value fits the declared type as it is."""
        if result.is_err():
            return self._err_form(result.err_value).check(result.err_value).map(_err_result)
        checked = self._ok.check(result.ok_value)
        if isinstance(checked, Err):
            return checked
        return Ok(result if checked.value is result.ok_value else TaskResult(ok=checked.value))

    def encode(self, result: TaskResult[Any, Any]) -> Result[str, CodecError]:
        """Return the JSON text of a result that fits the declared types."""
        if result.is_ok():
            text = self._ok.encode(result.ok_value)
            return Err(text) if isinstance(text, CodecError) else Ok(f'{{"ok":{text}}}')
        text = self._err_form(result.err_value).encode(result.err_value)
        return Err(text) if isinstance(text, CodecError) else Ok(f'{{"err":{text}}}')

    def decode(self, text: str) -> Result[TaskResult[Any, Any], CodecError]:
        """Return a stored result; an error that only the library can have made is a TaskError."""
        match _split(text):
            case ("ok", value_text):
                return self._ok.decode(value_text).map(_ok_result)
            case ("err", value_text):
                return self._decode_err(value_text).map(_err_result)
            case _:
                return Err(_NO_RESULT)

    def _err_form(self, error: Any) -> JsonForm:
        # A failed sub-workflow's error may be handed on wherever a plain TaskError is declared.
        if type(error) is SubWorkflowError and self._err is _TASK_ERROR:
            return _SUB_WORKFLOW_ERROR
        return self._err

    def _decode_err(self, text: str) -> Result[Any, CodecError]:
        # Almost any object fits a lenient model; the library's own error must not be lost in one.
        if self._foreign_errors and _holds_task_error(text):
            return _decode_task_error(text)
        decoded = self._err.decode(text)
        return (
            decoded
            if isinstance(decoded, Ok)
            else _decode_task_error(text).or_else(lambda _: decoded)
        )


def encode_task_error(error: TaskError) -> str:
    """Return the JSON text of a result holding an error the library made; cannot fail.

    What cannot be stored is left out of the error rather than losing the error.
    """
    form = _SUB_WORKFLOW_ERROR if type(error) is SubWorkflowError else _TASK_ERROR
    text = form.encode(error)
    if isinstance(text, CodecError):
        text = _TASK_ERROR.encode(_bare_error(error, text))
    return f'{{"err":{_LAST_RESORT if isinstance(text, CodecError) else text}}}'


def decode_untyped(text: str) -> Result[TaskResult[Any, TaskError], CodecError]:
    """Return a stored result without knowing the task's types: plain JSON, or a TaskError.

    An error of a type of the user's own comes as the `data` of a TaskError, with its code and
    message where it has such fields.
    """
    match _split(text):
        case ("ok", value_text):
            return _UNTYPED_OK.decode(value_text).map(_ok_result)
        case ("err", value_text):
            return (
                _decode_task_error(value_text)
                .or_else(lambda _: _adopted(value_text))
                .map(_err_result)
            )
        case _:
            return Err(_NO_RESULT)


def payload_bytes(text: str) -> int:
    """Return the size of the text in UTF-8, which is what the payload limits count."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


_NO_ARGS: Ok[Any] = Ok(())
_EMPTY_CALL = Ok(EncodedCall("[]", "{}"))

_HEADS = (("ok", '{"ok":'), ("err", '{"err":'))
_TASK_ERROR = JsonForm(ValueShape(Part("err", TaskError)))
_SUB_WORKFLOW_ERROR = JsonForm(ValueShape(Part("err", SubWorkflowError)))
_UNTYPED_OK = JsonForm(ValueShape(Part("ok", Any)))
_UNTYPED_ERR = JsonForm(ValueShape(Part("err", Any)))
_NO_RESULT = CodecError(
    'The stored text is not a result, an object with either "ok" or "err"; '
    "store only what this library wrote.",
    "",
)
_LAST_RESORT = (
    '{"error_code":{"__builtin_task_code__":"WORKER_SERIALIZATION_ERROR"},'
    '"message":"The error of this task could not be stored.","data":null,"exception":null}'
)


def _annotations(
    function: Callable[..., Any], local_names: Mapping[str, Any] | None
) -> dict[str, Any]:
    try:
        names = None if local_names is None else dict(local_names)
        return get_type_hints(function, localns=names, include_extras=True)
    except Exception as error:
        raise ValueError(
            f"The annotations of task function {_name_of(function)} cannot be resolved ({error}); "
            "import or define the names they use at module level, before the function"
        ) from error


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _is_task_error_type(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, TaskError)


def _ok_result(value: Any) -> TaskResult[Any, Any]:
    return TaskResult(ok=value)


def _err_result(error: Any) -> TaskResult[Any, Any]:
    return TaskResult(err=error)


def _split(text: str) -> tuple[str, str] | None:
    """Return the side of a stored result and the JSON text of its value."""
    for side, head in _HEADS:
        if text.startswith(head) and text.endswith("}"):
            return side, text[len(head) : -1]
    # Someone may have reformatted the text.
    try:
        stored = from_json(text)
        ((side, value),) = stored.items()
        return side, to_json(value).decode()
    except Exception:
        return None


def _holds_task_error(text: str) -> bool:
    stored = _UNTYPED_ERR.decode(text).ok() if '"error_code"' in text else None
    return isinstance(stored, dict) and stored.keys() >= TaskError.model_fields.keys()


def _decode_task_error(text: str) -> Result[Any, CodecError]:
    decoded = _TASK_ERROR.decode(text)
    return decoded if isinstance(decoded, Ok) else _SUB_WORKFLOW_ERROR.decode(text)


def _adopted(text: str) -> Result[TaskError, CodecError]:
    return _UNTYPED_ERR.decode(text).map(adopted_error)


def _bare_error(error: TaskError, problem: CodecError) -> TaskError:
    """Return what is left of an error without the parts that cannot be stored."""
    try:
        message = None if error.message is None else _storable(error.message)
        data = {"left_out": problem.message}
        return TaskError(error_code=error.error_code, message=message, data=data)
    except Exception:
        return TaskError(error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR)


def _storable(text: str) -> str:
    escaped = text.encode("utf-8", "backslashreplace").decode()
    return escaped.replace("\x00", "\\x00")
