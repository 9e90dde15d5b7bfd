"""The cost of many workers together: a figure of ``benchmarks.figures`` over a fleet of worker processes.

Processor time is read from the kernel scheduler's statistics in nanoseconds, because an idle worker uses
less per second than the usual resolution of 10 ms. The commits include those of listening sessions that
a notification wakes.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from psycopg import Connection

READY_SECONDS = 240.0
# The number of workers to start at the same time; each start takes about half a second of a core.
STARTS = 4
# The time after which the first polls of all workers have finished. A session adds its commits to
# the server's counter with its next heartbeat.
SETTLE_SECONDS = 5.0
COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
LIVING = "SELECT count(*) FROM horsies_workers WHERE stopped_at IS NULL"
OWNER = """
SELECT worker.pid FROM horsies_tasks AS task
JOIN horsies_workers AS worker ON worker.worker_id = task.claimed_by_worker_id
WHERE task.id = %s AND task.status = 'RUNNING'
"""


class Fleet:
    """Worker processes of the benchmarks' application, with the server that they share."""

    def __init__(
        self, connection: Connection[Any], children: int, flags: Sequence[str], application: str
    ) -> None:
        self._connection = connection
        self._application = application
        self._flags = ["--processes", str(children), "--loglevel", "ERROR", *flags]
        self.processes: list[subprocess.Popen[bytes]] = []
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        self._server = parent_of(row[0])

    def grow(self, size: int) -> None:
        """Start workers, a few at a time, until this many are registered."""
        deadline = time.monotonic() + READY_SECONDS
        while (living := self._number(LIVING)) < size:
            if len(self.processes) < min(size, living + STARTS):
                command = [sys.executable, "-m", "horsies", "worker", self._application]
                self.processes.append(subprocess.Popen([*command, *self._flags]))
            else:
                time.sleep(0.1)
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {living} of {size} workers have started")

    def stop(self) -> None:
        """Stop all workers and wait until they have ended."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(60)

    def processor_seconds(self) -> dict[str, float]:
        """Return the processor seconds of the server, the workers and their children so far."""
        workers = [psutil.Process(one.pid) for one in self.processes if one.poll() is None]
        return {
            "server": used_seconds(self._server),
            "workers": sum(map(used_seconds, workers)),
        }

    def commits(self) -> float:
        """Return the number of commits of the database so far."""
        return self._number(COMMITS)

    def kill_owner(self, task_id: str) -> float:
        """Kill the worker that runs a task; return the seconds until the worker no longer owns the task."""
        pid = None
        while pid is None:
            row = self._connection.execute(OWNER, (task_id,)).fetchone()
            pid = row[0] if row else None
        killed = next(one for one in self.processes if one.pid == pid)
        killed.kill()
        started = time.monotonic()
        killed.wait()
        self.processes.remove(killed)
        while self._connection.execute(OWNER, (task_id,)).fetchone() == (pid,):
            if time.monotonic() - started > 60:
                raise TimeoutError(f"the task {task_id} was not recovered")
            time.sleep(0.005)
        return time.monotonic() - started

    def _number(self, query: str) -> float:
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return float(row[0])


def parent_of(pid: int) -> psutil.Process:
    """Return the parent of the process with this number."""
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


@contextmanager
def running_fleet(
    connection: Connection[Any],
    size: int,
    children: int,
    flags: Sequence[str] = (),
    application: str = "benchmarks.newer_app:app",
) -> Iterator[Fleet]:
    """Run this many workers until the block ends."""
    connection.execute("TRUNCATE horsies_tasks, horsies_workers CASCADE")
    fleet = Fleet(connection, children, flags, application)
    try:
        fleet.grow(size)
        yield fleet
    finally:
        fleet.stop()


def idle(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Let the workers wait for tasks: commits per second, and shares of a core in percent."""
    time.sleep(SETTLE_SECONDS)
    commits, before = fleet.commits(), fleet.processor_seconds()
    time.sleep(seconds)
    after = fleet.processor_seconds()
    return {
        "idle_commits": (fleet.commits() - commits) / seconds,
        "idle_server_percent": (after["server"] - before["server"]) / seconds * 100,
        "idle_workers_percent": (after["workers"] - before["workers"]) / seconds * 100,
    }


def single_sends(fleet: Fleet, function: Any, sends: int) -> dict[str, float]:
    """Send tasks one by one, each after the previous result: milliseconds and processor time."""
    for _ in range(20):
        assert function.send().unwrap().get(timeout_ms=20_000).is_ok()
    taken = list[float]()
    before = fleet.processor_seconds()
    for _ in range(sends):
        started = time.perf_counter()
        assert function.send().unwrap().get(timeout_ms=20_000).is_ok()
        taken.append(time.perf_counter() - started)
    after = fleet.processor_seconds()
    quantiles = statistics.quantiles(taken, n=100, method="inclusive")
    return {
        "p50_ms": quantiles[49] * 1000,
        "p99_ms": quantiles[98] * 1000,
        "server_ms": (after["server"] - before["server"]) / sends * 1000,
        "workers_ms": (after["workers"] - before["workers"]) / sends * 1000,
    }


def recovery_seconds(fleet: Fleet, function: Any, kills: int) -> list[float]:
    """Kill workers that run a task, one after the other; return the seconds until each task is
    recovered.
    """
    taken = list[float]()
    size = len(fleet.processes)
    for _ in range(kills):
        handle = function.send(30.0).unwrap()
        taken.append(fleet.kill_owner(handle.task_id))
        assert handle.cancel().is_ok()
        fleet.grow(size)
    return taken


def used_seconds(process: psutil.Process) -> float:
    """Return the processor seconds of a process and its living descendants."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += int(Path(f"/proc/{one.pid}/schedstat").read_text().split()[0])
        except FileNotFoundError:  # The process has ended since it was listed.
            continue
    return total / 1e9
