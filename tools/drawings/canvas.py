"""Boxes, arrows and words on an SVG canvas."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LIGHT = {
    "ink": "#1d1e20",
    "muted": "#5d6067",
    "line": "#b9b4aa",
    "card": "#ffffff",
    "raised": "#f1efea",
    "accent": "#7d4322",
    "accent-ground": "#f6ebe3",
    "ok": "#1b6e44",
    "ok-ground": "#e6f4ec",
    "failed": "#b3261e",
    "failed-ground": "#fcebe9",
    "running": "#1a5fa0",
    "running-ground": "#e6f0f9",
}
DARK = {
    "ink": "#e6e6e3",
    "muted": "#a3a7ae",
    "line": "#5a5e66",
    "card": "#1d1f23",
    "raised": "#26292e",
    "accent": "#e3a57f",
    "accent-ground": "#37271d",
    "ok": "#6fcf97",
    "ok-ground": "#17301f",
    "failed": "#ff8f85",
    "failed-ground": "#3a1e1c",
    "running": "#7fb8f0",
    "running-ground": "#182c40",
}
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', Menlo, Consolas, monospace"
LINE_HEIGHT = 18

Point = tuple[float, float]


def colours(selector: str, palette: dict[str, str]) -> str:
    """Return the rule that gives a palette to the drawings matched by a selector."""
    return f"{selector}{{{''.join(f'--{name}:{value};' for name, value in palette.items())}}}"


STYLE = (
    colours("svg.drawing", LIGHT)
    + f"@media (prefers-color-scheme:dark){{{colours('svg.drawing', DARK)}}}"
    + f"svg.drawing text{{font-family:{SANS};font-size:14px;fill:var(--ink)}}"
    + f"svg.drawing .code{{font-family:{MONO};font-size:13px}}"
    + "svg.drawing .title{font-weight:650}svg.drawing .muted{fill:var(--muted);font-size:13px}"
)


class Canvas:
    """Collects shapes; ``svg`` returns the drawing."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._shapes: list[str] = []
        self._style = STYLE

    def rule(self, text: str) -> None:
        """Add a rule to the style sheet of this drawing."""
        self._style += text

    def raw(self, shape: str) -> None:
        """Add a shape as SVG."""
        self._shapes.append(shape)

    def words(
        self,
        at: Point,
        text: str,
        kind: str = "",
        anchor: str = "middle",
        colour: str = "",
    ) -> None:
        """Write one line of text around, after or before a point."""
        paint = f' style="fill:var(--{colour})"' if colour else ""
        css = f' class="{kind}"' if kind else ""
        self.raw(
            f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}"{css}{paint}>{escape(text)}</text>'
        )

    def box(
        self,
        at: Point,
        size: Point,
        title: str,
        lines: Sequence[str] = (),
        kind: str = "",
        *,
        code: bool = False,
        dashed: bool = False,
    ) -> None:
        """Draw a box with a title and lines below it, all centred."""
        (x, y), (width, height) = at, size
        fill = f"var(--{kind}-ground)" if kind else "var(--card)"
        stroke = f"var(--{kind})" if kind else "var(--line)"
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.raw(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" '
            f'style="fill:{fill};stroke:{stroke};stroke-width:1.5"{dash}/>'
        )
        below = LINE_HEIGHT * len(lines)
        baseline = y + (height - below) / 2 + 5
        self.words((x + width / 2, baseline), title, "title code" if code else "title")
        for number, line in enumerate(lines, 1):
            self.words((x + width / 2, baseline + LINE_HEIGHT * number), line, "muted")

    def frame(self, at: Point, size: Point, title: str) -> None:
        """Draw a large box with its title at the top, for boxes inside."""
        (x, y), (width, height) = at, size
        self.raw(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="12" '
            'style="fill:var(--raised);stroke:var(--line)"/>'
        )
        self.words((x + width / 2, y + 24), title, "title")

    def arrow(
        self,
        points: Sequence[Point],
        label: str = "",
        kind: str = "muted",
        *,
        at: Point | None = None,
        anchor: str = "middle",
        dashed: bool = False,
        code: bool = False,
    ) -> None:
        """Draw an arrow along points, with a label at a point or above its middle."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.raw(
            f'<polyline points="{path}" style="fill:none;stroke:var(--{kind});stroke-width:1.6"{dash}/>'
        )
        self.raw(_head(points[-2], points[-1], kind))
        if label:
            (x, y), (to_x, to_y) = points[0], points[-1]
            place = at or ((x + to_x) / 2, (y + to_y) / 2 - 7)
            self.words(place, label, "code" if code else "muted", anchor, kind)

    def rule_line(self, start: Point, end: Point, kind: str = "line", width: float = 1.5) -> None:
        """Draw a plain line."""
        self.raw(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'style="stroke:var(--{kind});stroke-width:{width:g}"/>'
        )

    def svg(self) -> str:
        """Return the drawing as a complete file."""
        width, height = self._size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" aria-label="{escape(self._title)}">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{self._style}</style>",
                *self._shapes,
                "</svg>\n",
            ]
        )


def _head(before: Point, tip: Point, kind: str) -> str:
    (x, y), (to_x, to_y) = before, tip
    length = max(((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5, 1e-9)
    dx, dy = (to_x - x) / length * 9, (to_y - y) / length * 9
    left = to_x - dx - dy / 2.2, to_y - dy + dx / 2.2
    right = to_x - dx + dy / 2.2, to_y - dy - dx / 2.2
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in (tip, left, right))
    return f'<polygon points="{corners}" style="fill:var(--{kind})"/>'
