"""JsonForm: annotated values of one shape, written as JSON text and read back by annotation.

Positional arguments, keyword arguments and each side of a result have a form. A form stores only values that
are unchanged when they are read back. If the annotations alone do not guarantee this, the form reads the text
back before returning it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import core_schema, from_json

from horsies.codec.canonical import with_ordered_sets
from horsies.codec.faults import (
    INTEGER_DIGITS_MAX,
    Finding,
    Step,
    equal,
    find_change,
    find_conversion,
    find_first_member,
    find_undumpable,
    find_unstorable,
    members,
    succeeds,
)
from horsies.codec.shape import Shape, ValueShape, adapter_of, complete_adapter_of, may_hold
from horsies.encryption import unmarked
from horsies.result import Err, Ok, Result

T = TypeVar("T")

_ESCAPED_NUL = "\\u0000"
_SUSPECT_TOKENS = (_ESCAPED_NUL, "NaN", "Infinity")
# pydantic silently writes this character in place of a lone surrogate in a key.
_REPLACEMENT_CHARACTER = "\ufffd"
_NOT_FINITE = "input should be a finite number"
_INVALID_TEXT = ("invalid JSON", "input should be a valid string, unable to parse")
_TOO_DEEP = "is nested too deeply or contains itself; give a flatter structure"
# The errors whose messages come from user code or quote the input.
_QUOTING_ERRORS = frozenset(
    {
        "assertion_error",
        "bytes_invalid_encoding",
        "datetime_object_invalid",
        "get_attribute_error",
        "iteration_error",
        "mapping_type",
        "timezone_offset",
        "union_tag_invalid",
        "url_parsing",
        "url_syntax_violation",
        "uuid_parsing",
        "value_error",
    }
)
_SHOWN_ERRORS = frozenset(get_args(core_schema.ErrorType)) - _QUOTING_ERRORS


@dataclass(frozen=True, slots=True)
class CodecError:
    """The reason why a value cannot be stored or read: one sentence with the fix, and the path to the
    fault.

    Neither field contains the value itself. The path is empty when the text as a whole is invalid.
    """

    message: str
    path: str


class TypeMismatch(CodecError):
    """A value to store does not fit its annotation; any other CodecError means that it cannot be stored."""

    __slots__ = ()


class JsonForm:
    """Writes and reads values of one shape; its methods never raise.

    The constructor raises AnnotationProblem, a ValueError, if an annotation has no JSON form.
    """

    __slots__ = ("_check", "_converts", "_dump", "_holds_times", "_open", "_read", "_shape")

    def __init__(self, shape: Shape) -> None:
        adapter = adapter_of(shape)
        self._shape = shape
        self._open = not shape.closed
        # For values of closed shapes, strict validation makes only one conversion: an integer where a
        # float is declared.
        self._converts = may_hold(adapter.core_schema, ("float",))
        self._check = functools.partial(adapter.validator.validate_python, strict=True)
        # Fields are written and read by name, because aliases for writing and reading may differ. Warnings
        # are off, because reading back finds the same faults and producing warnings takes 2 µs.
        self._dump: Callable[[Any], bytes] = functools.partial(
            adapter.serializer.to_json, by_alias=False, round_trip=True, warnings=False
        )
        # `==` cannot detect a lost zone: a time in a named zone equals the same time without a zone.
        self._holds_times = may_hold(adapter.core_schema, ("time",))
        # The elements of sets are written in arbitrary order.
        if may_hold(adapter.core_schema, ("set", "frozenset")):
            self._dump = functools.partial(_dump_in_order, self._dump)
        self._read = functools.partial(
            adapter.validator.validate_json, strict=True, by_alias=False, by_name=True
        )

    def encode(self, value: Any) -> str | CodecError:
        """Return a value's JSON text if the value fits and would be read back unchanged.

        The error is a TypeMismatch if and only if the value does not fit. The return type is a union,
        because wrapping every part in a Result costs more than checking a small value.
        """
        try:
            checked = self._check(value)
        except Exception as error:
            return self._misfit(error, value)
        try:
            text = unmarked(self._dump(checked).decode())
        except Exception as error:
            return self._conversion(value, checked) or self._undumpable(error, checked)
        if self._open or _is_suspect(text) or (self._converts and not equal(value, checked)):
            return self._conversion(value, checked) or self._change(checked, text) or text
        return text

    def decode(self, text: str) -> Result[Any, CodecError]:
        """Return the value read from the JSON text according to the annotation."""
        try:
            return Ok(self._read(text))
        except Exception as error:
            return Err(self._unreadable(error, text))

    def _misfit(self, error: Exception, value: Any) -> TypeMismatch:
        steps, reason = _first_problem(error, value)
        if reason == _NOT_FINITE and (finding := _quietly(find_unstorable, value)) is not None:
            return self._mismatch(*finding)
        steps = steps or self._first_failing(value, self._check)
        place = self._shape.place(steps)
        if place.path == place.owner:
            return self._mismatch(steps, f"must be {place.type} ({reason})")
        clause = f"does not fit {place.type}, the type of {place.owner} ({reason})"
        return self._mismatch(steps, clause)

    def _conversion(self, value: Any, checked: Any) -> TypeMismatch | None:
        if equal(value, checked):
            return None
        finding = _quietly(find_conversion, value, checked) or _quietly(self._lost_key, value)
        return None if finding is None else self._mismatch(*finding)

    def _lost_key(self, value: Any) -> Finding | None:
        """Find a key that a TypedDict does not declare, and that validation has therefore dropped."""
        try:
            complete_adapter_of(self._shape).validator.validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            clause = "is a key that its TypedDict does not declare; declare it or leave it out"
            if first["type"] == "extra_forbidden":
                return Finding(_real_steps(first["loc"], value), clause)
        return None

    def _undumpable(self, error: Exception, checked: Any) -> CodecError:
        finding = _quietly(find_unstorable, checked)
        if finding is not None:
            return self._error(*finding)
        clause = _undumpable_clause(error)
        first = self._first_failing(checked, self._dump)
        if clause == _TOO_DEEP:
            return self._error(first, clause)
        member = dict(members(checked) or ()).get(first[0]) if first else checked
        return self._error(first + (_quietly(find_undumpable, member) or ()), clause)

    def _change(self, checked: Any, text: str) -> CodecError | None:
        """Return the error if the text would not be read back as the same value."""
        try:
            if self._holds_times or any(token in text for token in _SUSPECT_TOKENS):
                # The same characters may occur harmlessly inside a plain text.
                finding = find_unstorable(checked) or find_unstorable(from_json(text))
                if finding is not None:
                    return self._error(*finding)
            back = self._read(text)
            if equal(checked, back):
                return None
            finding = find_unstorable(checked) or find_change(checked, back, self._is_untyped)
            return None if finding is None else self._error(*finding)
        except Exception as error:
            return self._not_restorable(error, checked, text)

    def _is_untyped(self, steps: tuple[Step, ...]) -> bool:
        return self._shape.place(steps).untyped

    def _not_restorable(self, error: Exception, checked: Any, text: str) -> CodecError:
        finding = _quietly(find_unstorable, checked)
        if finding is not None:
            return self._error(*finding)
        steps, reason = _first_problem(error, _quietly(from_json, text))
        steps = steps or self._first_failing(checked, lambda head: self._read(self._dump(head)))
        if "recursion" in reason or isinstance(error, RecursionError):
            return self._error(steps[:1], _TOO_DEEP)
        return self._error(
            steps,
            f"cannot be read back from JSON as {self._shape.place(steps).type} ({reason}); "
            "make its written form valid input",
        )

    def _unreadable(self, error: Exception, text: str) -> CodecError:
        steps, reason = _first_problem(error, _quietly(from_json, text))
        place = self._shape.place(steps)
        if not place.path or reason.startswith(_INVALID_TEXT):
            return CodecError(
                f"The stored text is not the expected JSON {self._shape.kind} ({reason}); "
                "store only text that this library wrote.",
                "",
            )
        return self._error(
            steps,
            f"was stored in a form that does not fit {place.type} ({reason}); "
            "keep the annotation compatible with stored values",
        )

    def _first_failing(self, value: Any, call: Callable[[Any], Any]) -> tuple[Step, ...]:
        """Return the step to the first argument that makes the call fail."""
        if isinstance(self._shape, ValueShape):
            return ()
        step = _quietly(find_first_member, value, functools.partial(succeeds, call))
        return () if step is None else (step,)

    def _error(self, steps: tuple[Step, ...], clause: str) -> CodecError:
        path = self._shape.place(steps).path
        return CodecError(f"{path or 'The value'} {clause}.", path)

    def _mismatch(self, steps: tuple[Step, ...], clause: str) -> TypeMismatch:
        error = self._error(steps, clause)
        return TypeMismatch(error.message, error.path)


def _dump_in_order(dump: Callable[[Any], bytes], value: Any) -> bytes:
    written = dump(value)
    return _quietly(with_ordered_sets, value, written) or written


def _is_suspect(text: str) -> bool:
    """Return whether strict validation alone could miss a fault: NUL, long integers, or surrogates in
    keys.
    """
    return (
        len(text) > INTEGER_DIGITS_MAX
        or _ESCAPED_NUL in text
        or (not text.isascii() and _REPLACEMENT_CHARACTER in text)
    )


def _first_problem(error: Exception, source: Any) -> tuple[tuple[Step, ...], str]:
    """Return the steps to the first fault and a description that does not quote the input."""
    if not isinstance(error, ValidationError):
        return (), f"{type(error).__name__} while validating"
    try:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        steps = _real_steps(first["loc"], source)
        if first["type"] == "missing":
            steps = (*steps, first["loc"][-1])
    except Exception:
        return (), "a validator refused it"
    if first["type"] not in _SHOWN_ERRORS:
        return steps, "a validator refused it"
    return steps, first["msg"][:1].lower() + first["msg"][1:]


def _real_steps(location: tuple[Step, ...], source: Any) -> tuple[Step, ...]:
    """Drop the steps that pydantic adds for union members and kinds of validators."""
    steps: list[Step] = []
    for step in location:
        inner = dict(members(source) or ())
        if step in inner or isinstance(step, int):
            steps.append(step)
        source = inner.get(step, source)
    return tuple(steps)


def _undumpable_clause(error: Exception) -> str:
    text = _quietly(str, error) or ""
    if isinstance(error, RecursionError) or "ircular reference" in text or "depth exceeded" in text:
        return _TOO_DEEP
    if "utf-8" in text:
        return (
            "holds bytes that its model writes as UTF-8 text; set ser_json_bytes and "
            "val_json_bytes to 'base64' in the configuration of the model"
        )
    return "holds a value that cannot be written as JSON; convert it or annotate it with its type"


def _quietly(function: Callable[..., T], *values: Any) -> T | None:
    # The search for a fault runs user code that has already failed once and may fail again.
    try:
        return function(*values)
    except Exception:
        return None
