"""The cost of settings that the drained tasks do not use: logs without lines, a codec for tasks without
payload, a store for tasks without large payload, a webhook for ends that do not happen, and the memory limit
of another task.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.rounds import alternate, heading, ratios, spread
from benchmarks.worker import drain

# Read by noop_app.py.
SETTING_VARIABLE = "HORSIES_BENCH_SETTING"
SETTINGS = ("none", "none again", "logs", "codec", "store", "webhook", "memory limit")
CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
ROUNDS = int(os.environ.get("HORSIES_BENCH_ROUNDS", "5"))
# An unused setting may cost this share of the rate; "none again" shows what the machine contributes.
TARGET = 0.97
# The memory limit of another task may cost nothing.
FREE = "memory limit"
METRICS = ("rate", "parent_us", "children_us")


def unused(url: str) -> bool:
    """Drain in turns without a setting, twice, and with each one."""
    found = alternate({one: partial(_drain, url, one) for one in SETTINGS}, ROUNDS)
    heading(
        f"unused settings: {TASKS:,} no-op tasks with {CHILDREN} children, median (min-max) of {ROUNDS}; "
        "ratio to none round by round"
    )
    rates: dict[str, list[float]] = {}
    for name, runs in found.items():
        parts = {metric: ratios(runs, found["none"], metric) for metric in METRICS}
        rates[name] = parts["rate"]
        figures = [
            f"{metric} {spread([run[metric] for run in runs], 1)} x{spread(parts[metric], 3)}"
            for metric in METRICS
        ]
        print(f"  {name:<14}" + "   ".join(figures))
    return _is_cheap(rates) & _is_free(rates[FREE], rates["none again"])


def _is_cheap(rates: Mapping[str, Sequence[float]]) -> bool:
    """Print and judge the slowest setting of those that may cost something."""
    medians = {name: statistics.median(found) for name, found in rates.items() if name != FREE}
    slowest = min(medians, key=medians.__getitem__)
    print(f"  target: at least {TARGET} of the rate; measured {medians[slowest]:.3f} ({slowest})")
    return medians[slowest] >= TARGET


def _is_free(rates: Sequence[float], again: Sequence[float]) -> bool:
    """Print and judge a setting that may cost nothing: its median is one that the same code has as well."""
    middle = statistics.median(rates)
    print(
        f"  target: {FREE} at least the slowest of none again, {min(again):.3f}; measured {middle:.3f}"
    )
    return middle >= min(again)


def _drain(url: str, setting: str) -> dict[str, float]:
    os.environ[SETTING_VARIABLE] = setting
    flags = ("--max-tasks-per-child", "0", "--quiet-tasks", "--loglevel", "warning")
    try:
        return drain(url, CHILDREN, TASKS, *flags)
    finally:
        del os.environ[SETTING_VARIABLE]


BENCHMARKS = {"unused": unused}
