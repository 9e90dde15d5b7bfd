"""Two checkouts in alternating rounds: ``python -m benchmarks latency --against ../before``.

The other checkout needs its own virtual environment in ``.venv``. The figures of this checkout measure
the code of both, each on its own database.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from benchmarks.machine import MACHINE
from benchmarks.rounds import Checkout, alternate, heading, ratios, spread

NEVER_REPLACED = ["--max-tasks-per-child", "0"]
# The processor time of a task or a send is the sum of these figures.
PROCESSOR = ("parent_us", "children_us", "server_us", "processor_us")
Runs = Sequence[Mapping[str, float]]


def _drains(task: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("drain", {"children": children, "task": task, "flags": NEVER_REPLACED})
        for children in (2, 4, 8)
    ]


# The figures of each benchmark name, with their arguments.
COMPARED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "throughput": _drains("noop"),
    "burst": _drains("burst"),
    "recycling": [("drain", {"children": 4, "flags": ["--max-tasks-per-child", "100"]})],
    "latency": [("latency", {})],
    "send": [("send", {})],
    "send_async": [("send_async", {})],
    "send_many": [("send_many", {})],
    "send_stream": [("send_stream", {})],
    "start_up": [("start_up", {})],
    "memory": [("memory", {})],
}


def compare(
    url: str, path: Path, names: list[str], rounds: int, at_least: float | None = None
) -> bool:
    """Measure the named figures in both checkouts alternately, and print the ratios of the rounds. With
    ``at_least``, return whether this checkout reaches that share of the other's speed in every figure.
    """
    is_met = True
    with two_databases(url) as (ours, theirs):
        here, there = Checkout(ours), Checkout.at(path, theirs)
        for name in names:
            for figure, arguments in COMPARED[name]:
                sides: dict[str, Callable[[], dict[str, float]]] = {
                    side: partial(checkout.measure, figure, **arguments)
                    for side, checkout in (("here", here), ("there", there))
                }
                found = alternate(sides, rounds)
                was_idle = not MACHINE.was_busy
                _print(f"{name} {_brief(arguments)}", found, rounds)
                if at_least is not None:
                    speeds = relative_speeds(found["here"], found["there"], was_idle=was_idle)
                    is_met = reaches(speeds, at_least) and is_met
    return is_met


def relative_speeds(here: Runs, there: Runs, *, was_idle: bool) -> dict[str, float]:
    """Return the median speed of this checkout as a share of the other's: by processor time, and on an
    idle machine also by rate.
    """
    found: dict[str, float] = {}
    if any(metric in here[0] for metric in PROCESSOR):
        pairs = zip(here, there, strict=True)
        found["processor time"] = statistics.median(
            _spent(other) / _spent(own) for own, other in pairs
        )
    if was_idle and "rate" in here[0]:
        found["rate"] = statistics.median(ratios(here, there, "rate"))
    return found


def _spent(run: Mapping[str, float]) -> float:
    return sum(run.get(metric, 0.0) for metric in PROCESSOR)


def reaches(speeds: Mapping[str, float], at_least: float) -> bool:
    """Print and judge whether every speed is at least this share; without a speed nothing is reached."""
    shown = ", ".join(f"{speed:.3f} by {metric}" for metric, speed in speeds.items())
    print(f"  target: at least {at_least:g} of the other's speed; measured {shown or 'no speed'}")
    return bool(speeds) and min(speeds.values()) >= at_least


def _print(title: str, found: dict[str, list[dict[str, float]]], rounds: int) -> None:
    heading(f"{title.strip()}: median (min-max) of {rounds}; the ratio is here / there")
    print(f"  {'':18}{'here':>30}{'there':>30}{'ratio':>24}")
    for metric in found["here"][0]:
        here, there = ([run[metric] for run in found[side]] for side in ("here", "there"))
        quotients = ratios(found["here"], found["there"], metric)
        print(f"  {metric:18}{spread(here, 2):>30}{spread(there, 2):>30}{spread(quotients, 3):>24}")


def _brief(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items() if name != "flags")


@contextmanager
def two_databases(url: str) -> Iterator[tuple[str, str]]:
    """Yield two empty databases of the server."""
    names = ("horsies_bench_here", "horsies_bench_there")
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
    with psycopg.connect(url, autocommit=True) as connection:
        for name in names:
            connection.execute(drop.format(sql.Identifier(name)))
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            ours, theirs = (urlsplit(url)._replace(path=f"/{name}").geturl() for name in names)
            yield ours, theirs
        finally:
            for name in names:
                connection.execute(drop.format(sql.Identifier(name)))
