"""LOCATOR is the last argument of a command, even if optional arguments before it are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Matches module:app, path/file.py:app and path/file.py, with an optional NAME= prefix. No JSON
# value matches.
_FORM = re.compile(r"""[^\s"'{}\[\],]+(?::[A-Za-z_]\w*|\.py)""")


def read_locator_last(parser: Any, parameters: Iterable[Any]) -> Any:
    """Make a command's parser accept a locator in place of an omitted optional argument."""
    parse = parser.parse_args

    def parse_args(args: list[str]) -> Any:
        values, *others = parse(args)
        _move_locator(parameters, values)
        return values, *others

    parser.parse_args = parse_args
    return parser


def _move_locator(parameters: Iterable[Any], values: dict[str, Any]) -> None:
    names = [one for one in parameters if one.param_type_name == "argument"]
    locator = names.pop() if names else None
    given = [one for one in names if isinstance(values.get(one.name), str)]
    if locator is None or not given or given[-1].required:
        return
    found = values.get(locator.name) or ()
    if locator.name == "locators" and _FORM.fullmatch(values[given[-1].name]):
        values["locators"] = (values.pop(given[-1].name), *found)
    elif locator.name == "locator" and not found and _FORM.fullmatch(values[given[-1].name]):
        values["locator"] = values.pop(given[-1].name)


def name_before_locator(name: str | None, locator: str | None) -> tuple[str | None, str | None]:
    """Return a command's required name and its locator; the name may look like a locator itself."""
    return (locator, None) if name is None else (name, locator)
