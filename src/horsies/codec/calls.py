"""Task calls as JSON text, and back, by the annotations of the task function.

Stored text is only data: it names no classes, and reading it imports no code, because the types are those of
the registered function. An argument that would not come back unchanged is rejected, and the error names its
path.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from types import UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from horsies.codec.form import CodecError, JsonForm
from horsies.codec.shape import AnnotationProblem, ListShape, ObjectShape, Part, bare
from horsies.result import Err, Ok, Result

_POSITIONAL_KINDS = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})
_KEYWORD_KINDS = frozenset({Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY})
_REST_KINDS = frozenset({Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD})
_STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
_NAME_CHARACTERS_MAX = 40

# A workflow passes these parameters to a task that declares them; callers never send them. Parameters
# annotated with a class marked `is_task_transaction` are never sent either: a worker passes them.
INJECTED_NAMES = frozenset({"workflow_ctx", "workflow_meta"})


class EncodedCall(NamedTuple):
    """The arguments of a call in stored form, as a JSON list and a JSON object, and the call's key, if it
    has one.
    """

    args_json: str
    kwargs_json: str
    key: str | None = None


class BoundCall(NamedTuple):
    """The arguments of a call, in the form that the function takes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_NO_ARGS: Ok[Any] = Ok(())
_EMPTY_CALL = Ok(EncodedCall("[]", "{}"))


class CallSignature:
    """The parameters of a task function, ready to encode and decode calls.

    Example:
        signature = CallSignature.of(add)
        match signature.encode_call((1,), {"b": 2}):
            case Ok(call):
                store(call.args_json, call.kwargs_json)
            case Err(error):
                log.error("%s", error.message)

    `injected` names the parameters that a workflow or a worker passes. `required_injected` names those
    without a default; outside workflows they are None. `transaction` is the parameter that receives the
    task's transaction, or None.
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
        "transaction",
    )

    def __init__(
        self, function: Callable[..., Any], annotations: Mapping[str, Any], first: int = 0
    ) -> None:
        parameters = tuple(inspect.signature(function).parameters.values())[first:]
        self.transaction: Final = _transaction_parameter(parameters, annotations)
        injected = INJECTED_NAMES | ({self.transaction} if self.transaction else set())
        sent = sendable(parameters, injected)
        left_out = [p for p in parameters if p.name in injected and p not in sent]
        names = ParameterNames.of(sent)
        parts = {p.name: Part(p.name, annotations.get(p.name, Any)) for p in sent}
        by_position = [parts[name] for name in names.positional]
        by_keyword = [parts[name] for name in names.spots]
        self.names: Final = names
        self.annotations: Final = annotations
        self.injected: Final = frozenset(p.name for p in left_out)
        self.required_injected: Final = frozenset(p.name for p in left_out if p.default is p.empty)
        self._absent = dict.fromkeys(self.required_injected)
        self._positional = JsonForm(ListShape(by_position, parts.get(names.rest_positional or "")))
        self._keywords = JsonForm(ObjectShape(by_keyword, parts.get(names.rest_keyword or "")))
        self._plain_minimum, self._plain_maximum = names.plain_range()

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        local_names: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> CallSignature:
        """Build the signature; ValueError names the annotation that cannot be used.

        `local_names` helps resolve annotations written as text that name objects local to a function. The
        parameters before position `first` are not part of a call, because a worker passes them.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        try:
            local = None if local_names is None else dict(local_names)
            annotations = get_type_hints(function, localns=local, include_extras=True)
        except Exception as error:
            raise ValueError(
                f"The annotations of task function {name} cannot be resolved ({error}); "
                "import or define the names they use at module level, before the function"
            ) from error
        try:
            return cls(function, annotations, first)
        except AnnotationProblem as error:
            raise ValueError(f"In task function {name}, {error}") from error

    def encode_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Result[EncodedCall, CodecError]:
        """Bind the arguments, check them without converting any value, and return their JSON text."""
        misfit = self._misfit(len(args), kwargs)
        if misfit is not None:
            path, fault = misfit
            message = f"{fault}; the parameters are {self.names.shown}."
            return Err(CodecError(message, path))
        if not args and not kwargs:
            return _EMPTY_CALL
        args_json = self._positional.encode(tuple(args)) if args else "[]"
        if isinstance(args_json, CodecError):
            return Err(_with_hint(args_json, args))
        kwargs_json = self._keywords.encode(dict(kwargs)) if kwargs else "{}"
        if isinstance(kwargs_json, CodecError):
            return Err(_with_hint(kwargs_json, kwargs.values()))
        return Ok(EncodedCall(args_json, kwargs_json))

    def decode_call(self, args_json: str, kwargs_json: str) -> Result[BoundCall, CodecError]:
        """Return stored arguments in the form that the function takes today. A call that was stored before
        the signature changed must still fit; otherwise an error is returned.
        """
        if args_json == "[]" and kwargs_json == "{}" and not self._plain_minimum:
            return Ok(BoundCall((), dict(self._absent)))
        args = _NO_ARGS if args_json == "[]" else self._positional.decode(args_json)
        if isinstance(args, Err):
            return args
        kwargs = self.decode_keywords(kwargs_json)
        if isinstance(kwargs, Err):
            return kwargs
        misfit = self._misfit(len(args.value), kwargs.value)
        if misfit is not None:
            return Err(self._outdated_call(*misfit))
        return Ok(BoundCall(args.value, {**self._absent, **kwargs.value}))

    def encode_keywords(self, kwargs: Mapping[str, Any]) -> Result[str, CodecError]:
        """Return the JSON text of some arguments by name; required arguments may be omitted."""
        text = self._keywords.encode(dict(kwargs)) if kwargs else "{}"
        return Err(text) if isinstance(text, CodecError) else Ok(text)

    def decode_keywords(self, kwargs_json: str) -> Result[dict[str, Any], CodecError]:
        """Return some stored arguments by name."""
        return Ok({}) if kwargs_json == "{}" else self._keywords.decode(kwargs_json)

    def annotation_of(self, name: str) -> Any:
        """Return the annotation of the parameter that takes this keyword; None if the parameter has no
        annotation.
        """
        is_own = name in self.names.spots
        return self.annotations.get(name if is_own else self.names.rest_keyword or "")

    def complete_call(
        self, kwargs: Mapping[str, Any], injected: Mapping[str, Any]
    ) -> Result[BoundCall, CodecError]:
        """Return the call with these named arguments and the arguments that a workflow passes."""
        misfit = self.names.misfit(0, kwargs)
        if misfit is not None:
            return Err(self._outdated_call(*misfit))
        return Ok(BoundCall((), {**self._absent, **kwargs, **injected}))

    def _misfit(self, count: int, kwargs: Mapping[Any, Any]) -> tuple[str, str] | None:
        # The common case, a purely positional call, takes two comparisons and skips the names.
        if not kwargs and self._plain_minimum <= count <= self._plain_maximum:
            return None
        return self.names.misfit(count, kwargs)

    def _outdated_call(self, path: str, fault: str) -> CodecError:
        return CodecError(
            f"The stored call does not fit the function: {fault}; the parameters are "
            f"{self.names.shown}. Correct the call where it is sent. If the function has changed, keep "
            "its old parameters and give new ones a default while calls are pending.",
            path,
        )


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """A signature's parameter names, grouped by how the parameters may be passed.

    `spots` gives the position of every parameter that may be passed by name; keyword-only parameters come
    last.
    """

    positional: tuple[str, ...]
    spots: Mapping[str, float]
    required: tuple[str, ...]
    rest_positional: str | None
    rest_keyword: str | None
    shown: str

    @classmethod
    def of(cls, parameters: Collection[Parameter]) -> ParameterNames:
        """Collect the names from an inspect.Signature's parameters."""
        positional = tuple(p.name for p in parameters if p.kind in _POSITIONAL_KINDS)
        places = {name: float(index) for index, name in enumerate(positional)}
        by_name = (p.name for p in parameters if p.kind in _KEYWORD_KINDS)
        rest = {p.kind: p.name for p in parameters if p.kind in _REST_KINDS}
        return cls(
            positional=positional,
            spots={name: places.get(name, math.inf) for name in by_name},
            required=tuple(
                p.name for p in parameters if p.default is p.empty and p.kind not in _REST_KINDS
            ),
            rest_positional=rest.get(Parameter.VAR_POSITIONAL),
            rest_keyword=rest.get(Parameter.VAR_KEYWORD),
            shown=", ".join(_STARS.get(p.kind, "") + p.name for p in parameters) or "none",
        )

    def plain_range(self) -> tuple[float, float]:
        """Return the smallest and largest number of arguments in a purely positional call."""
        if not set(self.required) <= set(self.positional):
            return math.inf, -math.inf
        maximum = len(self.positional) if self.rest_positional is None else math.inf
        return len(self.required), maximum

    def misfit(self, count: int, keywords: Mapping[Any, Any]) -> tuple[str, str] | None:
        """Return the wrong parameter and the mistake, or None if the call fits."""
        if count > len(self.positional) and self.rest_positional is None:
            return "", f"{count} positional arguments are too many"
        for name in keywords:
            spot = self.spots.get(name)
            if not isinstance(name, str):
                return "", "an argument name is not text"
            if spot is None and self.rest_keyword is None:
                shown = ascii(name[:_NAME_CHARACTERS_MAX])
                return shown[1:-1], f"there is no parameter {shown}"
            if spot is not None and spot < count:
                return name, f"argument {name!r} is given twice"
        placed = self.positional[:count]
        for name in self.required:
            if name not in placed and not (name in self.spots and name in keywords):
                return name, f"argument {name!r} is missing"
        return None


def _transaction_parameter(
    parameters: Iterable[Parameter], annotations: Mapping[str, Any]
) -> str | None:
    """Return the parameter that is annotated with a class for a task's transaction."""
    found = [p for p in parameters if transaction_class(annotations.get(p.name)) is not None]
    if len(found) > 1:
        names = " and ".join(repr(p.name) for p in found)
        raise ValueError(f"parameters {names} are both the transaction; a task has one")
    if found and found[0].kind not in _KEYWORD_KINDS:
        name = found[0].name
        raise ValueError(f"parameter {name!r}, the transaction, cannot be passed by its name")
    return found[0].name if found else None


def transaction_class(annotation: Any) -> Any:
    """Return the class for a task's transaction that an annotation names, alone or in a union with None."""
    annotation = bare(annotation)
    is_union = get_origin(annotation) in (Union, UnionType)
    choices = get_args(annotation) if is_union else (annotation,)
    return next(
        (one for one in choices if getattr(one, "is_task_transaction", False) is True), None
    )


def sendable(
    parameters: Iterable[Parameter], injected: Collection[str] = INJECTED_NAMES
) -> list[Parameter]:
    """Return the parameters that a caller may send: all except those that a workflow or a worker passes.

    Parameters after an omitted parameter become keyword-only, because their positions differ between sender
    and function.
    """
    kept: list[Parameter] = []
    left_out = False
    for parameter in parameters:
        if parameter.name in injected and parameter.kind in _KEYWORD_KINDS:
            left_out = True
        elif left_out and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            kept.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        elif not (left_out and parameter.kind is Parameter.VAR_POSITIONAL):
            kept.append(parameter)
    return kept


def _with_hint(error: CodecError, values: Iterable[Any]) -> CodecError:
    """Add the advice of an argument's class about passing such an argument, if any."""
    hints = (getattr(type(value), "no_argument", None) for value in values)
    hint = next((one for one in hints if isinstance(one, str)), None)
    return (
        error if hint is None else CodecError(f"{error.message.rstrip('.')}; {hint}.", error.path)
    )


def payload_bytes(text: str) -> int:
    """Return the size of the text in UTF-8, to which the limits of ``PayloadConfig`` apply."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
