"""The cost of many workers: 2, 10 and 40 workers with one child each, and 5 workers with eight children
each.

``HORSIES_BENCH_WORKERS=2,10,40,200`` measures other numbers of workers. A worker takes about 60 MB of
memory, and half a second of processor time to start. ``HORSIES_BENCH_SAVE=FILE`` adds each result to a
JSON file as soon as it is measured, as the series HORSIES_BENCH_SERIES ("now" by default), for
``benchmarks.plot``. Large numbers take minutes; measure them in several runs with the same file.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

from benchmarks.rounds import Checkout, alternate, heading, spread
from benchmarks.saved import save_result

SIZES = tuple(map(int, os.environ.get("HORSIES_BENCH_WORKERS", "2,10,40").split(",")))
ROUNDS = int(os.environ.get("HORSIES_BENCH_ROUNDS", "3"))
# A few workers with the same total number of children as 40 workers.
FEW, FEW_CHILDREN = 5, 8
# The maximum cost of 40 workers, as a multiple of the cost of the smallest measured fleet.
RATIO_MAX = 1.5
# The same limit for the idle commits per worker and for the recovery from a killed worker, at every
# size.
GROWTH_MAX = 1.5
RATE_MIN = 0.8
SERVER_PERCENT_MAX = 5.0
COLUMNS = (
    ("idle_commits", "commits/s", 1),
    ("idle_server_percent", "server %", 2),
    ("idle_workers_percent", "workers %", 1),
    ("p50_ms", "p50 ms", 1),
    ("p99_ms", "p99 ms", 1),
    ("server_ms", "server ms", 1),
    ("workers_ms", "workers ms", 1),
    ("recovery_s", "recovery s", 1),
    ("recovery_max_s", "its max", 1),
    ("noop_rate", "strict tasks/s", 0),
    ("burst_rate", "burst tasks/s", 0),
)

Runs: TypeAlias = Sequence[Mapping[str, float]]


def workers(url: str) -> bool:
    """Measure fleets of several sizes; the cost of a single task must hardly grow with their size."""
    here = Checkout(url)
    few = f"{FEW} x {FEW_CHILDREN}"
    variants = {str(size): partial(_measure, here, str(size), workers=size) for size in SIZES}
    variants[few] = partial(
        _measure, here, few, workers=FEW, children=FEW_CHILDREN, sends=0, kills=0, idle_seconds=0
    )
    found = alternate(variants, ROUNDS)
    heading(
        f"workers with one child each, median (min-max) of {ROUNDS}: idle, one task at a time, the task of a "
        "killed worker, a drain"
    )
    print(f"  {'workers':>8}" + "".join(f"{title:>24}" for _, title, _ in COLUMNS))
    for name, runs in found.items():
        print(f"  {name:>8}" + "".join(f"{_cell(runs, *column):>24}" for column in COLUMNS))
    return _judge({size: found[str(size)] for size in SIZES}, found[few])


def _measure(here: Checkout, name: str, **arguments: int) -> dict[str, float]:
    found = here.measure("fleet", **arguments)
    save_result(name, found)
    return found


def _cell(runs: Runs, metric: str, _: str, digits: int) -> str:
    return spread([run[metric] for run in runs], digits) if metric in runs[0] else "-"


def _judge(found: Mapping[int, Runs], few: Runs) -> bool:
    """Compare 40 workers with the smallest fleet, and every fleet with the smallest fleet and with the
    limits of an idle server.
    """
    base, good = found[min(found)], True
    if FEW * FEW_CHILDREN not in found:
        print(
            f"  without {FEW * FEW_CHILDREN} workers, neither single tasks nor the drain are judged"
        )
    for size, runs in found.items():
        server = statistics.median(run["idle_server_percent"] for run in runs)
        good &= server <= SERVER_PERCENT_MAX
        idle = _median(runs, "idle_commits") / size
        good &= idle <= GROWTH_MAX * _median(base, "idle_commits") / min(found)
        good &= _median(runs, "recovery_s") <= GROWTH_MAX * _median(base, "recovery_s")
        slower = _median(runs, "p50_ms") / _median(base, "p50_ms")
        costlier = _cost(runs) / _cost(base)
        print(
            f"  {size} workers: {idle:.2f} idle commits/s each, server {server:.2f} % of a core; a killed "
            f"one is recovered after {_median(runs, 'recovery_s'):.1f} s; p50 {slower:.2f} and processor "
            f"time {costlier:.2f} of {min(found)} workers"
        )
        if size == FEW * FEW_CHILDREN:
            rate = _median(runs, "noop_rate") / _median(few, "noop_rate")
            print(f"  {size} workers drain {rate:.2f} of {FEW} with {FEW_CHILDREN} children each")
            good &= max(slower, costlier) <= RATIO_MAX and rate >= RATE_MIN
    return good


def _median(runs: Runs, metric: str) -> float:
    return statistics.median(run[metric] for run in runs)


def _cost(runs: Runs) -> float:
    return statistics.median(run["server_ms"] + run["workers_ms"] for run in runs)


BENCHMARKS = {"workers": workers}
