"""Pure functions that draw a run's timeline: one bar per node on a time scale, and the critical path. A
thin line shows a node's wait after it was enqueued, a bar shows its run, and a notch shows a failed
attempt. Long idle stretches are folded to a gap that shows their length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from horsies.web.run_graph import STATUS_CLASSES
from horsies.web.words import cut
from horsies.words import elapsed
from horsies.workflow.run.draw import SYMBOLS

# An idle stretch is folded if it exceeds both limits: in seconds, and as a share of the drawing.
IDLE_SECONDS = 60.0
IDLE_SHARE = 0.2
GAP_WIDTH = 56
LABEL_WIDTH, SCALE_WIDTH, ROW_HEIGHT, HEAD_HEIGHT = 200, 700, 26, 28
_TICKS = 6
_STEPS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
    *(1_200, 1_800, 3_600, 7_200, 14_400, 28_800, 43_200, 86_400, 172_800, 604_800),
)


@dataclass(frozen=True, slots=True)
class Span:
    """One node's times in seconds since the start of the run; None for times not reached."""

    name: str
    status: str
    enqueued: float | None
    started: float | None
    ended: float | None
    dependencies: tuple[int, ...] = ()
    failures: tuple[float, ...] = ()
    href: str = ""

    @property
    def begin(self) -> float | None:
        """The time when the node was enqueued, or started if it was not enqueued."""
        return self.started if self.enqueued is None else self.enqueued


@dataclass(frozen=True, slots=True)
class Gap:
    """A folded stretch of time."""

    start: float
    end: float


def seconds_since(start: datetime, at: datetime | None) -> float | None:
    return None if at is None else max((at - start).total_seconds(), 0.0)


def critical_path(spans: Sequence[Span]) -> list[int]:
    """Return the chain of nodes that determined when the run ended, first node first. It is traced back
    from the node that ended last. The predecessor of a node is its dependency that ended last before the
    node was enqueued.
    """
    ended = [place for place, span in enumerate(spans) if span.ended is not None]
    if not ended:
        return []
    path = [max(ended, key=lambda place: spans[place].ended or 0.0)]
    while (before := _released_by(spans, spans[path[-1]])) is not None:
        path.append(before)
    return path[::-1]


def _released_by(spans: Sequence[Span], span: Span) -> int | None:
    done = [place for place in span.dependencies if spans[place].ended is not None]
    begin = span.begin
    # A join of type any or quorum starts before its remaining dependencies end.
    in_time = [place for place in done if begin is None or (spans[place].ended or 0.0) <= begin]
    return max(in_time or done, key=lambda place: spans[place].ended or 0.0, default=None)


def idle_gaps(spans: Sequence[Span], until: float) -> list[Gap]:
    """Return the stretches to fold: no node runs in them, and they are long enough in seconds and in the
    drawing.
    """
    idle = list(_idle(spans, until))
    gaps: list[Gap] = []
    shown = until
    for gap in sorted(idle, key=lambda gap: (gap.start - gap.end, gap.start)):
        length = gap.end - gap.start
        if length <= IDLE_SECONDS or length <= IDLE_SHARE * shown:
            break
        gaps.append(gap)
        shown -= length
    return sorted(gaps, key=lambda gap: gap.start)


def _idle(spans: Sequence[Span], until: float) -> Iterator[Gap]:
    busy = sorted(
        (span.started, until if span.ended is None else span.ended)
        for span in spans
        if span.started is not None
    )
    reached = 0.0
    for start, end in busy:
        if start > reached:
            yield Gap(reached, start)
        reached = max(reached, end)
    if until > reached:
        yield Gap(reached, until)


class Scale:
    """Converts seconds to pixels: linear, except for folded gaps of a fixed width."""

    def __init__(self, until: float, gaps: Sequence[Gap]) -> None:
        self.until, self.gaps = until, gaps
        folded = sum(gap.end - gap.start for gap in gaps)
        room = SCALE_WIDTH - GAP_WIDTH * len(gaps)
        self.rate = room / max(until - folded, 0.001)
        self._starts = [gap.start for gap in gaps]

    def x(self, at: float) -> float:
        before = self.gaps[: bisect_right(self._starts, at)]
        inside = sum(min(at, gap.end) - gap.start for gap in before)
        width = sum(
            GAP_WIDTH * (min(at, gap.end) - gap.start) / (gap.end - gap.start) for gap in before
        )
        return LABEL_WIDTH + (at - inside) * self.rate + width

    def ticks(self) -> list[float]:
        """Return round times that are not in a gap."""
        shown = SCALE_WIDTH / self.rate / _TICKS
        step = next((step for step in _STEPS if step >= shown), shown)
        count = int(self.until / step)
        every = [number * step for number in range(min(count, 1_000) + 1)]
        return [at for at in every if not any(gap.start < at < gap.end for gap in self.gaps)]


def draw_timeline(spans: Sequence[Span], path: frozenset[int], until: float, title: str) -> Markup:
    """Return the timeline of these nodes, with the critical path marked."""
    until = max(until, 0.001)
    scale = Scale(until, idle_gaps(spans, until))
    width = LABEL_WIDTH + SCALE_WIDTH + 12
    height = HEAD_HEIGHT + ROW_HEIGHT * len(spans) + 8
    head = Markup(
        '<svg class="timeline" role="group" aria-labelledby="timeline-title" '
        'width="{0}" height="{1}" viewBox="0 0 {0} {1}"><title id="timeline-title">{2}</title>'
    ).format(width, height, title)
    rows = (
        _row(span, HEAD_HEIGHT + ROW_HEIGHT * number, scale, is_critical=number in path, key=number)
        for number, span in enumerate(spans)
    )
    return Markup("").join(
        [head, *_ticks(scale, height), *_gaps(scale, height), *rows, Markup("</svg>")]
    )


def _ticks(scale: Scale, height: int) -> Iterator[Markup]:
    last = -1e9
    for at in scale.ticks():
        x = scale.x(at)
        if x - last < 48:  # labels would touch
            continue
        last = x
        yield Markup(
            '<path class="tick" d="M{0:.1f} {1}V{2}"/><text class="tick" x="{0:.1f}" y="16">{3}</text>'
        ).format(x, HEAD_HEIGHT - 6, height - 8, elapsed(at) if at else "0")


def _gaps(scale: Scale, height: int) -> Iterator[Markup]:
    for gap in scale.gaps:
        left = scale.x(gap.start)
        yield Markup(
            '<rect class="gap" x="{:.1f}" y="{}" width="{}" height="{}"/>'
            '<text class="gap" x="{:.1f}" y="16">{}</text>'
        ).format(
            left,
            HEAD_HEIGHT - 6,
            GAP_WIDTH,
            height - HEAD_HEIGHT - 2,
            left + GAP_WIDTH / 2,
            f"⋯ {elapsed(gap.end - gap.start)}",
        )


def _row(span: Span, y: int, scale: Scale, *, is_critical: bool, key: int) -> Markup:
    classes = f"bar-row {STATUS_CLASSES.get(span.status, 'status-off')}"
    return Markup(
        '<a class="{}" data-key="t{}" href="{}"><title>{}</title>'
        '<text class="label" x="8" y="{}"><tspan class="sign">{}</tspan> {}</text>{}</a>'
    ).format(
        classes + (" critical" if is_critical else ""),
        key,
        span.href,
        _sentence(span),
        y + 17,
        SYMBOLS.statuses.get(span.status, "?"),
        cut(span.name, 21),
        Markup("").join(_marks(span, y, scale)),
    )


def _marks(span: Span, y: int, scale: Scale) -> Iterator[Markup]:
    form = Markup('<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}" rx="{}"/>')
    ended = scale.until if span.ended is None else span.ended
    started = ended if span.started is None else min(span.started, ended)
    if span.enqueued is not None and span.enqueued < started:
        left = scale.x(span.enqueued)
        yield form.format("wait", left, y + 11, scale.x(started) - left, 4, 2)
    if span.started is not None:
        left = scale.x(started)
        yield form.format("run", left, y + 6, max(scale.x(ended) - left, 2.0), 14, 3)
    for at in span.failures:
        yield Markup('<path class="notch" d="M{0:.1f} {1}v18"/>').format(scale.x(at), y + 4)


def _sentence(span: Span) -> str:
    parts = [f"{span.name}: {span.status}"]
    if span.started is not None:
        if span.enqueued is not None:
            parts.append(f"waited {elapsed(span.started - span.enqueued)}")
        if span.ended is not None:
            parts.append(f"ran {elapsed(span.ended - span.started)}")
    if span.failures:
        parts.append(f"{len(span.failures)} failed attempts before")
    return ", ".join(parts)
