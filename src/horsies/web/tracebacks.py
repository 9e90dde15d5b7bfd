"""Pure functions that split stored tracebacks into frames: the application's frames in full, library
frames folded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from horsies.failure_fingerprint import is_installed

# The maximum number of lines; Python itself shortens only the traceback of a deep recursion.
FRAMES_MAX = 100

_FRAME = re.compile(r'  File "(?P<file>[^"\n]*)", line (?P<line>\d+)(?:, in (?P<function>.*))?')


@dataclass(slots=True)
class Frame:
    """A place in code, with the source lines from the traceback."""

    file: str
    line: int
    function: str
    source: list[str] = field(default_factory=list)

    @property
    def is_library(self) -> bool:
        """Whether the code is installed, or given as a string, instead of written with the application."""
        return self.file != "<string>" and is_installed(self.file)


@dataclass(frozen=True, slots=True)
class Text:
    """A line outside the frames: a heading, or an exception's message."""

    text: str


@dataclass(frozen=True, slots=True)
class Folded:
    """Consecutive library frames."""

    frames: list[Frame]


def read_traceback(stored: str, *, with_messages: bool) -> list[Frame | Text | Folded]:
    """Split a traceback into its parts; without messages, show only the classes of exceptions."""
    parts = [
        part
        for part in _parts(stored)
        if isinstance(part, Frame) or with_messages or part.text.startswith("Traceback ")
    ][: FRAMES_MAX * 3]
    folded: list[Frame | Text | Folded] = []
    for is_library, group in groupby(
        parts, lambda part: isinstance(part, Frame) and part.is_library
    ):
        if is_library:
            folded.append(Folded([part for part in group if isinstance(part, Frame)]))
        else:
            folded.extend(group)
    return folded


def _parts(stored: str) -> Iterator[Frame | Text]:
    frame: Frame | None = None
    for line in stored.splitlines():
        if found := _FRAME.fullmatch(line):
            if frame is not None:
                yield frame
            frame = Frame(found["file"], int(found["line"][:9]), found["function"] or "")
        elif frame is not None and line.startswith("    "):
            frame.source.append(line[4:])
        else:
            if frame is not None:
                yield frame
                frame = None
            if line.strip():
                yield Text(line)
    if frame is not None:
        yield frame
