"""Comparisons on a shared machine: warm workers that alternately drain short loads.

Each side has its worker and its database. In a round all sides drain within a few seconds, in an order
that is reversed in every second round, so that varying load affects all sides. Results are judged by
medians of ratios within a round: ratios of the processor time per task, which depends little on load,
and on an idle machine also ratios of the rate. Several sessions with new processes show the differences
between processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from benchmarks.machine import MACHINE
from benchmarks.rounds import REPOSITORY, begin_round, heading, ratios

CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "2000"))
ROUNDS = int(os.environ.get("HORSIES_BENCH_ROUNDS", "10"))
SESSIONS = int(os.environ.get("HORSIES_BENCH_SESSIONS", "4"))
# The time limit; on a busy machine fewer rounds run in it, but at least two per session.
SECONDS = float(os.environ.get("HORSIES_BENCH_SECONDS", "480"))
# The number of series of calls timed in one process.
SERIES, CALLS = 300, 200
# Processor time covers the parent, the children, and the server processes that serve the worker.
METRICS = ("rate", "total_us", "parent_us", "children_us", "server_us")

# The figures of each side, by session and round.
Found = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: the environment of its processes, and its task."""

    environment: Mapping[str, str] = field(default_factory=dict)
    task: str = "noop"


def compare(url: str, sides: Mapping[str, Side]) -> Found:
    """Drain on all sides alternately, in several sessions that share the time."""
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in sides}
    began = time.monotonic()
    for session in range(SESSIONS):
        ends_at = began + SECONDS * (session + 1) / SESSIONS
        for name, runs in _session(url, sides, session, ends_at).items():
            found[name].append(runs)
    return found


def _session(
    url: str, sides: Mapping[str, Side], session: int, ends_at: float
) -> dict[str, list[dict[str, float]]]:
    names = rotated(list(sides), session)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        begin_round()
        workers = {name: stack.enter_context(_worker(url, sides[name])) for name in names}
        for done in range(ROUNDS):
            if done % 2 == 0 and done and time.monotonic() > ends_at:
                break
            for name in order(names, done):
                found[name].append(_ask(workers[name]))
    return found


def rotated(names: Sequence[str], places: int) -> list[str]:
    """Return the names rotated, so that no side always starts first."""
    first = places % len(names)
    return [*names[first:], *names[:first]]


def order(names: Sequence[str], done: int) -> list[str]:
    """Return the order of a round, reversed in every second round."""
    turned = rotated(names, done // 2)
    return turned[::-1] if done % 2 else turned


@contextmanager
def _worker(url: str, side: Side) -> Iterator[subprocess.Popen[str]]:
    """Run a process of ``benchmarks.repeated`` on a new database."""
    arguments = {"children": CHILDREN, "task": side.task, "count": TASKS}
    command = [sys.executable, "-m", "benchmarks.repeated", json.dumps(arguments)]
    with _database(url) as own:
        environment = {**os.environ, **side.environment, "HORSIES_DATABASE_URL": own}
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            _answer(process)
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _ask(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write("drain\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker of the comparison ended with {process.wait(60)}; see above")
    answer: dict[str, float] = json.loads(line)
    return answer


@contextmanager
def _database(url: str) -> Iterator[str]:
    """Yield an empty database of the server."""
    name = f"horsies_bench_{os.urandom(4).hex()}"
    drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(drop)


@dataclass(frozen=True, slots=True)
class Share:
    """The ratios of a metric to the base's metric per round, and the median of each session."""

    rounds: Sequence[float]
    sessions: Sequence[float]

    @classmethod
    def of(cls, found: Found, name: str, base: str, metric: str) -> Share:
        """Compare one side with the base."""
        pairs = zip(found[name], found[base], strict=True)
        parts = [ratios(runs, others, metric) for runs, others in pairs]
        return cls(
            [one for part in parts for one in part], [statistics.median(one) for one in parts]
        )

    @property
    def median(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.rounds)

    @property
    def middle(self) -> tuple[float, float]:
        """The range of the middle half of the ratios."""
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        low, high = self.middle
        return (
            f"{self.median:.3f} (half {low:.3f}-{high:.3f}, "
            f"all {min(self.rounds):.3f}-{max(self.rounds):.3f})"
        )


def report(title: str, found: Found, base: str) -> bool:
    """Print the medians of every side and their ratios to the base; return whether the machine was idle."""
    was_idle = not MACHINE.was_busy
    rounds = sum(map(len, found[base]))
    heading(
        f"{title}: {TASKS:,} tasks with {CHILDREN} children a round, {rounds} rounds in "
        f"{len(found[base])} sessions; medians, and ratios to {base} within a round"
    )
    for name, sessions in found.items():
        runs = [run for session in sessions for run in session]
        for metric in METRICS:
            value = statistics.median(run[metric] for run in runs)
            line = f"  {name if metric == METRICS[0] else '':<14}{metric:<12}{value:>9,.1f}"
            print(line + ("" if name == base else f"  x {_shares(found, name, base, metric)}"))
    return was_idle


def _shares(found: Found, name: str, base: str, metric: str) -> str:
    share = Share.of(found, name, base, metric)
    sessions = " ".join(f"{one:.3f}" for one in share.sessions)
    return f"{share}; sessions {sessions}"


def is_within(found: Found, name: str, base: str, allowed: float, *, was_idle: bool) -> bool:
    """Print and judge whether the side costs at most this share of a task's processor time and of the
    rate.

    On a busy machine, the rate depends on other processes and is not judged.
    """
    rate = Share.of(found, name, base, "rate").median
    total = Share.of(found, name, base, "total_us").median
    print(
        f"  target: {name} at most {1 + allowed:g} of the processor time of {base}, and on an idle machine "
        f"at least {1 - allowed:g} of its rate; measured {total:.3f} and {rate:.3f}"
    )
    return total <= 1 + allowed and (rate >= 1 - allowed or not was_idle)


def alone_us(call: Callable[[], object]) -> float:
    """Return the microseconds of a call in this process: the fastest of many short series, which is
    independent of load.
    """
    best = float("inf")
    for _ in range(SERIES):
        begun = time.process_time_ns()
        for _ in range(CALLS):
            call()
        best = min(best, (time.process_time_ns() - begun) / CALLS / 1_000)
    return best
