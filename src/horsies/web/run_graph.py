"""Pure functions that draw a run's graph as SVG, from the layout's positions and the nodes' facts. A
status affects classes and words, never coordinates. All text is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from horsies.web.layout import BOX_HEIGHT, BOX_WIDTH, EDGE_END, Edge, Layout, Point
from horsies.web.words import cut
from horsies.workflow.run.draw import SYMBOLS

# The width of a letter in a wide font, in pixels.
NAME_LENGTH_MAX = 22
_NOTE_LENGTH_MAX = 25
_ERROR_LENGTH_MAX = 20
_OPEN_LENGTH = 4
_BAR_WIDTH = BOX_WIDTH - 24
STATUS_CLASSES: Mapping[str, str] = {
    "COMPLETED": "status-ok",
    "FAILED": "status-failed",
    "SKIPPED": "status-off",
    "RUNNING": "status-running",
    "PAUSED": "status-paused",
    "ENQUEUED": "status-waiting",
    "READY": "status-waiting",
    "PENDING": "status-off",
}


@dataclass(frozen=True, slots=True)
class Shares:
    """The numbers of all, ended and failed nodes in a box."""

    total: int
    ended: int
    bad: int


@dataclass(frozen=True, slots=True)
class Node:
    """The text of one box. ``key`` identifies the box in live updates; ``href`` selects it;
    ``open_href`` opens its child run. ``summary`` is the sentence for screen readers.
    """

    key: str
    status: str
    name: str
    summary: str
    href: str
    note: str = ""
    time: str = ""
    error: str = ""
    join: str = ""
    shares: Shares | None = None
    open_href: str = ""
    is_group: bool = False
    is_selected: bool = False
    is_critical: bool = False
    # The key of the previous node on the critical path.
    critical_source: str = ""


def draw_graph(layout: Layout, nodes: Sequence[Node], title: str, description: str) -> Markup:
    """Return the drawing of a graph; ``nodes`` are in the order of the layout's boxes."""
    # The width may slightly exceed the screen: the browser shrinks the drawing to a readable size.
    size = " is-snug" if 900 < layout.width < 1_600 else ""
    parts = [
        Markup(
            '<svg class="graph{4}" role="group" aria-labelledby="graph-title graph-desc" '
            'width="{0}" height="{1}" viewBox="0 0 {0} {1}">'
            '<title id="graph-title">{2}</title><desc id="graph-desc">{3}</desc>'
        ).format(layout.width, layout.height, title, description, size),
        *(_edge(edge, nodes) for edge in layout.edges),
        *(_tip(layout, target) for target in sorted({edge.target for edge in layout.edges})),
        *(_node(node, box.x, box.y) for node, box in zip(nodes, layout.boxes, strict=True)),
        Markup("</svg>"),
    ]
    return Markup("").join(parts)


def _edge(edge: Edge, nodes: Sequence[Node]) -> Markup:
    source, target = nodes[edge.source], nodes[edge.target]
    kind = " critical" if target.critical_source == source.key else ""
    kind += " passed" if source.status in ("COMPLETED", "SKIPPED", "FAILED") else ""
    return Markup('<path class="edge{}" data-key="e{}-{}" d="{}"/>').format(
        kind, source.key, target.key, edge_path(edge.points)
    )


def edge_path(points: Sequence[Point]) -> str:
    """Return an edge's path data: curves between the layers, lines across them."""
    (x, y), *_ = points
    parts = [f"M{x} {y}"]
    pairs = list(zip(points[::2], points[1::2], strict=True))
    for number, ((left, start), (right, end)) in enumerate(pairs):
        if number:
            parts.append(f"H{left}")
        # The last part before the target is straight, so edges to the same node share it.
        stop = right - EDGE_END if number == len(pairs) - 1 else right
        middle = (left + stop) // 2
        parts.append(f"C{middle} {start} {middle} {end} {stop} {end}")
    parts.append(f"H{points[-1][0]}")
    return "".join(parts)


def _tip(layout: Layout, target: int) -> Markup:
    box = layout.boxes[target]
    return Markup('<path class="tip" d="M{} {}l8 4-8 4z"/>').format(
        box.x - 8, box.y + BOX_HEIGHT // 2 - 4
    )


def _node(node: Node, x: int, y: int) -> Markup:
    marks = ("group", node.is_group), ("selected", node.is_selected), ("critical", node.is_critical)
    classes = ["node", STATUS_CLASSES.get(node.status, "status-off")]
    classes += [word for word, is_set in marks if is_set]
    return Markup(
        '<g class="{}" data-key="n{}" transform="translate({} {})"><a href="{}"{}>{}</a>{}</g>'
    ).format(
        " ".join(classes),
        node.key,
        x,
        y,
        node.href,
        Markup(' aria-current="true"') if node.is_selected else "",
        Markup("").join(_box(node)),
        Markup("").join(_beside(node)),
    )


def _box(node: Node) -> Iterator[Markup]:
    yield Markup("<title>{}</title>").format(node.summary)
    if node.is_group:
        yield Markup('<rect class="behind" x="4" y="4" width="{}" height="{}" rx="6"/>').format(
            BOX_WIDTH, BOX_HEIGHT
        )
    yield Markup('<rect class="box" width="{}" height="{}" rx="6"/>').format(BOX_WIDTH, BOX_HEIGHT)
    yield Markup('<text class="sign" x="17" y="20">{}</text>').format(
        SYMBOLS.statuses.get(node.status, "?")
    )
    room = NAME_LENGTH_MAX - (_OPEN_LENGTH if node.open_href else 0)
    yield Markup('<text class="name" x="28" y="20">{}</text>').format(cut(node.name, room))
    note, most = (node.error, _ERROR_LENGTH_MAX) if node.error else (node.note, _NOTE_LENGTH_MAX)
    time = "" if node.error and len(node.error) + len(node.time) > most else node.time
    if note:
        yield Markup('<text class="{}" x="28" y="36">{}</text>').format(
            "error" if node.error else "note", cut(note, most - len(time))
        )
    if time:
        yield Markup('<text class="time" x="{}" y="36">{}</text>').format(BOX_WIDTH - 10, time)
    if node.shares is not None:
        yield from _bar(node.shares, 12, 41, _BAR_WIDTH, 3)


def _bar(shares: Shares, x: int, y: int, width: int, height: int) -> Iterator[Markup]:
    ended, bad = (min(part / max(shares.total, 1), 1.0) for part in (shares.ended, shares.bad))
    # Even a single failure among thousands gets a visible share.
    red = min(max(bad * width, 2.0), ended * width) if bad else 0.0
    parts = ("track", x, width), ("ended", x, ended * width), ("bad", x + ended * width - red, red)
    form = Markup('<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>')
    for kind, left, length in parts:
        yield form.format(kind, left, y, length, height)


def progress_bar(total: int, ended: int, bad: int) -> Markup:
    """Return a bar of ended nodes; its last part shows failed nodes."""
    words = f"{ended:,} of {total:,} ended" + (f", {bad:,} failed" if bad else "")
    return Markup(
        '<svg class="share" role="img" aria-label="{}" viewBox="0 0 200 6" '
        'preserveAspectRatio="none">{}</svg>'
    ).format(words, Markup("").join(_bar(Shares(total, ended, bad), 0, 0, 200, 6)))


def _beside(node: Node) -> Iterator[Markup]:
    if node.join:
        yield Markup('<text class="join" x="-2" y="-6">{}</text>').format(node.join)
    if node.open_href:
        yield Markup(
            '<a class="open" href="{}"><title>{}</title>'
            '<rect x="{}" y="6" width="22" height="20" rx="4"/>'
            '<text x="{}" y="20">↗</text></a>'
        ).format(node.open_href, f"Open the run of {node.name}", BOX_WIDTH - 28, BOX_WIDTH - 17)
