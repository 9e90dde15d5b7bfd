"""The cost of `tx`: the same INSERT in one transaction with its outcome and in a separate one, and an
unused `tx`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import psycopg

from benchmarks.rounds import Checkout, alternate, heading, ratios, spread

TABLE = "CREATE TABLE IF NOT EXISTS benchmark_effects (number bigint)"
CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "3000"))
ROUNDS = 5
# The pairs to compare, and the minimum fraction of the second task's rate that the first must
# reach.
TARGETS = (("inside", "apart", 0.90), ("declared", "noop", 0.98))


def transactions(url: str) -> bool:
    """Drain each kind of task alternately."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
    here = Checkout(url)
    measure = partial(
        here.measure,
        "drain",
        children=CHILDREN,
        count=TASKS,
        flags=["--max-tasks-per-child", "0", "--window", "0", "--quiet-tasks"],
        application="benchmarks.transactions_app",
    )
    kinds = dict.fromkeys(name for pair in TARGETS for name in pair[:2])
    found = alternate({name: partial(measure, task=name) for name in kinds}, ROUNDS)
    heading(
        f"transactions of tasks: tasks/s with {CHILDREN} children, {TASKS:,} tasks, median (min-max) of "
        f"{ROUNDS}; ratio of the rates round by round"
    )
    for name, runs in found.items():
        print(f"  {name:<10}{_rates(runs)}")
    checks = [_compare(found, *pair) for pair in TARGETS]
    return all(checks)


def _rates(runs: Sequence[Mapping[str, float]]) -> str:
    rates = spread([run["rate"] for run in runs])
    processor = ", ".join(
        f"{who} {statistics.median(run[f'{who}_us'] for run in runs):.0f}"
        for who in ("parent", "children")
    )
    return f"{rates:>26} tasks/s, processor µs for a task: {processor}"


def _compare(
    found: Mapping[str, Sequence[Mapping[str, float]]], name: str, base: str, target: float
) -> bool:
    parts = ratios(found[name], found[base], "rate")
    print(f"  {name} to {base}: {spread(parts, 3)}, target {target}")
    return statistics.median(parts) >= target


BENCHMARKS = {"transactions": transactions}
