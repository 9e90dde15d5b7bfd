"""Compatibility of annotations: decides whether a value of one type may be used where another type is
declared. Annotations are compared when a graph is built, so that a graph with mismatched types is
rejected before it runs. Undecidable cases are accepted, because values are checked again when they are
read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Literal, NewType, TypeVar, Union, get_args, get_origin

from horsies.codec.shape import bare
from horsies.task_result import TaskError, TaskResult

T = TypeVar("T")


class UnknownType(Enum):
    UNKNOWN_TYPE = "unknown"


UNKNOWN_TYPE: Final = UnknownType.UNKNOWN_TYPE


def cached_by_annotation(size: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache a function of annotations; an annotation with an unhashable member bypasses the cache."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        cached = functools.lru_cache(size)(function)

        @functools.wraps(function)
        def call(*annotations: Any) -> T:
            try:
                return cached(*annotations)
            except TypeError:
                return function(*annotations)

        return call

    return decorate


# Cached, because a thousand nodes compare the same few annotations, and each analysis costs 10 µs.
@cached_by_annotation(2_048)
def fits(source: Any, target: Any) -> bool:
    """Return whether every value of the source annotation is valid for the target annotation. Equal
    types fit, and so does ``Any`` on either side, a subclass, a union whose members all fit, and
    any type that fits one member of a union. Parameters of generic types are compared one by one.
    """
    source, target = _plain(source), _plain(target)
    if source is Any or target is Any or target is object or source == target:
        return True
    if _is_union(source):
        return all(fits(branch, target) for branch in get_args(source))
    if _is_union(target):
        return any(fits(source, branch) for branch in get_args(target))
    if get_origin(source) is Literal:
        return _literal_fits(source, target)
    return _class_fits(source, target)


@cached_by_annotation(2_048)
def result_targets(annotation: Any) -> Sequence[Any]:
    """Return the value types of the results that an annotation accepts, if any.

    ``TaskResult[int, TaskError] | None`` yields ``[int]``. A result type with a narrower error type than
    TaskError is left out, because the library may return any error.
    """
    return tuple(value for branch in _branches(annotation) for value in _result_values(branch))


@cached_by_annotation(2_048)
def takes_value(annotation: Any) -> bool:
    """Return whether a parameter takes a node's value rather than its whole TaskResult.

    Without an annotation, or with ``Any``, a parameter takes the whole result.
    """
    return annotation is not None and not any(
        branch is Any or _is_result(branch) for branch in _branches(annotation)
    )


def takes_item_results(annotation: Any) -> bool:
    """Return whether a parameter takes a map's items as results: ``list[TaskResult[...]]``."""
    return any(
        _is_result(bare(one)) for branch in _branches(annotation) for one in get_args(branch)
    )


def admits_none(annotation: Any) -> bool:
    return types.NoneType in _branches(annotation)


def element_type(annotation: Any) -> Any:
    """Return the element type of a list annotation, or UNKNOWN_TYPE for any other annotation."""
    plain = _plain(bare(annotation))
    if plain is Any or plain is list:
        return Any
    if get_origin(plain) is list:
        return get_args(plain)[0]
    return UNKNOWN_TYPE


def _branches(annotation: Any) -> list[Any]:
    plain = _plain(bare(annotation))
    return [_plain(bare(one)) for one in get_args(plain)] if _is_union(plain) else [plain]


def _is_result(branch: Any) -> bool:
    return branch is TaskResult or get_origin(branch) is TaskResult


def _result_values(branch: Any) -> list[Any]:
    if branch is TaskResult:
        return [Any]
    if get_origin(branch) is not TaskResult:
        return []
    value, error = get_args(branch)
    return [value] if fits(TaskError, error) else []


def _plain(annotation: Any) -> Any:
    """Strip metadata, new type names and type variables from an annotation."""
    if annotation is None:
        return types.NoneType
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if isinstance(annotation, NewType):
        return _plain(annotation.__supertype__)
    if isinstance(annotation, TypeVar):
        return Any
    return annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _literal_fits(source: Any, target: Any) -> bool:
    if get_origin(target) is Literal:
        return set(get_args(source)) <= set(get_args(target))
    return all(fits(type(value), target) for value in get_args(source))


def _class_fits(source: Any, target: Any) -> bool:
    source_class, target_class = get_origin(source) or source, get_origin(target) or target
    if not isinstance(source_class, type) or not isinstance(target_class, type):
        return get_origin(target) is not Literal
    if source_class is int and target_class is float:
        return True
    try:
        is_subclass = issubclass(source_class, target_class)
    except TypeError:  # Protocols and typed dictionaries do not support issubclass.
        is_subclass = True
    return is_subclass and _arguments_fit(source, target)


def _arguments_fit(source: Any, target: Any) -> bool:
    given, wanted = get_args(source), get_args(target)
    if not given or not wanted:
        return True
    if get_origin(source) is not tuple:
        return len(given) != len(wanted) or all(map(fits, given, wanted))
    if get_origin(target) is tuple and ... not in wanted:
        return ... not in given and len(given) == len(wanted) and all(map(fits, given, wanted))
    return all(fits(member, wanted[0]) for member in given if member is not ...)
