"""Styled text and tables for a terminal of any width.

It replaces rich, which took 40 ms to import and was used only for tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_WORD = re.compile(r"\s*\S+\s*")
_GAP = "  "
# The minimum width of a column that takes the remaining width.
_FLEXIBLE_WIDTH_MIN = 8

Align = Literal["left", "right", "fold"]


class Text:
    """Text whose parts have styles such as ``bold red``; it is wrapped between words unless ``no_wrap``
    is set.
    """

    __slots__ = ("_parts", "no_wrap", "plain")

    def __init__(self, plain: str = "", style: str = "", *, no_wrap: bool = False) -> None:
        self.plain = plain
        self.no_wrap = no_wrap
        self._parts = [(len(plain), style)]

    def append(self, plain: str, style: str = "") -> Text:
        self.plain += plain
        self._parts.append((len(plain), style))
        return self

    def append_text(self, other: Text) -> Text:
        self.plain += other.plain
        self._parts += other._parts
        return self

    def lines(self, width: int) -> list[Text]:
        """Return the text's lines, wrapped for a column of this width."""
        cut, start = [], 0
        for line in self.plain.split("\n"):
            breaks = [] if self.no_wrap else _breaks(line, width)
            for begin, end in zip([0, *breaks], [*breaks, len(line)], strict=True):
                kept = line[begin:end] if self.no_wrap else line[begin:end].rstrip()
                cut.append(self._slice(start + begin, start + begin + len(kept)))
            start += len(line) + 1
        return cut

    def _slice(self, start: int, end: int) -> Text:
        found, offset = Text(), 0
        for length, style in self._parts:
            piece = self.plain[max(start, offset) : min(end, offset + length)]
            if piece:
                found.append(piece, style)
            offset += length
        return found

    def painted(self) -> str:
        """Return the text with its styles' escape sequences."""
        painted, offset = "", 0
        for length, style in self._parts:
            piece, offset = self.plain[offset : offset + length], offset + length
            codes = ";".join(_CODES[word] for word in style.split())
            painted += f"\x1b[{codes}m{piece}\x1b[0m" if codes and piece else piece
        return painted


class Table:
    """Rows of cells without a frame. A column is aligned left or right, or takes the remaining width."""

    def __init__(
        self,
        aligns: Sequence[Align],
        titles: Sequence[str] = (),
        styles: Sequence[str] = (),
        gap: str = _GAP,
    ) -> None:
        self._aligns = aligns
        self._gap = gap
        self._styles = styles or [""] * len(aligns)
        self._rows = [[Text(title, "bold") for title in titles]] if titles else []

    def add_row(self, *cells: Text | str) -> None:
        styled = zip(cells, self._styles, strict=True)
        self._rows.append(
            [Text(cell, style) if isinstance(cell, str) else cell for cell, style in styled]
        )

    def lines(self, width: int) -> Iterator[Text]:
        widths = self._widths(width)
        for row in self._rows:
            cells = [cell.lines(width) for cell, width in zip(row, widths, strict=True)]
            for number in range(max(map(len, cells))):
                line = Text()
                for cell, align, column in zip(cells, self._aligns, widths, strict=True):
                    text = cell[number] if number < len(cell) else Text()
                    blank = " " * (column - _cells(text.plain))
                    line.append(blank if align == "right" else "").append_text(text)
                    line.append(self._gap if align == "right" else blank + self._gap)
                yield line

    def _widths(self, width: int) -> list[int]:
        columns = list(zip(*self._rows, strict=True))
        widths = [
            max(_cells(line) for cell in column for line in cell.plain.split("\n"))
            for column in columns
        ]
        rest = width - sum(
            len(self._gap) + used
            for used, align in zip(widths, self._aligns, strict=True)
            if align != "fold"
        )
        return [
            min(used, max(rest, _FLEXIBLE_WIDTH_MIN)) if align == "fold" else used
            for used, align in zip(widths, self._aligns, strict=True)
        ]


def _breaks(line: str, width: int) -> list[int]:
    """Return where a line is broken: before a word that does not fit, and inside a word wider than a line."""
    breaks: list[int] = []
    used = 0
    if _cells(line) <= width:
        return breaks
    for word in _WORD.finditer(line):
        length = _cells(word[0].rstrip())
        if used + length <= width:
            used += _cells(word[0])
        elif length > width:
            starts = _folds(word[0], width)
            breaks += [word.start() + start for start in starts if word.start() + start]
            used = _cells(word[0][starts[-1] :])
        else:
            breaks.append(word.start())
            used = _cells(word[0])
    return breaks


def _folds(word: str, width: int) -> list[int]:
    """Return where the pieces of a word begin, each as wide as a line."""
    starts, used = [0], 0
    for position, character in enumerate(word):
        cells = _cells(character)
        if used + cells > width:
            starts.append(position)
            used = 0
        used += cells
    return starts


def _cells(text: str) -> int:
    """Return the width in a terminal, where East Asian characters take two cells."""
    if text.isascii():
        return len(text)
    import unicodedata  # The slow count is needed only for text outside ASCII.

    return sum(
        0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in text
    )
