"""The cost of other queues: very short tasks of one queue, while other queues have tasks or had tasks."""

from __future__ import annotations

import os
import statistics
from functools import partial

from benchmarks.rounds import Checkout, alternate, heading, ratios, spread
from benchmarks.worker import costs

CHILDREN = 4
ROUNDS = 9
# A smaller number gives quick results on a busy machine.
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
ALONE = "one queue"
SITUATIONS = (ALONE, "a task has run", "a delayed task", "a run that waits", "five queues")
TARGET = 0.95
NEVER_REPLACED = ["--max-tasks-per-child", "0"]


def queues(url: str) -> bool:
    """Drain with one queue, and with queues of higher priority in several situations, in alternating
    rounds.
    """
    here = Checkout(url)
    arguments = {"children": CHILDREN, "count": TASKS, "flags": NEVER_REPLACED}
    found = alternate(
        {name: partial(here.measure, "queues", situation=name, **arguments) for name in SITUATIONS},
        ROUNDS,
    )
    heading(
        f"several queues, {CHILDREN} children, {TASKS:,} very short tasks, tasks/s, "
        f"median (min-max) of {ROUNDS}; in the first queue:"
    )
    good = True
    for name, runs in found.items():
        parts = ratios(runs, found[ALONE], "rate")
        rates = spread([run["rate"] for run in runs])
        target = "" if name == ALONE else f"  target {TARGET}"
        print(f"  {name:18}{rates:>26}  ratio {spread(parts, 2)}{target}")
        print(f"  {'':18}per task: {costs(runs)}")
        good &= name == ALONE or statistics.median(parts) >= TARGET
    return good


BENCHMARKS = {"queues": queues}
