"""The shapes of stored JSON: a value, a list or an object with annotated parts, as pydantic schemas.

Building a schema also determines whether the shape is closed. For values of a closed shape, strict validation
alone guarantees a lossless round trip, so they are not read back after writing.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import CoreSchema, core_schema

from horsies.codec.faults import Step, path_text

_CONFIG = ConfigDict(allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64")
# An object schema does not inherit the surrounding configuration.
_OBJECT_CONFIG = core_schema.CoreConfig(
    allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
)
_TYPE_CHARACTERS_MAX = 100
_PROBLEM_CHARACTERS_MAX = 300
_CLOSED_SCALARS = frozenset({"int", "str", "float", "bool", "none", "bytes", "uuid"})
_CLOSED_KEYS = frozenset({"int", "str", "uuid"})
_CLOSED_CONTAINERS = frozenset({"list", "set", "frozenset", "tuple"})
_NESTED = (dict, list, tuple)
# Matches the prefixes of modules in a type's text. Quoted values of a Literal match first and are left
# unchanged.
_MODULE_PREFIX = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?:[A-Za-z_]\w*\.|<locals>\.)+"""
)


@dataclass(slots=True)
class Part:
    """A named, annotated member of a form.

    `untyped` is set if the annotation leaves the type of some value open, so that only JSON's own types
    survive a round trip; it is None until the schema is built.
    """

    name: str
    annotation: Any
    untyped: bool | None = None


class Place(NamedTuple):
    """A place inside a shape: its path, the path of the enclosing annotated part, and its type."""

    path: str
    owner: str
    type: str
    untyped: bool = True


_NOWHERE = Place("", "", "the annotated type")


def _place(owner: str, part: Part, steps: Iterable[Step]) -> Place:
    return Place(path_text(owner, steps), owner, type_text(part.annotation), bool(part.untyped))


class ValueShape:
    """One JSON value."""

    kind = "value"

    def __init__(self, part: Part) -> None:
        self._part = part
        self.closed = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = _part_schema(self._part, handler)
        self.closed = _is_closed(schema)
        return schema

    def place(self, steps: tuple[Step, ...]) -> Place:
        return _place(self._part.name, self._part, steps)


class ListShape:
    """A JSON list whose members have their own annotations; trailing members may be omitted."""

    kind = "list"

    def __init__(self, parts: Sequence[Part], rest: Part | None) -> None:
        self._parts = tuple(parts)
        self._rest = rest
        self.closed = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schemas = [_part_schema(part, handler) for part in self._parts]
        rest = core_schema.any_schema() if self._rest is None else _part_schema(self._rest, handler)
        self.closed = _all_closed(schemas) and (self._rest is None or _is_closed(rest))
        members = [core_schema.with_default_schema(one, default=_Absent.ABSENT) for one in schemas]
        # pydantic writes a tuple that is shorter than its schema only if the schema has a variadic member.
        items = core_schema.tuple_schema([*members, rest], variadic_item_index=len(schemas))
        present = core_schema.no_info_after_validator_function(_present, items)
        return core_schema.no_info_after_validator_function(tuple, present)

    def place(self, steps: tuple[Step, ...]) -> Place:
        match steps:
            case (int(index), *inner) if index < len(self._parts):
                return _place(self._parts[index].name, self._parts[index], inner)
            case (int(index), *inner) if self._rest is not None:
                owner = path_text(self._rest.name, [index - len(self._parts)])
                return _place(owner, self._rest, inner)
            case _:
                return _NOWHERE


class ObjectShape:
    """A JSON object whose members have their own annotations; any member may be omitted.

    Names outside the parts belong to `rest`. Without `rest`, their values are accepted untyped, and the
    caller must check the names.
    """

    kind = "object"

    def __init__(self, parts: Sequence[Part], rest: Part | None) -> None:
        self._parts: Mapping[str, Part] = {part.name: part for part in parts}
        self._rest = rest
        self.closed = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schemas = {name: _part_schema(part, handler) for name, part in self._parts.items()}
        rest = None if self._rest is None else _part_schema(self._rest, handler)
        self.closed = _all_closed(schemas.values()) and (rest is None or _is_closed(rest))
        return core_schema.typed_dict_schema(
            {
                name: core_schema.typed_dict_field(schema, required=False)
                for name, schema in schemas.items()
            },
            extra_behavior="allow",
            extras_schema=rest,
            config=_OBJECT_CONFIG,
        )

    def place(self, steps: tuple[Step, ...]) -> Place:
        match steps:
            case (str(name), *inner) if name in self._parts:
                return _place(name, self._parts[name], inner)
            case (name, *inner) if self._rest is not None:
                return _place(path_text(self._rest.name, [name]), self._rest, inner)
            case _:
                return _NOWHERE


Shape: TypeAlias = ValueShape | ListShape | ObjectShape


# Before Python 3.12, a class does not record which of its keys are inherited.
OLD_TYPED_DICT = (
    "a typing.TypedDict, which pydantic can read only on Python 3.12 and newer; use "
    "typing_extensions.TypedDict"
)


class AnnotationProblem(ValueError):
    """An annotation has no JSON form."""


def adapter_of(shape: Shape, config: ConfigDict = _CONFIG) -> TypeAdapter[Any]:
    """Return a shape's pydantic adapter; raise AnnotationProblem if pydantic cannot build it."""
    try:
        # The wrapping annotation applies the configuration to types that do not accept a configuration
        # themselves.
        return TypeAdapter(Annotated[Any, shape], config=config)
    except AnnotationProblem:
        raise
    except Exception as error:
        raise AnnotationProblem(
            f"pydantic cannot build its schema: {_first_line(error)}"
        ) from error


@functools.lru_cache(128)  # adapters are cached, because building one takes milliseconds
def complete_adapter_of(shape: Shape) -> TypeAdapter[Any]:
    """Return an adapter that rejects keys a TypedDict does not declare."""
    return adapter_of(shape, ConfigDict(**_CONFIG, extra="forbid"))


def may_hold(
    schema: CoreSchema,
    kinds: Collection[str],
    resolve: Callable[[CoreSchema], CoreSchema] = lambda schema: schema,
) -> bool:
    """Return whether a schema's values may contain values of these kinds of schemas.

    `resolve` follows the references in an incomplete schema.
    """
    pending: list[Any] = [schema]
    seen = set()
    while pending:
        part = pending.pop()
        if type(part) is dict and part.get("type") == "definition-ref":
            part = resolve(part)
        if id(part) in seen:
            continue  # a default may be any object, even one that contains itself
        seen.add(id(part))
        if type(part) is dict and part.get("type") in kinds:
            return True
        inner = part.values() if type(part) is dict else part
        pending += [one for one in inner if type(one) in _NESTED]
    return False


def bare(annotation: Any) -> Any:
    """Return an annotation without metadata, with type aliases replaced by their values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return bare(arguments[0])
    alias = origin or annotation
    # typing and typing_extensions have different classes of this name.
    if type(alias).__name__ != "TypeAliasType":
        return annotation
    value, known = alias.__value__, dict(zip(alias.__type_params__, arguments, strict=False))
    parameters = getattr(value, "__parameters__", ()) if known else ()
    return bare(value[tuple(known[one] for one in parameters)] if parameters else value)


def type_text(annotation: Any) -> str:
    """Return an annotation as short text: class names without their modules."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    text = _MODULE_PREFIX.sub(r"\1", str(annotation))
    return text if len(text) <= _TYPE_CHARACTERS_MAX else f"{text[:_TYPE_CHARACTERS_MAX]}..."


class _Absent(Enum):
    """Marks a list member that is omitted."""

    ABSENT = "absent"


# Returns the list members that are not omitted, without a Python frame, because every call of a task passes
# through it.
_present = functools.partial(filter, functools.partial(operator.is_not, _Absent.ABSENT))


def _part_schema(part: Part, handler: GetCoreSchemaHandler) -> CoreSchema:
    shown = f"{part.name!r} is annotated with {type_text(part.annotation)}"
    try:
        schema = handler.generate_schema(part.annotation)
    except Exception as error:
        if isinstance(error, PydanticUserError) and error.code == "typed-dict-version":
            raise AnnotationProblem(f"{shown}, {OLD_TYPED_DICT}") from error
        raise AnnotationProblem(
            f"{shown}, which cannot be stored{_reason(error)}; use a type that pydantic can write to "
            "JSON, such as a dataclass or a BaseModel"
        ) from error
    while schema["type"] == "default":
        schema = schema["schema"]
    if schema["type"] in ("generator", "callable"):
        raise AnnotationProblem(
            f"{shown}, which cannot be stored; use a list or another plain type"
        )
    if part.untyped is None:
        part.untyped = may_hold(schema, ("any",), handler.resolve_ref_schema)
    return schema


def _reason(error: Exception) -> str:
    # For an unknown class, pydantic's message is about pydantic's own configuration.
    if isinstance(error, PydanticSchemaGenerationError):
        return ""
    return f" ({_first_line(error).rstrip('.')})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_PROBLEM_CHARACTERS_MAX]


def _all_closed(schemas: Iterable[CoreSchema]) -> bool:
    return all(_is_closed(schema) for schema in schemas)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Return whether strict validation alone guarantees that a value survives a round trip unchanged."""
    if "serialization" in schema:
        return False
    kind = schema["type"]
    if kind in _CLOSED_SCALARS:
        return True
    if kind == "nullable":
        return _is_closed(schema["schema"])
    if kind == "dict":
        keys = schema.get("keys_schema", {})
        has_closed_keys = keys.get("type") in _CLOSED_KEYS and "serialization" not in keys
        return has_closed_keys and _is_closed(schema["values_schema"])
    if kind not in _CLOSED_CONTAINERS or "items_schema" not in schema:
        return False
    items = schema["items_schema"]
    return _all_closed(items) if kind == "tuple" else _is_closed(items)
