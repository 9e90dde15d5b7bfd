"""JSON values in canonical order, so that equal calls have equal text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import RootModel
from pydantic_core import from_json, to_json

from horsies.codec.faults import LISTED, members

_NESTING = (list, dict)


def with_ordered_sets(value: object, text: bytes) -> bytes:
    """Return a value as JSON text with the elements of its sets sorted.

    Sets iterate in a different order in every process; the text must not depend on that order.
    """
    return to_json(_in_order(value, from_json(text)))


def canonical(text: str) -> str:
    """Return JSON text written by this library with the keys of all objects sorted. Equal values have equal
    canonical text, regardless of the order of keys in their dicts.
    """
    if text.count('":') < 2:
        return text  # the object has at most one key
    try:
        return to_json(_with_sorted_keys(from_json(text))).decode()
    except ValueError:
        return text  # the JSON is nested too deeply to be read


def _in_order(value: object, written: Any) -> Any:
    """Return a value's written form with the elements of its sets in order.

    The output of a user's own serializer is left unchanged, because its structure may differ.
    """
    while isinstance(value, RootModel):
        value = value.root
    if type(written) is list:
        return _list_in_order(value, written)
    if type(written) is dict:
        for name, member in _written_members(value, written):
            written[name] = _in_order(member, written[name])
    return written


def _list_in_order(value: object, written: list[Any]) -> list[Any]:
    if not isinstance(value, LISTED) or len(value) != len(written):
        return written
    elements = [
        _in_order(member, one) if type(one) in _NESTING else one
        for member, one in zip(value, written, strict=True)
    ]
    return _sorted_elements(elements) if isinstance(value, set | frozenset) else elements


def _written_members(value: object, written: dict[str, Any]) -> Iterable[tuple[str, object]]:
    named = [(str(name), member) for name, member in members(value) or () if name in written]
    # JSON may change the form of a dict's keys, but not their order.
    if isinstance(value, dict) and len(named) < len(value) == len(written):
        return zip(written, value.values(), strict=True)
    return named


def _sorted_elements(elements: list[Any]) -> list[Any]:
    kinds = {type(one) for one in elements}
    if kinds in ({str}, {int}):
        return sorted(elements)
    # 1 and True are equal in Python but have different JSON text.
    return sorted(elements, key=lambda one: to_json(_with_sorted_keys(one)))


def _with_sorted_keys(value: Any) -> Any:
    # A leaf is handled without a call, which would cost more than the rest of the work.
    if type(value) is dict:
        return {
            name: _with_sorted_keys(value[name]) if type(value[name]) in _NESTING else value[name]
            for name in sorted(value)
        }
    if type(value) is list:
        return [_with_sorted_keys(one) if type(one) in _NESTING else one for one in value]
    return value
