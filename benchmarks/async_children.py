"""The throughput of async children: ten thousand tasks that sleep one second, in four processes.

One task blocks its loop for longer than a second, and the worker must report this task. The time is
measured from the first start to the last finish.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from psycopg import Connection

from benchmarks.worker import connect
from horsies.ids import new_id

TASKS, CHILDREN, SLOTS = 10_000, 4, 250
SECONDS_TARGET = 15.0

INSERT = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, task_options, enqueue_sha)
SELECT id, %s, 'default', 100, '[]', '{}', now(),
    '{"async":true,"retry_policy":null,"good_until":null}', repeat('a', 64)
FROM unnest(%s::uuid[]) AS id
"""
OPEN = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
SPAN = "SELECT extract(epoch FROM max(completed_at) - min(started_at)) FROM horsies_tasks"
FAILED = "SELECT count(*) FROM horsies_tasks WHERE status <> 'COMPLETED'"
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'horsies%'"


class Measured(NamedTuple):
    """One run: its duration, the worker's database connections, and the processor seconds of parent and
    children.
    """

    seconds: float
    connections: int
    parent_seconds: float
    children_seconds: float
    names_blocking_task: bool


def measure(url: str, tasks: int, children: int, slots: int) -> Measured:
    """Let a worker with async children drain this many sleeping tasks, one of which blocks its loop."""
    command = [sys.executable, "-m", "horsies", "worker", "benchmarks.newer_app:app"]
    command += ["--processes", "0", "--async-children", str(children), "--async-slots", str(slots)]
    environment = {**os.environ, "HORSIES_DATABASE_URL": url}
    with connect(url) as connection, tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        with log.open("wb") as file:
            worker = subprocess.Popen(
                [*command, "--quiet-tasks"], env=environment, stdout=file, stderr=file
            )
        try:
            _wait(worker, lambda: "listening on" in log.read_text())
            return _drain(connection, worker, tasks)._replace(
                names_blocking_task="task 'blocking_nap' has blocked" in log.read_text()
            )
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)


def _drain(connection: Connection[Any], worker: subprocess.Popen[bytes], tasks: int) -> Measured:
    before = _processor_seconds(worker.pid)
    connection.execute(INSERT, ("sleeping_nap", [new_id() for _ in range(tasks - 1)]))
    connection.execute(INSERT, ("blocking_nap", [new_id()]))
    connections = 0

    def is_drained() -> bool:
        nonlocal connections
        connections = max(connections, _number(connection, SESSIONS))
        return int(_number(connection, OPEN)) == 0

    _wait(worker, is_drained)
    after = _processor_seconds(worker.pid)
    failed = _number(connection, FAILED)
    assert not failed, f"{failed} tasks failed"
    parent, children = after[0] - before[0], after[1] - before[1]
    return Measured(float(_number(connection, SPAN)), connections, parent, children, False)


def _wait(
    worker: subprocess.Popen[bytes], is_done: Callable[[], bool], seconds: float = 180.0
) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert worker.poll() is None, "the worker has ended"
        assert time.monotonic() < deadline, f"not done within {seconds:g} s"
        time.sleep(0.2)


def _number(connection: Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def _processor_seconds(pid: int) -> tuple[float, float]:
    """Return the processor time of the parent and its live children."""
    parent = psutil.Process(pid)
    times = [sum(one.cpu_times()[:2]) for one in (parent, *parent.children(recursive=True))]
    return times[0], sum(times[1:])


def sleepers(url: str) -> bool:
    """Drain ten thousand coroutines that sleep for a second; print seconds, connections, processor time."""
    done = measure(url, TASKS, CHILDREN, SLOTS)
    print(f"\nasync children: {TASKS:,} tasks of 1 s, {CHILDREN} children of {SLOTS} slots")
    print(
        f"  {done.seconds:.1f} s (at most {SECONDS_TARGET:g}; {TASKS / CHILDREN / SLOTS:g} possible)"
    )
    print(f"  {done.connections} database connection(s) of the worker (at most 1)")
    print(
        f"  processor: parent {done.parent_seconds / TASKS * 1e6:.0f}, children "
        f"{done.children_seconds / TASKS * 1e6:.0f} us per task"
    )
    print(
        f"  the blocking task is {'named' if done.names_blocking_task else 'NOT named'} in the log"
    )
    is_met = done.seconds <= SECONDS_TARGET and done.connections == 1
    return is_met and done.names_blocking_task


BENCHMARKS: dict[str, Callable[[str], bool]] = {"async": sleepers}
