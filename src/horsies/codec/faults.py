"""Walks over values, to locate a fault after pydantic has rejected or changed a value.

A walk runs only after a failure, so it may be slow. A finding never shows the value, only its path, the
fault and the types.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel
from pydantic_core import to_json

Step: TypeAlias = int | str

# The JSON reader rejects longer integers, as CPython does by default.
INTEGER_DIGITS_MAX = 4_300
LISTED = (list, tuple, set, frozenset, deque)

_INTEGER_BOUND = 10**INTEGER_DIGITS_MAX
_DEPTH_MAX = 200
_KEY_CHARACTERS_MAX = 40
_KEY_CLAUSE = (
    "has a key that is not text and would come back as text; use text keys or annotate the key type"
)


class Finding(NamedTuple):
    """A fault: the steps from the top value to the fault, and a clause that follows the path in a message."""

    steps: tuple[Step, ...]
    clause: str


def find_unstorable(
    value: object, steps: tuple[Step, ...] = (), seen: set[int] | None = None
) -> Finding | None:
    """Find the first number, time or text inside the value that JSON in PostgreSQL cannot represent.

    `seen` contains the ids of the containers that were already searched, so that a shared container is
    searched only once.
    """
    seen = set() if seen is None else seen
    clause = _leaf_clause(value)
    if clause is not None:
        return Finding(steps, clause)
    inner = members(value)
    if inner is None or id(value) in seen or len(steps) > _DEPTH_MAX:
        return None
    seen.add(id(value))
    for key in value if isinstance(value, dict) else ():
        clause = _leaf_clause(key)
        if clause is not None:
            return Finding((*steps, _key_step(key)), f"has a key that {clause}")
    found = (find_unstorable(member, (*steps, step), seen) for step, member in inner)
    return next(filter(None, found), None)


def find_undumpable(value: object) -> tuple[Step, ...]:
    """Return the steps to the innermost member that cannot be written as JSON even by itself."""
    steps: tuple[Step, ...] = ()
    while len(steps) < _DEPTH_MAX:
        inner = members(value) or ()
        faulty = next((pair for pair in inner if not succeeds(to_json, pair[1])), None)
        if faulty is None:
            break
        steps, value = (*steps, faulty[0]), faulty[1]
    return steps


def find_first_member(value: Any, works: Callable[[Any], bool]) -> Step | None:
    """Return the step to the first member that makes a tuple or dict fail."""
    pairs: list[tuple[Step, Any]] = list(
        value.items() if isinstance(value, dict) else enumerate(value)
    )
    for count, (step, _) in enumerate(pairs, start=1):
        head = dict(pairs[:count]) if isinstance(value, dict) else value[:count]
        if not works(head):
            return step
    return None


def find_conversion(given: object, checked: object, steps: tuple[Step, ...] = ()) -> Finding | None:
    """Find the first object that validation created from an object of another type.

    Even strict validation turns dicts into models, lists into named tuples, and an integer into the
    nearest float. Changes by the annotation's own validators are intended.
    """
    if given is checked or equal(given, checked):
        return None
    is_record = isinstance(checked, BaseModel) or (
        isinstance(checked, tuple) and type(checked) is not tuple
    )
    if is_record and not isinstance(given, type(checked)):
        return Finding(steps, f"must be {type(checked).__name__}, not {type(given).__name__}")
    if isinstance(given, int) and isinstance(checked, float):
        return Finding(steps, "is an integer that a float cannot hold exactly; give a float")
    given_members = dict(members(given) or ())
    found = (
        find_conversion(given_members.get(step, member), member, (*steps, step))
        for step, member in members(checked) or ()
    )
    return next(filter(None, found), None)


def find_change(
    sent: object,
    back: object,
    is_untyped: Callable[[tuple[Step, ...]], bool],
    steps: tuple[Step, ...] = (),
) -> Finding | None:
    """Find the first member that would differ after it is read back from the stored text. Equal values
    need no closer look. Some values are unequal although nothing was lost, so their members are compared:
    objects that compare by identity, a tuple that was passed as a Sequence and is read back as a list, and a
    clock time that occurs twice.
    """
    if sent is back or equal(sent, back):
        return None
    is_listed = type(sent) is tuple and type(back) is list and not is_untyped(steps)
    if not is_listed and not _comparable(sent, back):
        return None if _harmless(sent, back) else Finding(steps, _changed_clause(sent, back))
    sent_members, back_members = list(members(sent) or ()), list(members(back) or ())
    if len(sent_members) != len(back_members):
        lost = "would come back with other members; give a form that JSON keeps"
        same = "has keys that become the same text in JSON; make them distinct as text"
        is_same = isinstance(sent, dict) and not all(isinstance(key, str) for key in sent)
        return Finding(steps, same if is_same else lost)
    for (step, member), (other_step, other) in zip(sent_members, back_members, strict=True):
        if isinstance(sent, dict) and step != other_step:
            return Finding((*steps, step), _KEY_CLAUSE)
        finding = find_change(member, other, is_untyped, (*steps, step))
        if finding is not None:
            return finding
    return None


def equal(left: object, right: object) -> bool:
    """Compare two values; if the comparison raises or returns a strange object, they count as unequal."""
    try:
        return bool(left == right)
    except Exception:
        return False


def succeeds(call: Callable[[Any], Any], value: Any) -> bool:
    """Return whether the call succeeds instead of raising."""
    try:
        call(value)
    except Exception:
        return False
    return True


def members(value: object) -> Iterator[tuple[Step, object]] | None:
    """Yield a container's members with their steps; None if the value is not a container."""
    if isinstance(value, dict):
        return ((_key_step(key), member) for key, member in value.items())
    if isinstance(value, LISTED):
        return iter(enumerate(value))
    if isinstance(value, BaseModel):
        fields, extra = type(value).model_fields, value.__pydantic_extra__ or {}
        # Fields that the model's author has excluded are not stored.
        excluded = {name for name in fields if fields[name].exclude}
        inner = {**value.__dict__, **extra}
        return ((name, member) for name, member in inner.items() if name not in excluded)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return ((name, getattr(value, name, None)) for name in names)
    return None


def path_text(root: str, steps: Iterable[Step]) -> str:
    """Return the path as it is written in Python, such as `items[3].price`."""
    return root + "".join(map(_step_text, steps))


def _step_text(step: Step) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if step.isidentifier() and step.isascii() and len(step) <= _KEY_CHARACTERS_MAX:
        return f".{step}"
    clipped = step if len(step) <= _KEY_CHARACTERS_MAX else step[:_KEY_CHARACTERS_MAX] + "..."
    return f"[{clipped!a}]"


def _key_step(key: object) -> Step:
    if type(key) in (int, str):
        return key  # type: ignore[return-value]
    return f"<{type(key).__name__} key>"


def _leaf_clause(value: object) -> str | None:
    match value:
        case float() if not math.isfinite(value):
            return "is NaN or infinite, which JSON cannot store; give None or text instead"
        case Decimal() if not value.is_finite():
            return "is a Decimal that is NaN or infinite; give None or text instead"
        case str() if "\x00" in value:
            return "holds a NUL character, which PostgreSQL cannot store; remove it"
        case str() if not succeeds(str.encode, value):
            return "holds a lone surrogate, which UTF-8 cannot store; replace that character"
        case time() if value.tzinfo is not None and value.utcoffset() is None:
            return (
                "is a time in a zone whose offset depends on the date, which JSON cannot keep; give a "
                "datetime, or the time and the name of its zone"
            )
        case int() if not -_INTEGER_BOUND < value < _INTEGER_BOUND:
            return f"is an integer of more than {INTEGER_DIGITS_MAX} digits; give it as text"
        case _:
            return None


def _comparable(sent: object, back: object) -> bool:
    """Return whether two values that differ can be compared member by member."""
    if isinstance(sent, dict) and isinstance(back, dict):
        return True
    if type(sent) is not type(back) or isinstance(sent, set | frozenset):
        return False
    return members(sent) is not None


def _harmless(sent: object, back: object) -> bool:
    if isinstance(sent, BaseException):
        # A TaskError contains a live exception but, by design, stores only its description.
        return isinstance(back, dict)
    if type(sent) is not type(back):
        return False
    if isinstance(sent, datetime) and isinstance(back, datetime):
        # By definition of `==`, a time within a clock change never equals the same instant in another
        # zone; in UTC the two can be compared.
        aware = sent.tzinfo is not None and back.tzinfo is not None
        return aware and sent.astimezone(UTC) == back.astimezone(UTC)
    return type(sent).__eq__ is object.__eq__


def _changed_clause(sent: object, back: object) -> str:
    given, returned = type(sent).__name__, type(back).__name__
    if given == returned:
        return f"would come back as {returned} with another value; give a form that JSON keeps"
    return f"is of type {given} and would come back as {returned}; annotate it with its type"
