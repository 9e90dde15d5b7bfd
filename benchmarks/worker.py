"""The figures of a worker: throughput, recycling and latency, each compared with bare SQL in the same
run.
"""

from __future__ import annotations

import os
import selectors
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
from psycopg import Connection

from benchmarks import figures, lifecycle
from benchmarks.figures import percentile
from benchmarks.rounds import Checkout, alternate, begin_round, heading, median, ratios, spread
from horsies.db.statements.turn import ClaimTasks, CompleteTasks, claim_tasks, complete_tasks
from horsies.ids import new_id
from horsies.worker.connection import TURN_SETTINGS

CHILDREN = (2, 4, 8)
TASKS = 10_000
ROUNDS = 3
LATENCY_SENDS = 300
TARGETS = {2: 0.30, 4: 0.45, 8: 0.65}
RECYCLING_CHILDREN = 4
# The task, the number of tasks, and the fraction of the rate without recycling that must remain.
# With no-op tasks, the worker replaces 24 processes a second, so they have no target.
RECYCLED = (("noop", 12_000, None), ("nap_1", 6_000, 0.95), ("burst", 30_000, 0.90))
LATENCY_TARGETS = (3.0, 6.0)


def connect(url: str) -> Connection[Any]:
    """Open a connection with a worker's settings."""
    return psycopg.connect(url, autocommit=True, prepare_threshold=0, options=TURN_SETTINGS)


@contextmanager
def running_worker(
    url: str, children: int, *flags: str, application: str = "benchmarks.noop_app:app"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker on this database until the block ends."""
    os.environ["HORSIES_DATABASE_URL"] = url
    with figures.running_worker(children, *flags, application=application) as process:
        yield process


def drain(
    url: str, children: int, count: int, *flags: str, task_name: str = "noop"
) -> dict[str, float]:
    """Let a warm worker drain preloaded tasks; return tasks/s and the cost of each task."""
    arguments = {"children": children, "task": task_name, "count": count, "flags": flags}
    return Checkout(url).measure("drain", **arguments)


def throughput(url: str) -> bool:
    """Compare drains by 2, 4 and 8 children with bare SQL in the same batch sizes."""
    bare: dict[tuple[str, int], list[float]] = {}
    drained: dict[int, list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for children in CHILDREN:
            count = TASKS
            for name, run in (("apart", lifecycle.two_commits), ("turn", lifecycle.one_turn)):
                begin_round()
                bare.setdefault((name, children), []).append(bare_rate(url, run, children, count))
            drained.setdefault(children, []).append(
                drain(url, children, count, "--max-tasks-per-child", "0")
            )
    yardstick = statistics.median(bare["apart", 8])
    heading(
        f"drain of no-op tasks, median (min-max) of {ROUNDS}; yardstick = bare SQL, batches of 8"
    )
    print(
        f"  {'':12}{'bare, 2 commits':>26}{'bare, 1 turn':>26}{'worker':>26}{'ratio':>8}{'target':>8}"
    )
    good = True
    for children in CHILDREN:
        rates = [one["rate"] for one in drained[children]]
        ratio = statistics.median(rates) / yardstick
        good &= ratio >= TARGETS[children]
        print(
            f"  {children} children{'':2}{spread(bare['apart', children]):>26}"
            f"{spread(bare['turn', children]):>26}{spread(rates):>26}{ratio:>8.2f}"
            f"{TARGETS[children]:>8.2f}"
        )
    for children in CHILDREN:
        print(f"  {children} children, per task: {costs(drained[children])}")
    return good


def costs(runs: Sequence[dict[str, float]]) -> str:
    """Format the cost of a task for the server and the processors, as medians."""
    processor = ", ".join(
        f"{who} {median(runs, f'{who}_us'):.0f}" for who in ("parent", "children", "server")
    )
    return (
        f"{median(runs, 'commits'):.3f} commits and round trips, "
        f"{median(runs, 'wal_bytes'):,.0f} B of WAL, processor µs: {processor}"
    )


def bare_rate(
    url: str, run: Callable[[Connection[Any], int, int], float], batch: int, count: int
) -> float:
    """Drain loaded tasks with bare SQL; return tasks per second."""
    with connect(url) as connection:
        lifecycle.load(connection, count)
        return run(connection, batch, count)


def recycling(url: str) -> bool:
    """Compare drains with children replaced every 100 tasks or never: no-op tasks, tasks of 1 ms,
    windows.
    """
    checks = [_recycled(Checkout(url), *one) for one in RECYCLED]
    return all(checks)


def _recycled(here: Checkout, task: str, count: int, target: float | None) -> bool:
    variants = {
        name: partial(
            here.measure,
            "drain",
            children=RECYCLING_CHILDREN,
            task=task,
            count=count,
            flags=["--max-tasks-per-child", limit],
        )
        for name, limit in (("never", "0"), ("every 100", "100"))
    }
    found = alternate(variants, ROUNDS)
    heading(
        f"recycling, {RECYCLING_CHILDREN} children, {count:,} tasks {task!r}, "
        f"median (min-max) of {ROUNDS}"
    )
    for name, runs in found.items():
        rates = spread([run["rate"] for run in runs])
        print(f"  {name:12}{rates:>26} tasks/s, per task: {costs(runs)}")
    parts = ratios(found["every 100"], found["never"], "rate")
    aim = "" if target is None else f", target {target}"
    print(f"  every 100 / never: {spread(parts, 2)}{aim}")
    return target is None or statistics.median(parts) >= target


def latency(url: str) -> bool:
    """Send one task and wait for its result, hundreds of times, compared with the same sequence in bare
    SQL.
    """
    variants: dict[str, Callable[[], dict[str, float]]] = {
        "bare": partial(_bare_latency, url),
        "worker": partial(Checkout(url).measure, "latency", sends=LATENCY_SENDS),
    }
    found = alternate(variants, ROUNDS)
    heading(f"latency of {LATENCY_SENDS} sends on an idle worker, ms, median (min-max) of {ROUNDS}")
    good = True
    for name, target in zip(("p50", "p99"), LATENCY_TARGETS, strict=True):
        bare, ours = ([run[f"{name}_ms"] for run in found[side]] for side in variants)
        ratio = statistics.median(ours) / statistics.median(bare)
        good &= ratio <= target
        print(
            f"  {name}  bare {spread(bare, 2)}  worker {spread(ours, 2)}"
            f"  ratio {ratio:.2f} (target {target:.0f})"
        )
    return good


def _bare_latency(url: str) -> dict[str, float]:
    begin_round()
    taken = []
    with connect(url) as sender, connect(url) as receiver:
        lifecycle.load(sender, 0)
        receiver.execute("LISTEN bare_done")
        with selectors.DefaultSelector() as selector:
            selector.register(receiver.pgconn.socket, selectors.EVENT_READ)
            for _ in range(LATENCY_SENDS):
                started = time.perf_counter()
                _bare_sequence(sender)
                selector.select(10)
                assert any(receiver.notifies(timeout=10, stop_after=1))
                taken.append(time.perf_counter() - started)
    return {f"p{percent}_ms": percentile(taken, percent) * 1000 for percent in (50, 99)}


def _bare_sequence(connection: Connection[Any]) -> None:
    lifecycle.insert(connection, [new_id()])
    (task,) = claim_tasks.run(connection, ClaimTasks("bare", "host", [1], ["default"], [1]))
    complete_tasks.run(
        connection, CompleteTasks("bare", [task.id], [task.generation], [lifecycle.RESULT])
    )
    connection.execute("SELECT pg_notify('bare_done', '')")


BENCHMARKS = {"throughput": throughput, "recycling": recycling, "latency": latency}
