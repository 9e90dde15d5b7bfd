"""Task calls and results as JSON text, and back, by the annotations of the task function.

The codec stands at both ends of the line producer -> SQL -> turn -> child -> report -> result: a
producer encodes a call, a child decodes it and encodes what it returned, a handle decodes that.
Stored text is data only. It names no class and nothing is imported because of it; the types come
from the registered function. What would not come back unchanged is refused with its place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Final, NamedTuple, get_type_hints

from horsies.codec.form import CodecError, JsonForm
from horsies.codec.shape import AnnotationProblem, ListShape, ObjectShape, Part
from horsies.result import Err, Ok, Result

_POSITIONAL_KINDS = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})
_KEYWORD_KINDS = frozenset({Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY})
_REST_KINDS = frozenset({Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD})
_NAME_CHARACTERS_MAX = 40

# A workflow passes these to a task that declares them; nobody sends them.
INJECTED_NAMES = frozenset({"workflow_ctx", "workflow_meta"})


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Which names a signature takes, and how.

    `spots` gives the position of every parameter that may be passed by name; one that may be passed
    only by name stands behind all positions.
    """

    positional: tuple[str, ...]
    spots: Mapping[str, float]
    required: tuple[str, ...]
    rest_positional: str | None
    rest_keyword: str | None
    shown: str

    @classmethod
    def of(cls, parameters: Collection[Parameter]) -> ParameterNames:
        """Collect the names from the parameters of an inspect.Signature."""
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
            shown=", ".join(_shown_parameter(p) for p in parameters) or "none",
        )

    def plain_range(self) -> tuple[float, float]:
        """Return how many arguments suffice when all of them are positional."""
        if not set(self.required) <= set(self.positional):
            return math.inf, -math.inf
        maximum = len(self.positional) if self.rest_positional is None else math.inf
        return len(self.required), maximum

    def misfit(self, count: int, keywords: Mapping[Any, Any]) -> tuple[str, str] | None:
        """Return the parameter at fault and the fault when the function takes no such call."""
        if count > len(self.positional) and self.rest_positional is None:
            return "", f"{count} positional arguments are too many"
        for name in keywords:
            spot = self.spots.get(name)
            if spot is None:
                if self.rest_keyword is None or not isinstance(name, str):
                    return _unknown(name)
            elif spot < count:
                return name, f"argument {name!r} is given twice"
        placed = self.positional[:count]
        for name in self.required:
            if name not in placed and not (name in self.spots and name in keywords):
                return name, f"argument {name!r} is missing"
        return None


def sendable(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return what a caller may send: all parameters but those a workflow passes itself.

    Behind a parameter that is left out, positions would mean something else to sender and function,
    so the following ones are taken by name only.
    """
    kept: list[Parameter] = []
    left_out = False
    for parameter in parameters:
        if parameter.name in INJECTED_NAMES and parameter.kind in _KEYWORD_KINDS:
            left_out = True
        elif left_out and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            kept.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        elif not (left_out and parameter.kind is Parameter.VAR_POSITIONAL):
            kept.append(parameter)
    return kept


def _shown_parameter(parameter: Parameter) -> str:
    match parameter.kind:
        case Parameter.VAR_POSITIONAL:
            return f"*{parameter.name}"
        case Parameter.VAR_KEYWORD:
            return f"**{parameter.name}"
        case _:
            return parameter.name


def _unknown(name: object) -> tuple[str, str]:
    if not isinstance(name, str):
        return "", "an argument name is not text"
    shown = ascii(name[:_NAME_CHARACTERS_MAX])
    return shown[1:-1], f"there is no parameter {shown}"


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


def payload_bytes(text: str) -> int:
    """Return the size of the text in UTF-8, which is what the payload limits count."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


_NO_ARGS: Ok[Any] = Ok(())
_EMPTY_CALL = Ok(EncodedCall("[]", "{}"))


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
