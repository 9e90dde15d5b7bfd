"""Converts the pages' Mermaid sequence diagrams to SVG at build time. The repository's server renders
Mermaid itself. The site cannot, because its pages load no scripts from other hosts.
"""

from __future__ import annotations

import re

from tools.drawings.canvas import Canvas

COLUMN = 250
ROW = 40
TOP = 60
MARGIN = 110

_PARTICIPANT = re.compile(r"participant (\S+)(?: as (.+))?")
_MESSAGE = re.compile(r"(\S+?)\s*(-{1,2}>>)\s*(\S+?):\s*(.+)")
_NOTE = re.compile(r"Note (?:over|right of|left of) ([^:]+):\s*(.+)")


class CannotDraw(ValueError):
    """A Mermaid text that is not a sequence diagram of messages and notes."""


def drawn(text: str) -> str:
    """Return a sequence diagram as SVG."""
    first, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if first != "sequenceDiagram":
        raise CannotDraw(
            f"The site draws sequence diagrams; this one begins with {first!r}. "
            "Add a drawing to tools/drawings/pictures.py instead."
        )
    names: dict[str, str] = {}
    steps: list[str] = []
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            names[found[1]] = found[2] or found[1]
        else:
            steps.append(line)
            if found := _MESSAGE.fullmatch(line):
                names.setdefault(found[1], found[1])
                names.setdefault(found[3], found[3])
    return _canvas(names, steps).svg()


def _canvas(names: dict[str, str], steps: list[str]) -> Canvas:
    places = {name: MARGIN + COLUMN * number for number, name in enumerate(names)}
    width, height = 2 * MARGIN + COLUMN * (len(names) - 1), TOP + ROW * (len(steps) + 1)
    canvas = Canvas(width, height, "Sequence: " + ", ".join(names.values()))
    for name, x in places.items():
        canvas.rule_line((x, TOP), (x, height - 12))
        canvas.box((x - 75, 12), (150, 40), names[name])
    for number, step in enumerate(steps, 1):
        _step(canvas, places, step, TOP + ROW * number - 8)
    return canvas


def _step(canvas: Canvas, places: dict[str, int], step: str, y: float) -> None:
    if found := _MESSAGE.fullmatch(step):
        start, end = places[found[1]], places[found[3]]
        near = end - 2 if end > start else end + 2
        canvas.arrow([(start, y), (near, y)], found[4], "running", dashed=found[2] == "-->>")
        return
    found = _NOTE.fullmatch(step)
    if found is None:
        raise CannotDraw(f"The site cannot draw this step of a sequence diagram: {step!r}.")
    over = [places[name.strip()] for name in found[1].split(",")]
    text = found[2]
    wide = max(max(over) - min(over) + 40, 7.2 * len(text) + 20)
    limit = max(places.values()) + MARGIN - 4
    left = min(max((max(over) + min(over) - wide) / 2, 4), limit - wide)
    canvas.box((left, y - 20), (wide, 28), text, kind="accent")
