"""Searches in the arguments of tasks: ``order_id=17``, or text that occurs in any argument."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from horsies.db.statements.lookup import FoundTask
from horsies.monitor.queries import SEARCHED_BYTES_MAX, Search

# The placeholder for the value of a secret key.
MASKED = {"masked": True}
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


class Mask(Protocol):
    """Decides which arguments a search must not reveal."""

    def hides(self, key: str) -> bool:
        """Return whether the values of this key are secret."""

    def value(self, stored: Any, names: Sequence[str] = ()) -> Any:
        """Return the stored value, with ``MASKED`` in place of secret values."""


class NoMask:
    """The mask for users who may read the tables: it hides nothing."""

    def hides(self, key: str) -> bool:
        return False

    def value(self, stored: Any, names: Sequence[str] = ()) -> Any:
        return stored


@dataclass(frozen=True, slots=True)
class Argument:
    """A search for arguments: all ``needles`` must occur in the stored text, and then ``matches``
    decides. With a ``path``, the first needle is the path's last key; positional arguments are stored
    without this key.
    """

    needles: tuple[str, ...]
    path: tuple[str, ...]
    wanted: Any

    def among_encrypted(self) -> Argument:
        """Return the search for a database that cannot search stored texts: every task is a candidate."""
        return replace(self, needles=("",))

    def matches(
        self, masking: Mask, args: str | None, kwargs: str | None, names: Sequence[str] = ()
    ) -> bool:
        """Return whether the arguments contain the value; ``names`` are the names of the positional
        parameters.

        Masked values, and arguments that are not JSON, never match.
        """
        try:
            positional = masking.value(json.loads(args or "[]"), names)
            named = masking.value(json.loads(kwargs or "{}"))
        except (ValueError, RecursionError):
            return False
        found = [dict(zip(names, positional, strict=False)), positional, named]
        return self.is_in(found if self.path else found[1:])

    def is_in(self, value: Any) -> bool:
        """Return whether a JSON value contains the wanted value, at any depth."""
        if self.path:
            return any(_equal(one, self.wanted) for one in _values_at(value, self.path))
        return any(self.wanted in text for text in _texts(value))

    @property
    def description(self) -> str:
        """The search without its value, for the record of changes."""
        return f"argument {'.'.join(self.path)}" if self.path else "a text in arguments"


class ArgumentProblem(ValueError):
    """The reason why a search was rejected, as a sentence."""


def parse_argument(text: str, masking: Mask) -> Argument:
    """Parse ``order_id=17``, ``address.city="New York"``, or text that occurs in any argument."""
    text = text.strip()
    if not text or INVISIBLE.search(text):
        raise ArgumentProblem(
            'argument must be a text such as order_id=17, city="New York" or a word.'
        )
    if (found := re.fullmatch(r"([\w.-]+)\s*=\s*(.+)", text, re.DOTALL)) is None:
        return Argument((_escaped(text),), (), text)
    path, written = tuple(found[1].split(".")), found[2]
    for key in path:
        if masking.hides(key):
            raise ArgumentProblem(f"argument {key!r} is masked and cannot be searched.")
    wanted, needle = _wanted(written)
    needles = (f'"{_escaped(path[-1])}"', *([needle] if needle else []))
    return Argument(needles, path, wanted)


def _wanted(written: str) -> tuple[Any, str | None]:
    """Return the wanted value and the text under which it is stored, if that is known."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        value = written
    match value:
        case str():
            return value, _escaped(value)
        case dict() | list():
            return value, None
        case _:
            return value, written


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _values_at(value: Any, path: Sequence[str], above: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield the values whose keys end with the path, at any depth; lists have no keys."""
    if above and above[-len(path) :] == tuple(path):
        yield value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _values_at(part, path, (*above, key))
    elif isinstance(value, list):
        for part in value:
            yield from _values_at(part, path, ())


def _texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for key, part in value.items():
                yield key
                if part is not MASKED:
                    yield from _texts(part)
        case list():
            for part in value:
                yield from _texts(part)
        case str():
            yield value
        case _:
            yield json.dumps(value)


def _equal(one: Any, other: Any) -> bool:
    # In Python True == 1, but a search for 1 must not find true.
    return one is not MASKED and isinstance(one, bool) == isinstance(other, bool) and one == other


def search_for(
    argument: Argument,
    mask: Mask,
    parameters: Mapping[str, Sequence[str]],
    max_bytes: int = SEARCHED_BYTES_MAX,
) -> Search:
    """Return the search for an argument; ``parameters`` are the positional parameters of the known
    tasks.
    """

    def matches(task: FoundTask) -> bool:
        names = parameters.get(task.task_name, ())
        return argument.matches(mask, task.args, task.kwargs, names)

    known = parameters.items() if argument.path else ()
    positional = [name for name, names in known if argument.path[-1] in names]
    key = argument.needles[0]
    needle = argument.needles[-1] if len(argument.needles) > 1 or not argument.path else ""
    return Search(key, needle, matches, positional, max_bytes)
