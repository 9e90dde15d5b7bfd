"""Pure functions that draw series of numbers as SVG without style attributes.

An SVG contains only shapes and stretches to the available width; its labels are separate HTML and stay
readable on a phone. Each chart describes its numbers in words and has a table below it. The columns'
links form a separate layer, because screen readers do not find links inside an image; keyboard users
find the same links in the table. The parts are plain strings with escaped texts: an overview has 800
parts, and ``Markup.format`` takes five times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import ceil, floor, isfinite, log10

from markupsafe import Markup, escape

from horsies.web.words import duration, number
from horsies.words import NOTHING

WIDTH, HEIGHT = 640, 160
SPARK_WIDTH, SPARK_HEIGHT = 96, 20
# Any more columns would be thinner than two pixels on a phone.
COLUMNS_MAX = 180
_DECADES_MAX = 7
_TOPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 20)
_GAP = 0.14
# A column that exceeds the usual height by this factor is a burst; fewer columns have no usual height.
_BURST_FACTOR = 5
_BURST_COLUMNS = 5
# The labels of an axis that covers less time show the seconds of slots that are not whole minutes.
_SECONDS_UNTIL = timedelta(minutes=10)
# Sums of larger numbers could overflow.
_VALUE_MAX = 1e15

Cell = Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Column:
    """One time slot's numbers, one for each series; ``href`` is the list of its tasks."""

    at: datetime
    values: Sequence[float | None]
    href: str | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: ``key`` is its prefix for ids on the page, and ``series`` names its series, in CSS
    classes and in words.
    """

    key: str
    title: str
    series: Sequence[str]
    columns: Sequence[Column]
    # A sentence next to the title.
    note: str = ""


def column_chart(chart: Chart) -> Markup:
    """Draw counts as stacked columns, the first series at the bottom; at most the last 180 slots."""
    chart = _drawable(chart)
    totals = [sum(value or 0.0 for value in column.values) for column in chart.columns]
    highest = max(totals, default=0.0)
    top = nice_top(robust_top(totals))
    paths: list[list[str]] = [[] for _ in chart.series]
    for place, column in enumerate(chart.columns):
        below = 0.0
        for path, value in zip(paths, column.values, strict=True):
            if value:
                path.append(_block(chart, place, min(below / top, 1.0), (below + value) / top))
                below += value
    shapes = [
        f'<path class="fill-{escape(kind)}" d="{"".join(path)}"/>'
        for kind, path in zip(chart.series, paths, strict=True)
    ]
    if top < highest:
        cut = [place for place, total in enumerate(totals) if total > top]
        at = chart.columns[totals.index(highest)].at.astimezone(UTC)
        note = (
            f"columns above {number(top)} are cut; the highest is {number(highest)} at {at:%H:%M}"
        )
        shapes.append(_stroke("cut", "".join(_notch(chart, place) for place in cut)))
        chart = replace(chart, note=note)
    labels = (number(top), number(top / 2), "0")
    return _figure(chart, [_grid(2), *shapes], _count_words(chart), labels, number)


def robust_top(totals: Sequence[float]) -> float:
    """Return the height that a chart must show: the highest column, unless a burst would flatten all others.

    A column is cut if it is more than five times as high as nine tenths of the columns.
    """
    known = sorted(total for total in totals if total)
    if len(known) < _BURST_COLUMNS:
        return max(known, default=0.0)
    usual = known[int(len(known) * 0.9) - 1]
    return known[-1] if known[-1] <= _BURST_FACTOR * usual else usual * 1.5


def _notch(chart: Chart, place: int) -> str:
    """Return the white line that marks a cut column, slightly below the column's top."""
    step = WIDTH / len(chart.columns)
    return f"M{place * step:.1f} 12L{(place + 1 - _GAP) * step:.1f} 6"


def line_chart(chart: Chart) -> Markup:
    """Draw durations in seconds as lines over a logarithmic axis; None leaves a gap."""
    chart = replace(_drawable(chart), note="logarithmic axis")
    low, high = decades(value for column in chart.columns for value in column.values if value)
    shapes = [_grid(high - low)]
    for place, kind in enumerate(chart.series):
        heights = [_log_height(column.values[place], low, high) for column in chart.columns]
        shapes.append(_stroke(kind, _line(heights, WIDTH)))
    labels = [_decade_label(power) for power in range(high, low - 1, -1)]
    return _figure(chart, shapes, _duration_words(chart), labels, duration)


def sparkline(key: str, title: str, values: Sequence[float | None]) -> Markup:
    """Draw a small line without axes; its description has the newest and the highest value."""
    known = [_drawn(value) for value in values[-COLUMNS_MAX:]]
    numbers = [value for value in known if value is not None]
    if not numbers:
        return Markup('<span class="muted">{}</span>').format(NOTHING)
    top = max(numbers) or 1.0
    lowest, room = SPARK_HEIGHT - 1, SPARK_HEIGHT - 2
    heights = [None if value is None else lowest - value / top * room for value in known]
    shape = _stroke("spark", _line(heights, SPARK_WIDTH))
    words = f"{number(numbers[-1])} now, highest {number(max(numbers))}"
    size = f"{SPARK_WIDTH} {SPARK_HEIGHT}"
    # Browsers show the title next to the pointer.
    title = f"{title}: {words}"
    return Markup(_svg("spark", size, key, title, words, shape))  # noqa: S704 - escaped


def nice_top(highest: float) -> float:
    """Return the upper limit of a linear axis: a round number, at least 2, whose half also has few
    digits.
    """
    if highest <= 2:
        return 2.0
    power = 10.0 ** floor(log10(highest))
    return next(power * factor for factor in _TOPS if power * factor >= highest)


def decades(values: Iterable[float]) -> tuple[int, int]:
    """Return the powers of ten around these seconds: at least two decades and at most seven."""
    known = list(values)
    high = min(max(ceil(log10(max(known))), -1), 8) if known else 1
    low = floor(log10(min(known))) if known else -1
    return max(min(low, high - 2), high - _DECADES_MAX), high


def _drawable(chart: Chart) -> Chart:
    columns = [
        replace(column, values=[_drawn(value) for value in column.values])
        for column in chart.columns[-COLUMNS_MAX:]
    ]
    return replace(chart, columns=columns)


def _drawn(value: float | None) -> float | None:
    """Return a number that a chart can draw, or None for a gap."""
    return min(max(value, 0.0), _VALUE_MAX) if value is not None and isfinite(value) else None


def _block(chart: Chart, place: int, bottom: float, top: float) -> str:
    step = WIDTH / len(chart.columns)
    y, height = HEIGHT * (1 - min(top, 1.0)), HEIGHT * (min(top, 1.0) - bottom)
    return f"M{place * step:.1f} {y:.1f}h{step * (1 - _GAP):.1f}v{height:.1f}H{place * step:.1f}z"


def _line(heights: Sequence[float | None], width: int) -> str:
    """Connect the middles of neighbouring slots with lines; a single slot becomes a short horizontal line."""
    step, parts = width / max(len(heights), 1), []
    for place, y in enumerate(heights):
        if y is None:
            continue
        is_first = place == 0 or heights[place - 1] is None
        is_last = place + 1 == len(heights) or heights[place + 1] is None
        x = (place + 0.25 if is_first and is_last else place + 0.5) * step
        parts.append(f"{'M' if is_first else 'L'}{x:.1f} {y:.1f}")
        if is_first and is_last:
            parts.append(f"H{(place + 0.75) * step:.1f}")
    return "".join(parts)


def _grid(parts: int) -> str:
    lines = "".join(f"M0 {HEIGHT * place / parts:.1f}H{WIDTH}" for place in range(parts))
    return _stroke("grid", lines)


def _stroke(kind: str, path: str) -> str:
    return f'<path class="line-{escape(kind)}" d="{path}" vector-effect="non-scaling-stroke"/>'


def _svg(kind: str, size: str, key: str, title: str, words: str, shapes: str) -> str:
    key = escape(key)
    return (
        f'<svg class="{kind}" viewBox="0 0 {size}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{escape(title)}</title>'
        f'<desc id="{key}-d">{escape(words)}</desc>{shapes}</svg>'
    )


def _log_height(value: float | None, low: int, high: int) -> float | None:
    if not value:
        return None
    return HEIGHT * (1 - min(max((log10(value) - low) / (high - low), 0.0), 1.0))


def _decade_label(power: int) -> str:
    return f"{10**power}s" if 0 <= power < 4 else duration(10.0**power)


def _figure(
    chart: Chart, shapes: Sequence[str], words: str, labels: Sequence[str], cell: Cell
) -> Markup:
    drawing = _svg("drawing", f"{WIDTH} {HEIGHT}", chart.key, chart.title, words, "".join(shapes))
    legend = "".join(
        f' <span class="legend key-{kind}">{kind}</span>' for kind in map(escape, chart.series)
    )
    note = f' <span class="muted">{escape(chart.note)}</span>' if chart.note else ""
    y_labels = "".join(f"<span>{escape(label)}</span>" for label in labels)
    return Markup(  # noqa: S704 - every text in it is escaped
        f'<figure class="chart"><figcaption>{escape(chart.title)}{legend}{note}</figcaption>'
        f'<div class="plot"><div class="axis-y" aria-hidden="true">{y_labels}</div>'
        f'<div class="area">{drawing}{_links(chart, cell)}</div>'
        f'<div class="axis-x" aria-hidden="true">{_time_labels(chart.columns)}</div></div>'
        f"{_table(chart, cell)}</figure>"
    )


def _links(chart: Chart, cell: Cell) -> str:
    """Return a layer over the columns that shows their numbers on hover and links to their tasks."""
    step = WIDTH / max(len(chart.columns), 1)
    form = _time_form(chart.columns)
    columns = "".join(
        _column(column, _column_words(chart, column, form, cell), place * step, step)
        for place, column in enumerate(chart.columns)
        if column.href is not None or any(column.values)
    )
    return columns and (
        f'<svg class="links" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true">{columns}</svg>'
    )


def _column(column: Column, words: str, left: float, width: float) -> str:
    shape = f'<title>{escape(words)}</title><rect x="{left:.1f}" width="{width:.1f}"/>'
    if column.href is None:
        return f"<g>{shape}</g>"
    return f'<a href="{escape(column.href)}" tabindex="-1">{shape}</a>'


def _table(chart: Chart, cell: Cell) -> str:
    """Return a table of all columns that have a number, newest first."""
    form = _time_form(chart.columns)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in chart.series)
    rows = "".join(
        f"<tr><td>{_linked(column, _time(column.at, form))}</td>"
        f"{''.join(f'<td>{escape(cell(value))}</td>' for value in column.values)}</tr>"
        for column in reversed(chart.columns)
        if any(column.values)
    )
    return (
        '<details class="as-table"><summary>as a table</summary>'
        f'<div tabindex="0" role="group" aria-label="{escape(chart.title)}"><table class="table">'
        f'<thead><tr><th scope="col">time</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def _linked(column: Column, text: str) -> str:
    return text if column.href is None else f'<a href="{escape(column.href)}">{text}</a>'


def _time(at: datetime, form: str) -> str:
    """Return an element whose time the pages' script converts to local time."""
    utc = at.astimezone(UTC)
    return f'<time datetime="{utc:%Y-%m-%dT%H:%M:%SZ}">{utc:{form}}</time>'


def _time_form(columns: Sequence[Column]) -> str:
    """Return the time format for this axis, with the seconds or the day where it needs them."""
    span = columns[-1].at - columns[0].at if columns else timedelta()
    if span < _SECONDS_UNTIL and any(column.at.second for column in columns):
        return "%H:%M:%S"
    return "%H:%M" if span <= timedelta(hours=25) else "%m-%d %H:%M"


def _time_labels(columns: Sequence[Column]) -> str:
    """Return the times at the start, the middle and the end of the axis."""
    places = (0, len(columns) // 2, -1) if columns else ()
    return "".join(_time(columns[place].at, _time_form(columns)) for place in places)


def _column_words(chart: Chart, column: Column, form: str, cell: Cell) -> str:
    found = [f"{cell(v)} {name}" for v, name in zip(column.values, chart.series, strict=True) if v]
    return f"{column.at.astimezone(UTC):{form}} UTC: {', '.join(found) or 'none'}"


def _count_words(chart: Chart) -> str:
    """Describe each series by its newest, mean and highest value."""
    sentences = []
    for place, name in enumerate(chart.series):
        values = [column.values[place] or 0.0 for column in chart.columns]
        if any(values):
            highest = max(range(len(values)), key=values.__getitem__)
            at = f"{chart.columns[highest].at.astimezone(UTC):%H:%M}"
            mean = number(sum(values) / len(values))
            sentences.append(
                f"{number(values[-1])} {name} now, {mean} on average, "
                f"highest {number(values[highest])} at {at} UTC"
            )
    return "; ".join(sentences) + "." if sentences else "No numbers in this time."


def _duration_words(chart: Chart) -> str:
    sentences = []
    for place, name in enumerate(chart.series):
        values = [value for column in chart.columns if (value := column.values[place]) is not None]
        if values:
            sentences.append(f"{name} {duration(values[-1])} now, highest {duration(max(values))}")
    return "; ".join(sentences) + "." if sentences else "No numbers in this time."
