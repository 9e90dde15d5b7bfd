"""Stored JSON text for display, with the values of secret keys masked.

The text is indented token by token without being parsed, so long numbers, repeated keys and escapes stay
as stored. Text that is not JSON is shown only if no secret key occurs in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from horsies.database_url import mask_url
from horsies.monitor.arguments import INVISIBLE, MASKED

SHOWN_CHARACTERS_MAX = 65_536
MASK = "•••"
MASKED_KEYS = r"pass|secret|token|auth|cookie|card|iban|ssn|key$"

_TOKEN = re.compile(
    r'(?P<space>[ \t\r\n]+)|(?P<string>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")'
    r"|(?P<mark>[][{},:])|(?P<plain>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
    r"|true|false|null|NaN|-?Infinity)"
)
# Matches the time, level and logger at the start of a captured line.
_LOG_PREFIX = re.compile(r"\S+Z [A-Z]+ \S+: ")
# Matches a key and its value in a text: key=value, key: value, "key": "value", Authorization:
# Bearer value.
_PAIR = re.compile(
    r"""(?P<key>[\w.-]+)(?P<sign>["']?\s*[=:]\s*)"""
    r"""(?P<value>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[{\[(].*|(?:(?:Bearer|Basic)\s+)?[^\s,;]+)"""
)
_KINDS = {'"': "string", "t": "boolean", "f": "boolean", "n": "null", "{": "object", "[": "list"}
_CLOSING = {"{": "}", "[": "]"}
# The maximum depth of indentation; otherwise a megabyte of brackets would become a terabyte.
_LEVELS_MAX = 40
# The maximum depth of values to parse, because recursive code could overflow the stack.
_DEPTH_MAX = 100


def visible(text: object) -> str:
    """Return text with control and direction characters made visible, except line ends and tabs."""
    return INVISIBLE.sub(_picture, str(text))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


class NotJson(ValueError):
    """Stored text that is not JSON."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Text to show. ``is_cut`` is True for the beginning of a longer text, ``is_json`` False for text
    that is not JSON.
    """

    text: str
    is_cut: bool = False
    is_json: bool = True


class Masking:
    """Masks the values of secret keys: the keys in ``MASKED_KEYS`` and those that match ``more``. An
    entry of ``more`` matches any key that contains it; an entry with ``*``, which stands for any text,
    matches whole keys.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        words = [MASKED_KEYS, *(_key_pattern(word) for word in more if word)]
        self._secret = re.compile("|".join(words), re.IGNORECASE)

    def hides(self, key: str) -> bool:
        return self._secret.search(key) is not None

    def shown(
        self, text: str, limit: int | None = SHOWN_CHARACTERS_MAX, names: Sequence[str] = ()
    ) -> Shown:
        """Return stored text for display; ``names`` are the keys of a list's items, such as parameter
        names.
        """
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._pieces(text, names):
                pieces.append(piece)
                length += len(piece)
                if limit is not None and length > limit:
                    return Shown(visible("".join(pieces)[:limit]), is_cut=True)
        except NotJson:
            return self._other_text(text, limit)
        return Shown(visible("".join(pieces)))

    def _other_text(self, text: str, limit: int | None) -> Shown:
        # Text with escapes is not shown, because escapes could spell a secret key.
        if self._secret.search(text.replace("\n", " ")) or "\\u" in text:
            return Shown(MASK, is_json=False)
        shown = visible(mask_url(text))
        return Shown(shown[:limit], limit is not None and len(shown) > limit, is_json=False)

    def _pieces(self, text: str, names: Sequence[str]) -> Iterator[str]:
        """Yield the tokens with indentation, and the value of a secret key as a single piece."""
        tokens = _Tokens(text)
        # One entry per open container: its bracket, and the number of items read.
        open_at: list[list[Any]] = []
        yield from self._value(tokens, open_at)
        while open_at:
            bracket, count = open_at[-1]
            symbol = tokens.take()
            if symbol == _CLOSING[bracket]:
                open_at.pop()
                yield (_line(len(open_at)) if count else "") + symbol
                continue
            if count:
                if symbol != ",":
                    raise NotJson
                symbol = tokens.take()
            open_at[-1][1] += 1
            yield ("," if count else "") + _line(len(open_at))
            is_top = len(open_at) == 1
            key = names[count] if bracket == "[" and is_top and count < len(names) else None
            if bracket == "{":
                key = _unquoted(symbol)
                if tokens.take() != ":":
                    raise NotJson
                yield f"{self._string(symbol)}: "
                symbol = tokens.take()
            tokens.put_back(symbol)
            if key is not None and self.hides(key):
                yield f"{MASK} {tokens.skip_value()}"
            else:
                yield from self._value(tokens, open_at)
        tokens.end()

    def _value(self, tokens: _Tokens, open_at: list[list[Any]]) -> Iterator[str]:
        symbol = tokens.take()
        if symbol in _CLOSING:
            open_at.append([symbol, 0])
        elif symbol in "]},:":
            raise NotJson
        yield self._string(symbol) if symbol[0] == '"' else symbol

    def _string(self, symbol: str) -> str:
        if "://" not in symbol and "\\" not in symbol and "pass" not in symbol.casefold():
            return symbol
        value = json.loads(symbol)
        masked = mask_url(value)
        return symbol if masked == value else json.dumps(masked)

    def value(self, stored: Any, names: Sequence[str] = (), level: int = 0) -> Any:
        """Return a parsed value with ``{"masked": true}`` in place of the values of secret keys."""
        if level > _DEPTH_MAX:
            raise NotJson
        match stored:
            case str():
                return mask_url(stored)
            case dict():
                return {
                    key: MASKED if self.hides(key) else self.value(part, (), level + 1)
                    for key, part in stored.items()
                }
            case list():
                hidden = {place for place, name in enumerate(names) if self.hides(name)}
                return [
                    MASKED if place in hidden else self.value(part, (), level + 1)
                    for place, part in enumerate(stored)
                ]
            case _:
                return stored

    def log_lines(self, lines: Iterable[str]) -> list[str]:
        """Return the lines of a log with the values of secret keys masked: ``token=...``."""
        return [visible(mask_url(_without_values(self, line))) for line in lines]

    def stored_value(self, text: str | None, names: Sequence[str] = ()) -> Any:
        """Parse stored text and mask it; return text that is not JSON in its display form."""
        if text is None:
            return None
        try:
            return self.value(json.loads(text), names)
        except (ValueError, RecursionError):
            return self._other_text(text, None).text


def _without_values(masking: Masking, line: str) -> str:
    """Return a log line with the values of secret keys masked; keep the name of its logger."""
    start = found.end() if (found := _LOG_PREFIX.match(line)) else 0

    def replaced(pair: re.Match[str]) -> str:
        return f"{pair['key']}{pair['sign']}{MASK}" if masking.hides(pair["key"]) else pair[0]

    return line[:start] + _PAIR.sub(replaced, line[start:])


def _key_pattern(word: str) -> str:
    if "*" not in word:
        return re.escape(word)
    return f"^{'.*'.join(map(re.escape, word.split('*')))}$"


class _Tokens:
    """Reads the tokens of a JSON text one by one."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0
        self._kept: str | None = None

    def take(self) -> str:
        if (kept := self._kept) is not None:
            self._kept = None
            return kept
        while (found := _TOKEN.match(self._text, self._place)) is not None:
            self._place = found.end()
            if found.lastgroup != "space":
                return found[0]
        raise NotJson

    def put_back(self, symbol: str) -> None:
        self._kept = symbol

    def skip_value(self) -> str:
        """Skip one value and return its type. The contents are not checked, because they are not shown."""
        first = symbol = self.take()
        depth = 0
        while True:
            depth += (symbol in _CLOSING) - (symbol in "]}")
            if depth < 0:
                raise NotJson
            if depth == 0:
                return _KINDS.get(first[0], "number")
            symbol = self.take()

    def end(self) -> None:
        if self._text[self._place :].strip(" \t\r\n"):
            raise NotJson


def _line(level: int) -> str:
    return "\n" + "  " * min(level, _LEVELS_MAX)


def _unquoted(symbol: str) -> str:
    if symbol[0] != '"':
        raise NotJson
    return str(json.loads(symbol))
