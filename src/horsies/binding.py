"""Binding: whether a function can be called with these many positional arguments and these names.

At both ends of the line producer -> SQL -> turn -> child -> report -> result a call must fit the
signature before its values matter. inspect.Signature.bind answers the same question in several
times the time and with an exception.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

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
