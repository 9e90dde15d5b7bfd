"""Option values that need no conversion bypass pydantic.

Typer converts every value, even None, with a pydantic adapter, and importing pydantic takes 100 ms. A
typer version that does not call ``get_runtime_param`` is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer

_PLAIN = (str, int, float, bool)


def pass_plain_values(parameters: Iterable[Any]) -> None:
    """Make these parameters convert a value only if it has the wrong type."""
    for parameter in parameters:
        if build := getattr(parameter, "get_runtime_param", None):
            conversion = _Conversion(build)
            parameter.get_runtime_param = conversion.itself


class _Conversion:
    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    def itself(self) -> _Conversion:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        is_single = not param.multiple and param.nargs == 1
        kind = param.type_descriptor.annotation
        if is_single and (value is None or (kind in _PLAIN and type(value) is kind)):
            return value
        if not is_single and kind == list[str]:
            return list(value or ())
        try:
            return self._build().coerce(value, param=param, ctx=ctx)
        except typer.BadParameter as error:
            wanted = _number(kind, param.type_descriptor.parameter_info)
            error.message = error.message.removeprefix("Value error, ")  # pydantic's wording
            error.message = f"{value!r} is not {wanted}." if wanted else error.message
            raise


def _number(kind: object, limits: Any) -> str | None:
    """Describe the numbers that an option accepts; return None if the option is not numeric."""
    noun = "a whole number" if kind is int else "a number" if kind is float else None
    if noun is None or limits.min is None:
        return noun
    if limits.max is None:
        return f"{noun} of at least {limits.min:,}"
    return f"{noun} from {limits.min:,} to {limits.max:,}"
