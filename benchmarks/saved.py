"""Results on disk: each measurement is added immediately to the JSON file in HORSIES_BENCH_SAVE, so an
interrupted run loses only the current measurement.

The file maps the name of a series, HORSIES_BENCH_SERIES, to sizes, and each size to its measurements.
``markdown`` writes a series as a table for the documentation.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import MACHINE

RESULTS = Path(__file__).parent / "results"


def save_result(size: str, found: Mapping[str, float]) -> None:
    """Add a measurement to the file, if one is set; "busy" is 1 if other programs used the machine."""
    if not (named := os.environ.get("HORSIES_BENCH_SAVE")):
        return
    path = Path(named)
    results = json.loads(path.read_text("utf-8")) if path.exists() else {}
    series = results.setdefault(os.environ.get("HORSIES_BENCH_SERIES", "now"), {})
    series.setdefault(size, []).append({**found, "busy": float(MACHINE.was_busy)})
    path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: the metrics to add up, and the digits to show."""

    title: str
    metrics: Sequence[str]
    digits: int = 0
    # Whether to divide by the size, which is the number of workers or sessions.
    is_each: bool = False

    def cell(self, size: str, runs: Sequence[Mapping[str, float]]) -> str:
        """Return the median with its range, or a dash if the metrics were not measured."""
        if any(metric not in run for metric in self.metrics for run in runs):
            return "-"
        share = float(size) if self.is_each else 1.0
        values = [sum(run[metric] for metric in self.metrics) / share for run in runs]
        middle = f"{statistics.median(values):,.{self.digits}f}"
        ends = [f"{value:,.{self.digits}f}" for value in (min(values), max(values))]
        return middle if ends[0] == ends[1] else f"{middle} ({ends[0]}-{ends[1]})"


WORKERS = (
    Row("idle: commits per second, all workers", ["idle_commits"], 1),
    Row("idle: commits per second, each worker", ["idle_commits"], 2, is_each=True),
    Row("idle: server, percent of a core", ["idle_server_percent"], 2),
    Row("idle: workers, percent of a core", ["idle_workers_percent"], 1),
    Row("one task: send to result, p50, ms", ["p50_ms"], 1),
    Row("p99, ms", ["p99_ms"], 1),
    Row("one task: processor time of the server, ms", ["server_ms"], 1),
    Row("processor time of the workers, ms", ["workers_ms"], 1),
    Row("the task of a killed worker is recovered after, s", ["recovery_s"], 1),
    Row("at most, s", ["recovery_max_s"], 1),
    Row("drain: strict tasks per second", ["noop_rate"]),
    Row("drain: tasks of windows per second", ["burst_rate"]),
)
SESSIONS = (
    Row("idle: commits per second", ["commits/s"]),
    Row("idle: server, percent of a core", ["server %"], 1),
    Row("the program that plays them, percent of a core", ["program %"], 1),
    Row("heartbeats at most so late, s", ["late s"], 1),
    Row("one task: processor time of the server, ms", ["server ms/task"], 1),
    Row("send to start, p50, ms", ["p50 ms"], 1),
    Row("p99, ms", ["p99 ms"], 1),
    Row("memory of the server for each session, MB", ["MB each"], 1),
)
HOURS = (
    Row("tasks", ["tasks"]),
    Row("turn of 32 tasks, p50, ms", ["turn_p50_ms"], 2),
    Row("p99, ms", ["turn_p99_ms"], 1),
    Row("longest, ms", ["turn_max_ms"]),
    Row("old tasks deleted", ["deleted"]),
    Row("dead rows", ["dead"]),
    Row("tables, MB", ["table_mb"]),
    Row("indexes, MB", ["index_mb"]),
    Row("vacuums so far", ["vacuums"]),
)


def markdown(name: str, series: str, what: str, rows: Sequence[Row]) -> str:
    """Return a saved series as a Markdown table with a column for each size."""
    results = json.loads((RESULTS / name).read_text("utf-8"))[series]
    sizes = sorted(results, key=lambda size: (not size.isdigit(), int(size.split()[0])))
    lines = [[what, *sizes], ["---"] * (1 + len(sizes))]
    lines += [[row.title, *(row.cell(size, results[size]) for size in sizes)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
