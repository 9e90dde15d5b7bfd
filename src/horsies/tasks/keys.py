"""Keys of tasks: determines the key of a call and the lane of a key, without I/O. A key identifies the party
for which a task works, such as a tenant. Within a queue, keys take turns, and each key can have its own
limits; ``db/functions/19_keys.sql`` describes the mechanism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple

from horsies.codec.calls import CallSignature
from horsies.task_result import storable_text

LANE_KEY_LENGTH_MAX = 255
# Lane 0 contains the tasks without a key, and the ring of lanes starts at the lowest number.
_NO_LANES = frozenset({0, -(2**63)})


class Lane(NamedTuple):
    """A key, and the number of its lane in a queue."""

    key: str
    number: int


def lane_of(queue_name: str, key: str) -> Lane:
    """Return the lane of a key; horsies_lane_v1 computes the same in the database. Because the
    number is a digest, nobody can craft keys whose hash collisions slow down a worker's dictionaries.
    """
    digest = hashlib.sha256(f"{queue_name}\x1f{key}".encode()).digest()
    number = int.from_bytes(digest[:8], signed=True)
    return Lane(key, 1 if number in _NO_LANES else number)


def lane_key_problem(key: object, source: str = "key") -> str | None:
    """Return the reason why a value cannot be a key, or None; `source` describes the origin of the value."""
    if not isinstance(key, str):
        return f"{source} must be a text, not {type(key).__name__}"
    if not 1 <= len(key) <= LANE_KEY_LENGTH_MAX:
        return f"{source} must have 1 to {LANE_KEY_LENGTH_MAX} characters, not {len(key):,}"
    if storable_text(key) != key:
        return f"{source} contains a NUL character or a lone surrogate; remove it"
    return None


def key_of_task(name: str) -> str:
    """Return the key that all calls of a task share if the task has a rate, or batches, but no other key."""
    return f"task:{name}"


class CallKey(NamedTuple):
    """Return the key of one call, or the reason why it has no key."""

    key: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TaskKey:
    """The source of a call's key: a parameter, a function of the arguments, or the task's name (`fixed`)
    for a task with a rate or batches.
    """

    parameter: str = ""
    position: float = 0.0
    default: Any = Parameter.empty
    function: Callable[..., Any] | None = None
    fixed: str | None = None

    @classmethod
    def of_parameter(
        cls, name: str, function: Callable[..., Any], parameters: CallSignature
    ) -> TaskKey | None:
        """Return the key source for this parameter; None if callers cannot pass the parameter."""
        names = parameters.names
        if name not in names.spots and name not in names.positional:
            return None
        position = names.positional.index(name) if name in names.positional else float("inf")
        return cls(name, position, signature(function).parameters[name].default)

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallKey:
        """Return the key of a call whose arguments fit the function."""
        if self.fixed is not None:
            return CallKey(self.fixed)
        if self.function is not None:
            return self._computed(args, kwargs)
        if self.position < len(args):
            value = args[int(self.position)]
        else:
            value = kwargs.get(self.parameter, self.default)
        problem = lane_key_problem(value, f"parameter {self.parameter!r}, the key,")
        return CallKey(problem=problem) if problem else CallKey(value)

    def _computed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallKey:
        assert self.function is not None
        name = getattr(self.function, "__name__", type(self.function).__name__)
        try:
            key = self.function(*args, **kwargs)
        except Exception as error:  # the application's code may raise any exception
            return CallKey(problem=f"its key function {name} raised {type(error).__name__}")
        problem = lane_key_problem(key, f"the value of its key function {name}")
        return CallKey(problem=problem) if problem else CallKey(key)
