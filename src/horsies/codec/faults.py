"""Walks over values: where one that cannot be stored is at fault, and the order of what has none.

The codec at both ends of the line producer -> SQL -> turn -> child -> report -> result lets
pydantic do the work. It looks for a fault only after something went wrong, so those walks may be
slow; they never show a value: a finding names the place, the fault and types. It orders elements
only where an annotation speaks of sets, and keys are sorted only for digests.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic_core import to_json

Step: TypeAlias = int | str

# The JSON reader refuses longer integers, as CPython does by default.
INTEGER_DIGITS_MAX = 4_300
_INTEGER_BOUND = 10**INTEGER_DIGITS_MAX
_DEPTH_MAX = 200
_KEY_CHARACTERS_MAX = 40


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: the way to it from the top value, and a clause that completes `<path> …`."""

    steps: tuple[Step, ...]
    clause: str


def path_text(root: str, steps: Iterable[Step]) -> str:
    """Return the place as one would write it in Python, such as `items[3].price`."""
    return root + "".join(_step_text(step) for step in steps)


def find_unstorable(value: object) -> Finding | None:
    """Find the first number or text inside the value that JSON in PostgreSQL cannot hold."""
    return _unstorable(value, (), set())


def find_undumpable(value: object) -> tuple[Step, ...]:
    """Return the way to the innermost member that cannot be written as JSON by itself."""
    steps: tuple[Step, ...] = ()
    while len(steps) < _DEPTH_MAX:
        faulty = next((pair for pair in _members(value) or () if not _dumpable(pair[1])), None)
        if faulty is None:
            break
        steps, value = (*steps, faulty[0]), faulty[1]
    return steps


def find_first_member(value: Any, works: Callable[[Any], bool]) -> Step | None:
    """Return the step to the first member of a tuple or dict with which it stops working."""
    members: list[tuple[Step, Any]] = list(
        value.items() if isinstance(value, dict) else enumerate(value)
    )
    for count, (step, _) in enumerate(members, start=1):
        head = dict(members[:count]) if isinstance(value, dict) else value[:count]
        if not works(head):
            return step
    return None


def find_conversion(given: object, checked: object, steps: tuple[Step, ...] = ()) -> Finding | None:
    """Find the first object that validation made out of something else.

    Strict validation still makes models out of dicts, named tuples out of lists, and the nearest
    float out of an integer. What an annotation's own validators change is meant to change.
    """
    if given is checked or equal(given, checked):
        return None
    if _is_record(checked) and not isinstance(given, type(checked)):
        return Finding(steps, _conversion_clause(given, checked))
    if isinstance(given, int) and isinstance(checked, float):
        return Finding(steps, "is an integer that a float cannot hold exactly; give a float")
    given_members, members = dict(_members(given) or ()), _members(checked) or ()
    for step, member in members:
        finding = find_conversion(given_members.get(step, member), member, (*steps, step))
        if finding is not None:
            return finding
    return None


def find_change(sent: object, back: object, steps: tuple[Step, ...] = ()) -> Finding | None:
    """Find the first member that reading the stored form would give back changed.

    Equality decides where it can. Where it cannot (types that compare by identity, tuples that come
    back as lists from an untyped place, a clock time that exists twice) the members decide.
    """
    if sent is back or equal(sent, back):
        return None
    if not _comparable(sent, back):
        return None if _harmless(sent, back) else Finding(steps, _changed_clause(sent, back))
    sent_members, back_members = list(_members(sent) or ()), list(_members(back) or ())
    if len(sent_members) != len(back_members):
        return Finding(steps, _lost_clause(sent))
    for (step, member), (other_step, other) in zip(sent_members, back_members, strict=True):
        if isinstance(sent, dict) and step != other_step:
            return Finding((*steps, step), _KEY_CLAUSE)
        finding = find_change(member, other, (*steps, step))
        if finding is not None:
            return finding
    return None


def equal(left: object, right: object) -> bool:
    """Compare; a comparison that fails or answers with something strange counts as unequal."""
    try:
        return bool(left == right)
    except Exception:
        return False


def descend(value: object, step: Step) -> tuple[bool, object]:
    """Take one step into a value; the flag tells whether it leads anywhere."""
    for name, member in _members(value) or ():
        if name == step:
            return True, member
    return False, None


_KEY_CLAUSE = (
    "has a key that is not text and would come back as text; use text keys or annotate the key type"
)
_UNNAMED = "<nameless>"
_NESTING = (list, dict)
_LISTED = (list, tuple, set, frozenset, deque)


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


def _members(value: object) -> Iterator[tuple[Step, object]] | None:
    """Yield the parts of a container with their steps; None for anything that has no parts."""
    if isinstance(value, dict):
        return ((_key_step(key), member) for key, member in value.items())
    if isinstance(value, _LISTED):
        return iter(enumerate(value))
    if isinstance(value, BaseModel):
        return _model_members(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return ((name, getattr(value, name, _UNNAMED)) for name in names)
    return None


def _model_members(model: BaseModel) -> Iterator[tuple[Step, object]]:
    fields = type(model).model_fields
    extra = model.__pydantic_extra__ or {}
    for name, member in {**model.__dict__, **extra}.items():
        # A field its author excluded is not meant to be stored.
        if name not in fields or not fields[name].exclude:
            yield name, member


def _unstorable(value: object, steps: tuple[Step, ...], seen: set[int]) -> Finding | None:
    clause = _leaf_clause(value)
    if clause is not None:
        return Finding(steps, clause)
    members = _members(value)
    if members is None or id(value) in seen or len(steps) > _DEPTH_MAX:
        return None
    seen.add(id(value))
    if isinstance(value, dict):
        for key in value:
            clause = _leaf_clause(key)
            if clause is not None:
                return Finding((*steps, _key_step(key)), f"has a key that {clause}")
    for step, member in members:
        finding = _unstorable(member, (*steps, step), seen)
        if finding is not None:
            return finding
    return None


def _leaf_clause(value: object) -> str | None:
    match value:
        case float() if not math.isfinite(value):
            return "is NaN or infinite, which JSON cannot store; give None or text instead"
        case Decimal() if not value.is_finite():
            return "is a Decimal that is NaN or infinite; give None or text instead"
        case str() if "\x00" in value:
            return "holds a NUL character, which PostgreSQL cannot store; remove it"
        case str() if not _encodable(value):
            return "holds a lone surrogate, which UTF-8 cannot store; replace that character"
        case int() if not -_INTEGER_BOUND < value < _INTEGER_BOUND:
            return f"is an integer of more than {INTEGER_DIGITS_MAX} digits; give it as text"
        case _:
            return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dumpable(value: object) -> bool:
    try:
        to_json(value)
    except Exception:
        return False
    return True


def _comparable(sent: object, back: object) -> bool:
    """Tell whether two values that differ can be compared member by member."""
    if isinstance(sent, dict) and isinstance(back, dict):
        return True
    if type(sent) is tuple and type(back) is list:
        return True
    if type(sent) is not type(back) or isinstance(sent, set | frozenset):
        return False
    return _members(sent) is not None


def _harmless(sent: object, back: object) -> bool:
    if isinstance(sent, BaseException):
        # A TaskError keeps a live exception and stores its description, as it declares.
        return isinstance(back, dict)
    if type(sent) is not type(back):
        return False
    if isinstance(sent, datetime) and isinstance(back, datetime):
        return _same_instant(sent, back)
    return type(sent).__eq__ is object.__eq__


def _same_instant(sent: datetime, back: datetime) -> bool:
    # A time within a clock change never equals the same instant in another zone, by definition of
    # `==`; in UTC both sides are comparable.
    if sent.tzinfo is None or back.tzinfo is None:
        return False
    return sent.astimezone(UTC) == back.astimezone(UTC)


def _is_record(value: object) -> bool:
    return isinstance(value, BaseModel) or (isinstance(value, tuple) and type(value) is not tuple)


def _conversion_clause(given: object, checked: object) -> str:
    return (
        f"is of type {type(given).__name__} where its annotation says {type(checked).__name__}; "
        "give a value of that very type"
    )


def _changed_clause(sent: Any, back: Any) -> str:
    given, returned = type(sent).__name__, type(back).__name__
    if given == returned:
        return f"would come back as {returned} with another value; give a form that JSON keeps"
    return f"is of type {given} and would come back as {returned}; annotate it with its type"


def _lost_clause(sent: object) -> str:
    if isinstance(sent, dict):
        return "has keys that become the same text in JSON; make them distinct as text"
    return "would come back with other members; give a form that JSON keeps"
