"""Draw curves over the number of workers as SVG: ``python -m benchmarks.plot RESULTS.json PICTURE.svg``.

``python -m benchmarks workers`` saves the results with HORSIES_BENCH_SAVE, by the name of each series:
{"series": {"2": [{"p50_ms": 2.9, ...}, ...], ...}}. Both axes are logarithmic, so a straight line
upwards is growth with a power of the workers.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Results: TypeAlias = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]

# The charts from left to right: the title, and the metrics to add up.
CHARTS = (
    ("idle: commits per second", ("idle_commits",)),
    ("idle: server, % of a core", ("idle_server_percent",)),
    ("one task: send to result, ms", ("p50_ms",)),
    ("one task: processor time, ms", ("server_ms", "workers_ms")),
)
COLOURS = ("#c0392b", "#1f77b4", "#2e8b57")
WIDTH, HEIGHT, GAP = 250.0, 210.0, 60.0


def curves(results: Results, metrics: Sequence[str]) -> dict[str, list[Point]]:
    """Return the medians of a sum of metrics for each series, by the number of workers."""
    found: dict[str, list[Point]] = {}
    for name, sizes in results.items():
        points = [
            (float(size), statistics.median(sum(run[one] for one in metrics) for run in runs))
            for size, runs in sizes.items()
            if size.isdigit() and all(one in runs[0] for one in metrics)
        ]
        found[name] = sorted(points)
    return found


def chart(title: str, series: Mapping[str, Sequence[Point]], left: float) -> list[str]:
    """Draw one chart with logarithmic axes."""
    points = [point for one in series.values() for point in one]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y = _decade(min(y for _, y in points))
    high_y = 10 * _decade(max(y for _, y in points))

    def place(x: float, y: float) -> Point:
        across = math.log(x / low_x) / max(math.log(high_x / low_x), 1e-9)
        up = math.log(y / low_y) / math.log(high_y / low_y)
        return left + across * WIDTH, 40 + HEIGHT * (1 - up)

    drawn = [_text(left, 22, title, "start", 13)]
    level = low_y
    while level <= high_y * 1.01:
        _, y = place(low_x, level)
        drawn.append(_line([(left, y), (left + WIDTH, y)], "#bbb", 0.5))
        drawn.append(_text(left - 6, y + 4, f"{level:g}", "end"))
        level *= 10
    for x in sorted({x for x, _ in points}):
        drawn.append(_text(place(x, low_y)[0], 40 + HEIGHT + 18, f"{x:g}", "middle"))
    for (name, one), colour in zip(series.items(), COLOURS, strict=False):
        placed = [place(x, y) for x, y in one]
        drawn.append(_line(placed, colour, 2))
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        drawn.append(_text(placed[-1][0], placed[-1][1] - 8, name, "end", 11, colour))
    return drawn


def picture(results: Results) -> str:
    """Return the SVG with all charts."""
    drawn: list[str] = []
    for number, (title, metrics) in enumerate(CHARTS):
        left = GAP + number * (WIDTH + GAP)
        drawn += chart(title, curves(results, metrics), left)
    width, height = GAP + len(CHARTS) * (WIDTH + GAP), HEIGHT + 85
    drawn.append(_text(GAP, height - 8, "workers with one child each", "start"))
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([opening, *drawn, "</svg>\n"])


def _decade(value: float) -> float:
    return float(10 ** math.floor(math.log10(value)))


def _line(points: Sequence[Point], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 11, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
        f"{text}</text>"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(picture(json.loads(source.read_text("utf-8"))), "utf-8")
