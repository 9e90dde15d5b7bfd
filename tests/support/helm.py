"""Renders the chart in deploy/ without Helm. Only the Go template features of the chart are supported;
any other action or function fails the test, so the chart cannot use an untested feature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(
    r"(\s*)\{\{-\s*(.*?)\s*(?:-\}\}(\s*)|\}\})|\{\{\s*(.*?)\s*(?:-\}\}(\s*)|\}\})", re.S
)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\$?[\w.$]+|\(|\)|\|')
_SET = re.compile(r"(\$\w+) := (.*)")
_LOOP = re.compile(r"range (\$\w+), (\$\w+) := (.*)|range (.*)")

Scope = dict[str, Any]
Node = tuple[Any, ...]


class Chart:
    """A chart on disk."""

    def __init__(self, folder: Path) -> None:
        self.values: dict[str, Any] = yaml.safe_load((folder / "values.yaml").read_text("utf-8"))
        self._defined: dict[str, list[Node]] = {}
        for helper in sorted(folder.glob("templates/*.tpl")):
            list(self._parsed(helper.read_text("utf-8")))
        self._templates = {
            path.name: self._parsed(path.read_text("utf-8"))
            for path in sorted(folder.glob("templates/*.yaml"))
        }

    def documents(self, release: str, **changes: Any) -> list[dict[str, Any]]:
        """Return the objects of a release with these changed values, merged as Helm merges them."""
        root = {"Values": merged(self.values, changes), "Release": {"Name": release}}
        scope: Scope = {"$": root, ".": root}
        texts = [self._text(nodes, scope) for nodes in self._templates.values()]
        return [one for text in texts for one in yaml.safe_load_all(text) if one]

    def _parsed(self, text: str) -> list[Node]:
        pieces = _pieces(text)
        nodes, closing = self._block(pieces)
        assert closing is None, closing
        return nodes

    def _block(self, pieces: Iterator[tuple[str, str]]) -> tuple[list[Node], str | None]:
        nodes: list[Node] = []
        for kind, text in pieces:
            if kind == "text":
                nodes.append(("text", text))
            elif text == "end" or text.startswith("else"):
                return nodes, text
            elif text.startswith("define "):
                body, _ = self._block(pieces)
                self._defined[json.loads(text.removeprefix("define "))] = body
            elif text.startswith("range "):
                body, _ = self._block(pieces)
                nodes.append(("range", text, body))
            elif text.startswith("if "):
                body, closing = self._block(pieces)
                other = self._block(pieces)[0] if closing == "else" else []
                nodes.append(("if", text.removeprefix("if "), body, other))
            elif match := _SET.fullmatch(text):
                nodes.append(("set", match[1], match[2]))
            else:
                nodes.append(("value", text))
        return nodes, None

    def _text(self, nodes: Sequence[Node], scope: Scope) -> str:
        parts = []
        for kind, *rest in nodes:
            if kind == "text":
                parts.append(rest[0])
            elif kind == "set":
                scope = {**scope, rest[0]: self._value(rest[1], scope)}
            elif kind == "value":
                parts.append(_shown(self._value(rest[0], scope)))
            elif kind == "if":
                condition, body, other = rest
                parts.append(self._text(body if self._value(condition, scope) else other, scope))
            else:
                parts += [self._text(rest[1], one) for one in self._scopes(rest[0], scope)]
        return "".join(parts)

    def _scopes(self, loop: str, scope: Scope) -> Iterator[Scope]:
        match = _LOOP.fullmatch(loop)
        assert match, loop
        if match[4]:
            yield from ({**scope, ".": one} for one in self._value(match[4], scope))
            return
        for key, value in sorted(self._value(match[3], scope).items()):
            yield {**scope, match[1]: key, match[2]: value, ".": value}

    def _value(self, text: str, scope: Scope) -> Any:
        tokens = _TOKEN.findall(text)
        value = self._pipeline(tokens, scope)
        assert not tokens, f"{text!r} is not understood at {tokens}"
        return value

    def _pipeline(self, tokens: list[str], scope: Scope) -> Any:
        value: Any = None
        is_first = True
        while is_first or (tokens and tokens[0] == "|"):
            if not is_first:
                tokens.pop(0)
            value = self._command(tokens, scope, () if is_first else (value,))
            is_first = False
        return value

    def _command(self, tokens: list[str], scope: Scope, piped: tuple[Any, ...]) -> Any:
        first = tokens.pop(0)
        functions = {**_FUNCTIONS, "include": lambda name, dot: self._include(name, dot)}
        if first not in functions:
            return self._operand(first, tokens, scope)
        arguments = []
        while tokens and tokens[0] not in ("|", ")"):
            arguments.append(self._operand(tokens.pop(0), tokens, scope))
        return functions[first](*arguments, *piped)

    def _operand(self, token: str, tokens: list[str], scope: Scope) -> Any:
        if token == "(":
            value = self._pipeline(tokens, scope)
            assert tokens.pop(0) == ")"
            return value
        if token[0] == '"':
            return json.loads(token)
        if token.isdigit():
            return int(token)
        name, *path = token.split(".") if token != "." else ["."]
        value = scope[name or "."]
        for part in path:
            value = value[part]
        return value

    def _include(self, name: str, dot: Any) -> str:
        return self._text(self._defined[name], {"$": dot, ".": dot})


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into the values; mappings are merged recursively, other values are replaced."""
    found = dict(values)
    for name, change in changes.items():
        old = found.get(name)
        is_deep = isinstance(old, Mapping) and isinstance(change, Mapping)
        found[name] = merged(old, change) if is_deep else change  # type: ignore[arg-type]
    return found


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Split a template into text and actions, without the white space that a dash removes."""
    text = text.replace("\r", "")
    place = 0
    for match in _ACTION.finditer(text):
        before = text[place : match.start()]
        action = match[2] if match[2] is not None else match[4]
        yield "text", before if match[2] is None else before.rstrip()
        yield "action", action
        place = match.end()
    yield "text", text[place:]


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _printf(form: str, *values: Any) -> str:
    return form % values


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "printf": _printf,
    "quote": lambda value: json.dumps(_shown(value)),
    "toJson": lambda value: json.dumps(value),
    "nindent": lambda width, text: "".join(f"\n{' ' * width}{line}" for line in text.splitlines()),
    "add": lambda *values: sum(values),
    "join": lambda glue, values: glue.join(map(str, values)),
    "deepCopy": lambda value: value,  # Functions that do not change a value here.
    "mergeOverwrite": lambda values, changes: merged(values, changes),
    "not": lambda value: not value,
}
