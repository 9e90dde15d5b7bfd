"""A JSON form: a fixed shape of annotated values, written as JSON text and read back by annotation.

The codec uses one form for positional arguments, one for keyword arguments and one for each side
of a result, at both ends of the line producer -> SQL -> turn -> child -> report -> result. A form
stores only what it can read back unchanged: where the annotations alone do not guarantee that, it
reads the text back before handing it out.
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
    descend,
    equal,
    find_change,
    find_conversion,
    find_first_member,
    find_undumpable,
    find_unstorable,
)
from horsies.codec.shape import Shape, adapter_of, speaks_of_sets, type_text
from horsies.result import Err, Ok, Result

T = TypeVar("T")

_ESCAPED_NUL = "\\u0000"
_SUSPECT_TOKENS = (_ESCAPED_NUL, "NaN", "Infinity")
# What a key with a lone surrogate is silently written with.
_REPLACEMENT_CHARACTER = "\ufffd"
_NOT_FINITE = "input should be a finite number"
_INVALID_TEXT = ("invalid JSON", "input should be a valid string, unable to parse")
_TOO_DEEP = "is nested too deeply or contains itself; give a flatter structure"
# Messages of these come from user code or quote the input.
_TELLTALE_ERRORS = frozenset(
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
_SHOWN_ERRORS = frozenset(get_args(core_schema.ErrorType)) - _TELLTALE_ERRORS


@dataclass(frozen=True, slots=True)
class CodecError:
    """Why a value cannot be stored or read: one sentence with the fix, and the place.

    Neither field holds the value itself. The path is empty when the text as a whole is at fault.
    """

    message: str
    path: str


class TypeMismatch(CodecError):
    """A value to store does not fit its annotation; any other error means it cannot be stored."""

    __slots__ = ()


class JsonForm:
    """Checks, writes and reads values of one shape; its methods return, they never raise.

    Building raises AnnotationProblem, a ValueError, when an annotation has no JSON form.
    """

    __slots__ = ("_check", "_dump", "_open", "_read", "_shape")

    def __init__(self, shape: Shape) -> None:
        adapter = adapter_of(shape)
        self._shape = shape
        self._open = not shape.closed
        self._check = functools.partial(adapter.validator.validate_python, strict=True)
        # By field name on both sides: aliases need not agree between writing and reading. Warnings
        # are off because reading back catches what they warn of, and asking for them costs 2 µs.
        self._dump: Callable[[Any], bytes] = functools.partial(
            adapter.serializer.to_json, by_alias=False, round_trip=True, warnings=False
        )
        if speaks_of_sets(adapter.core_schema):
            self._dump = functools.partial(_dump_in_order, self._dump)
        self._read = functools.partial(
            adapter.validator.validate_json, strict=True, by_alias=False, by_name=True
        )

    def check(self, value: Any) -> Result[Any, CodecError]:
        """Return the value when it fits the annotations as it is, nothing converted."""
        try:
            checked = self._check(value)
        except Exception as error:
            return Err(self._misfit(error, value))
        converted = self._conversion(value, checked)
        return Ok(checked) if converted is None else Err(converted)

    def encode(self, value: Any) -> str | CodecError:
        """Return the JSON text of a value that fits and can be read back unchanged.

        The error is a TypeMismatch exactly where `check` would refuse the value. The return type is a
        union, because a Result around every part costs more than checking a small value.
        """
        try:
            checked = self._check(value)
        except Exception as error:
            return self._misfit(error, value)
        try:
            text = self._dump(checked).decode()
        except Exception as error:
            return self._conversion(value, checked) or self._undumpable(error, checked)
        if self._open or _is_suspect(text) or not equal(value, checked):
            return self._conversion(value, checked) or self._problem(checked, text) or text
        return text

    def decode(self, text: str) -> Result[Any, CodecError]:
        """Return the value that the JSON text holds by annotation."""
        try:
            return Ok(self._read(text))
        except Exception as error:
            return Err(self._unreadable(error, text))

    def _conversion(self, value: Any, checked: Any) -> TypeMismatch | None:
        finding = None if equal(value, checked) else _quietly(find_conversion, value, checked)
        return None if finding is None else _mismatch(self._found(finding))

    def _problem(self, checked: Any, text: str) -> CodecError | None:
        """Return why the text cannot stand for the value, if it cannot."""
        try:
            if any(token in text for token in _SUSPECT_TOKENS):
                # The same letters may be harmless text.
                finding = find_unstorable(checked) or find_unstorable(from_json(text))
                if finding is not None:
                    return self._found(finding)
            back = self._read(text)
            if equal(checked, back):
                return None
            finding = find_unstorable(checked) or find_change(checked, back)
            return None if finding is None else self._found(finding)
        except Exception as error:
            return self._not_restorable(error, checked, text)

    def _misfit(self, error: Exception, value: Any) -> TypeMismatch:
        steps, reason = _first_problem(error, value)
        if reason == _NOT_FINITE and (finding := _quietly(find_unstorable, value)) is not None:
            return _mismatch(self._found(finding))
        steps = steps or self._first_failing(value, self._check)
        clause = f"does not fit {self._declared(steps)} ({reason}); give a value of that very type"
        return _mismatch(self._error(steps, clause))

    def _undumpable(self, error: Exception, checked: Any) -> CodecError:
        finding = _quietly(find_unstorable, checked)
        if finding is not None:
            return self._found(finding)
        clause = _undumpable_clause(error)
        first = self._first_failing(checked, self._dump)
        if clause == _TOO_DEEP:
            return self._error(first, clause)
        member = descend(checked, first[0])[1] if first else checked
        return self._error(first + (_quietly(find_undumpable, member) or ()), clause)

    def _first_failing(self, value: Any, call: Callable[[Any], Any]) -> tuple[Step, ...]:
        """Return the step to the first part that the call fails with, where there are parts."""
        if self._shape.kind == "value":
            return ()
        step = _quietly(find_first_member, value, functools.partial(_succeeds, call))
        return () if step is None else (step,)

    def _not_restorable(self, error: Exception, checked: Any, text: str) -> CodecError:
        finding = _quietly(find_unstorable, checked)
        if finding is not None:
            return self._found(finding)
        steps, reason = _first_problem(error, _quietly(from_json, text))
        steps = steps or self._first_failing(checked, lambda head: self._read(self._dump(head)))
        if "recursion" in reason or isinstance(error, RecursionError):
            return self._error(steps[:1], _TOO_DEEP)
        return self._error(
            steps,
            f"cannot be read back from JSON as {self._declared(steps)} says ({reason}); "
            "make its written form valid input",
        )

    def _unreadable(self, error: Exception, text: str) -> CodecError:
        steps, reason = _first_problem(error, _quietly(from_json, text))
        if not self._shape.place(steps)[0] or reason.startswith(_INVALID_TEXT):
            return CodecError(
                f"The stored text is not the JSON {self._shape.kind} it should be ({reason}); "
                "store only what this library wrote.",
                "",
            )
        return self._error(
            steps,
            f"was stored in a form that does not fit {self._declared(steps)} ({reason}); "
            "keep the annotation compatible with what was stored before",
        )

    def _declared(self, steps: tuple[Step, ...]) -> str:
        part = self._shape.place(steps)[1]
        return "its annotation" if part is None else f"its annotation {type_text(part.annotation)}"

    def _found(self, finding: Finding) -> CodecError:
        return self._error(finding.steps, finding.clause)

    def _error(self, steps: tuple[Step, ...], clause: str) -> CodecError:
        path = self._shape.place(steps)[0]
        return CodecError(f"{path or 'The value'} {clause}.", path)


def _mismatch(error: CodecError) -> TypeMismatch:
    return TypeMismatch(error.message, error.path)


def _dump_in_order(dump: Callable[[Any], bytes], value: Any) -> bytes:
    written = dump(value)
    return _quietly(with_ordered_sets, value, written) or written


def _is_suspect(text: str) -> bool:
    """Tell whether even strict validation leaves a doubt: NUL, long integers, surrogates in keys."""
    return (
        len(text) > INTEGER_DIGITS_MAX
        or _ESCAPED_NUL in text
        or (not text.isascii() and _REPLACEMENT_CHARACTER in text)
    )


def _first_problem(error: Exception, source: Any) -> tuple[tuple[Step, ...], str]:
    """Return the way to the first fault and what is wrong there, without quoting the input."""
    if not isinstance(error, ValidationError):
        return (), f"{type(error).__name__} while validating"
    try:
        return _first_validation_problem(error, source)
    except Exception:
        return (), "a validator refused it"


def _first_validation_problem(error: ValidationError, source: Any) -> tuple[tuple[Step, ...], str]:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, steps = first["type"], _real_steps(first["loc"], source)
    if kind == "missing":
        steps = (*steps, first["loc"][-1])
    if kind not in _SHOWN_ERRORS:
        return steps, "a validator refused it"
    return steps, first["msg"][:1].lower() + first["msg"][1:]


def _real_steps(location: tuple[Step, ...], source: Any) -> tuple[Step, ...]:
    """Drop what pydantic adds to a location to name members of a union and kinds of validators."""
    steps: list[Step] = []
    for step in location:
        found, member = descend(source, step)
        if found:
            source = member
        if found or isinstance(step, int):
            steps.append(step)
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


def _succeeds(call: Callable[[Any], Any], value: Any) -> bool:
    try:
        call(value)
    except Exception:
        return False
    return True


def _quietly(function: Callable[..., T], *values: Any) -> T | None:
    # Finding the place of a fault runs user code that has already failed once.
    try:
        return function(*values)
    except Exception:
        return None
