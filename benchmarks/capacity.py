"""The number of tasks per second that one PostgreSQL can process: a model with few parameters, checked
against measurements.

A worker repeats turns. A turn records the tasks that have ended and claims new ones in one transaction,
the children run them, and the next turn begins. The processor time of a turn has a fixed part and a part
per task; drains of one worker with two and with eight children separate the two. Workers that share a
machine wait for its processors, and their commits wait for each other: a commit that notifies holds a
lock of the whole server until the log is flushed, so it shares no flush. ``turns_per_second`` converts
these times to a rate.

The benchmark calibrates the model with one worker, predicts the rates of several workers with
synchronous_commit on, off and waiting for a real standby, and compares them with measurements. The last table
extrapolates to machines that were not measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psycopg
from tests.support.replicated_server import ReplicatedServer

from benchmarks.rounds import Checkout, begin_round, heading, median, spread
from horsies.db.migrate import apply_migrations

ROUNDS = int(os.environ.get("HORSIES_BENCH_ROUNDS", "3"))
WORKERS = (2, 4, 8, 16)
# The number of workers in the measurements with other kinds of commits.
FEW_WORKERS = (2, 8)
CHILDREN = 2
MANY_CHILDREN = 8
TASKS = 4_000
COMMITS = 400
KINDS = {"strict": "noop", "burst": "burst", "chains": "chain"}
# The maximum error of a useful prediction.
ERROR_MAX = 0.20
LARGER_CORES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Line:
    """The microseconds of a turn: a fixed part, and a part for each task in the turn."""

    fixed: float
    per_task: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """Fit the model to two measurements, each with the number of tasks per turn and the microseconds
        per task.
        """
        (few_tasks, few_us), (many_tasks, many_us) = few, many
        if many_tasks - few_tasks < 1:
            return cls(0.0, (few_us + many_us) / 2)
        slope = (many_us * many_tasks - few_us * few_tasks) / (many_tasks - few_tasks)
        per_task = min(max(slope, 0.0), many_us)
        return cls((many_us - per_task) * many_tasks, per_task)

    def turn(self, tasks: float) -> float:
        """Return the microseconds of a turn with this many tasks."""
        return self.fixed + self.per_task * tasks


@dataclass(frozen=True, slots=True)
class Cost:
    """The processor time of one kind of task, and the number of these tasks per turn."""

    parent: Line
    server: Line
    child_us: float
    few_tasks: float
    many_tasks: float

    @classmethod
    def of(cls, few: Mapping[str, float], many: Mapping[str, float]) -> Cost:
        """Build the cost from the drains of a worker with few and with many children."""
        sizes = (1 / few["commits"], 1 / many["commits"])
        lines = [
            Line.through((sizes[0], few[name]), (sizes[1], many[name]))
            for name in ("parent_us", "server_us")
        ]
        return cls(lines[0], lines[1], (few["children_us"] + many["children_us"]) / 2, *sizes)

    def tasks_of_turn(self, children: int) -> float:
        """Return the number of tasks per turn, interpolated or extrapolated from the two measured sizes."""
        if children <= CHILDREN:
            return self.few_tasks * children / CHILDREN
        grown = (self.many_tasks - self.few_tasks) / (MANY_CHILDREN - CHILDREN)
        return self.few_tasks + grown * (min(children, MANY_CHILDREN) - CHILDREN)


def tasks_per_second(
    cost: Cost, *, cores: int, workers: int, children: int, flush_us: float
) -> float:
    """Predict the rate of workers that share a machine with the server."""
    tasks = cost.tasks_of_turn(children)
    serial = cost.parent.turn(tasks) + cost.server.turn(tasks)
    running = cost.child_us * tasks
    alone = serial + running / min(children, cores, max(tasks, 1.0)) + flush_us
    return tasks * turns_per_second(
        workers, busy_us=serial + running, alone_us=alone, flush_us=flush_us, cores=cores
    )


def turns_per_second(
    workers: int, *, busy_us: float, alone_us: float, flush_us: float, cores: int
) -> float:
    """Apply mean value analysis to a closed network: a station for the processors, a station that
    flushes commits one after the other, and the rest of a turn as an unshared delay.
    """
    share = busy_us / cores
    delay = max(alone_us - share - flush_us, 0.0)
    at_processors = at_flush = rate = 0.0
    for present in range(1, workers + 1):
        processing = share * (1 + at_processors)
        flushing = flush_us * (1 + at_flush)
        rate = present / (delay + processing + flushing)
        at_processors, at_flush = rate * processing, rate * flushing
    return rate * 1e6


def flush_us(url: str) -> float:
    """Return the microseconds that a commit waits for the log, with the settings of this database."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TEMPORARY TABLE flushed (number int)")
        waited = _commit_us(connection)
        connection.execute("SET synchronous_commit = off")
        return max(waited - _commit_us(connection), 0.0)


def _commit_us(connection: psycopg.Connection[object]) -> float:
    taken = []
    for number in range(COMMITS):
        begun = time.perf_counter()
        connection.execute("SELECT pg_logical_emit_message(true, 'capacity', %s)", (str(number),))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """One prediction with the measured rates."""

    commits: str
    kind: str
    workers: int
    predicted: float
    measured: Sequence[float]

    @property
    def error(self) -> float:
        """The distance of the prediction from the median, as a fraction of the median."""
        return self.predicted / statistics.median(self.measured) - 1


def capacity(url: str) -> bool:
    """Calibrate the model with one worker, then compare its predictions with fleets on this machine."""
    costs = {kind: _calibrate(Checkout(url), task) for kind, task in KINDS.items()}
    points = _compare("on", url, costs, WORKERS)
    _set_commit(url, "off")
    points += _compare("off", url, costs, FEW_WORKERS)
    _set_commit(url, "on")
    with ReplicatedServer() as replicated:
        standby_url = replicated.primary.url
        with psycopg.connect(standby_url, autocommit=True) as connection:
            apply_migrations(connection)
        _set_commit(standby_url, "remote_apply")
        points += _compare("standby", standby_url, costs, FEW_WORKERS)
    _print_costs(costs)
    _print_points(points)
    _print_larger(costs, flush_us(url))
    return all(abs(point.error) <= ERROR_MAX for point in points)


def _calibrate(checkout: Checkout, task: str) -> Cost:
    """Drain alternately with a worker that has few children and a worker that has many."""
    runs: dict[int, list[dict[str, float]]] = {CHILDREN: [], MANY_CHILDREN: []}
    for _ in range(ROUNDS):
        for children, found in runs.items():
            found.append(checkout.measure("drain", children=children, task=task, count=TASKS))
    few, many = ({name: median(found, name) for name in found[0]} for found in runs.values())
    return Cost.of(few, many)


def _compare(
    commits: str, url: str, costs: Mapping[str, Cost], sizes: Sequence[int]
) -> list[Point]:
    cores = os.cpu_count() or 1
    begin_round()
    flush = flush_us(url)
    points = []
    for workers in sizes:
        found = [
            Checkout(url).measure(
                "fleet",
                workers=workers,
                children=CHILDREN,
                count=TASKS,
                drained=list(KINDS.values()),
                sends=0,
                kills=0,
                idle_seconds=0,
            )
            for _ in range(ROUNDS)
        ]
        for kind, task in KINDS.items():
            predicted = tasks_per_second(
                costs[kind], cores=cores, workers=workers, children=CHILDREN, flush_us=flush
            )
            rates = [run[f"{task}_rate"] for run in found]
            points.append(Point(f"{commits}, {flush:.0f} µs", kind, workers, predicted, rates))
    return points


def _set_commit(url: str, setting: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT current_database()").fetchone()
        assert row is not None
        connection.execute(f'ALTER DATABASE "{row[0]}" SET synchronous_commit = {setting}')


def _print_costs(costs: Mapping[str, Cost]) -> None:
    heading(
        f"processor µs, calibrated with one worker of {CHILDREN} and of {MANY_CHILDREN} children"
    )
    for kind, cost in costs.items():
        print(
            f"  {kind:8} turn of {cost.few_tasks:.1f} and {cost.many_tasks:.1f} tasks; "
            f"parent {cost.parent.fixed:.0f} + {cost.parent.per_task:.0f} per task, "
            f"server {cost.server.fixed:.0f} + {cost.server.per_task:.0f} per task, child {cost.child_us:.0f}"
        )


def _print_points(points: Sequence[Point]) -> None:
    heading(
        f"tasks/s of workers with {CHILDREN} children each, predicted and measured, median (min-max) of "
        f"{ROUNDS}"
    )
    print(
        f"  {'commit waits':22}{'tasks':8}{'workers':>8}{'predicted':>11}{'measured':>26}{'error':>8}"
    )
    for point in points:
        print(
            f"  {point.commits:22}{point.kind:8}{point.workers:>8}{point.predicted:>11,.0f}"
            f"{spread(point.measured):>26}{point.error:>+8.0%}"
        )
    worst = max(points, key=lambda point: abs(point.error))
    print(f"  largest error {worst.error:+.0%}, allowed {ERROR_MAX:.0%}")


def _print_larger(costs: Mapping[str, Cost], flush: float) -> None:
    heading(
        "extrapolated, not measured: tasks/s with server and workers on one machine, a worker of "
        f"{MANY_CHILDREN} children for every second core"
    )
    for kind, cost in costs.items():
        cells = []
        for cores in LARGER_CORES:
            for waits in (flush, 1_000.0):
                rate = tasks_per_second(
                    cost, cores=cores, workers=cores // 2, children=MANY_CHILDREN, flush_us=waits
                )
                cells.append(f"{rate:>9,.0f}")
        print(f"  {kind:8}" + "".join(cells))
    titles = [f"{cores} cores: flush {flush:.0f} µs, 1,000 µs" for cores in LARGER_CORES]
    print(f"  columns: {'; '.join(titles)}")


BENCHMARKS = {"capacity": capacity}
