"""The cost of the logs of attempts: off, on without any line, and on with one line for every task."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.rounds import alternate, heading, ratios, spread
from benchmarks.worker import drain

# Read by noop_app.py.
LOGS_VARIABLE = "HORSIES_BENCH_LOGS"
CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
ROUNDS = int(os.environ.get("HORSIES_BENCH_ROUNDS", "5"))
# Kept logs of tasks that log nothing may cost this share of the rate.
TARGET = 0.97
METRICS = ("rate", "parent_us", "children_us")


def logs(url: str) -> bool:
    """Drain in turns with the setting off, on and unused, and on with one line for every task."""
    kinds = {"off": ("off", "noop"), "idle": ("on", "noop"), "a line": ("on", "say")}
    variants = {name: partial(_drain, url, *kind) for name, kind in kinds.items()}
    found = alternate(variants, ROUNDS)
    heading(
        f"logs of attempts: {TASKS:,} tasks with {CHILDREN} children, median (min-max) of {ROUNDS}; "
        "ratio to off round by round"
    )
    for name, runs in found.items():
        print(f"  {name:<8}" + "   ".join(_figure(runs, found["off"], one) for one in METRICS))
    idle = sorted(ratios(found["idle"], found["off"], "rate"))[ROUNDS // 2]
    print(f"  target: idle at least {TARGET} of the rate; measured {idle:.3f}")
    return idle >= TARGET


def _figure(
    runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], metric: str
) -> str:
    values = [run[metric] for run in runs]
    return f"{metric} {spread(values, 1)} x{spread(ratios(runs, base, metric), 3)}"


def _drain(url: str, capture: str, task_name: str) -> dict[str, float]:
    os.environ[LOGS_VARIABLE] = capture
    flags = ("--max-tasks-per-child", "0", "--quiet-tasks", "--loglevel", "warning")
    try:
        return drain(url, CHILDREN, TASKS, *flags, task_name=task_name)
    finally:
        del os.environ[LOGS_VARIABLE]


BENCHMARKS = {"logs": logs}
