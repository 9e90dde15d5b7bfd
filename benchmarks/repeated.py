"""A worker that drains one short load after another: ``python -m benchmarks.repeated ARGUMENTS``.

Each line on standard input requests one drain, and its figures are printed as one line of JSON. A
comparison keeps one such process per side, to alternate between warm workers within a second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from psycopg import Connection

from benchmarks import figures

NEVER_REPLACED = ("--max-tasks-per-child", "0", "--quiet-tasks", "--loglevel", "warning")
WARM_UPS = 200
# The number of tries, because a worker polls every few seconds, possibly during a preload.
TRIES = 5
STARTED = "SELECT count(*) FROM horsies_tasks WHERE status <> 'PENDING' OR claimed_at IS NOT NULL"
BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
LOCAL_PROCESSES = Path("/proc")


def main(children: int, task: str, count: int) -> None:
    """Start a worker and run one drain for each line on standard input."""
    app = figures._application()
    with (
        figures._connection() as connection,
        figures.running_worker(children, *NEVER_REPLACED) as worker,
    ):
        figures._warm_up(connection, getattr(app, task), WARM_UPS)
        for found in _drains(connection, worker, lambda: figures._load(app, task, count), count):
            print(json.dumps(found), flush=True)


def _drains(
    connection: Connection[Any], worker: Any, load: Callable[[], None], count: int
) -> Iterable[dict[str, float]]:
    yield {}
    for _ in sys.stdin:
        _preload(connection, load)
        yield _drain(connection, worker, count)


def _preload(connection: Connection[Any], load: Callable[[], None]) -> None:
    """Store the tasks without notifying the worker; try again if the worker found them anyway."""
    for _ in range(TRIES):
        with figures._preloading(connection):
            load()
        if not figures._number(connection, STARTED):
            return
        time.sleep(1)  # The worker is still running tasks, which the next try removes.
    raise TimeoutError("the worker found the tasks before it was told of them, again and again")


def _drain(connection: Connection[Any], worker: Any, count: int) -> dict[str, float]:
    before = _processor_us(connection, worker.pid) | figures.counters(connection)
    connection.execute("SELECT pg_notify('task_queue_default', '')")
    figures.wait_for(connection, count, worker)
    after = _processor_us(connection, worker.pid) | figures.counters(connection)
    spent = {name: (after[name] - before[name]) / count for name in before}
    spent["total_us"] = spent["parent_us"] + spent["children_us"] + spent["server_us"]
    rate = count / figures._number(connection, figures.DRAIN_SECONDS, count)
    return {"rate": rate, **spent}


def _processor_us(connection: Connection[Any], worker_pid: int) -> dict[str, float]:
    """Return the processor time of the worker's parent, of its children, and of the server for this
    database.
    """
    children = psutil.Process(worker_pid).children(recursive=True)
    backends = [row[0] for row in connection.execute(BACKENDS).fetchall()]
    return {
        "parent_us": _exact_us(worker_pid),
        "children_us": sum(_exact_us(child.pid) for child in children),
        "server_us": sum(map(_exact_us, backends)),
    }


def _exact_us(pid: int) -> float:
    """Return the processor time of a process in microseconds, from the kernel scheduler's count of
    nanoseconds.

    ``psutil`` has a resolution of 10 ms, a fiftieth of a short drain.
    """
    threads = (LOCAL_PROCESSES / str(pid) / "task").iterdir()
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1_000


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
