"""RQ: workers that fork a process for each task."""

from __future__ import annotations

import os
from collections.abc import Sequence

from redis import Redis
from rq import Queue
from rq.worker_pool import WorkerPool

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

FACTS = Facts(
    package="rq",
    servers=("Redis",),
    isolates="yes: a new process per task",
    results="yes, in Redis",
    durable="no: as durable as Redis is set up",
    choices=(
        Choice(
            "WorkerPool(num_workers=slots)",
            "the documented way to run several workers on one machine",
            "https://python-rq.org/docs/workers/#worker-pool",
        ),
        Choice(
            "tasks imported before the pool starts",
            "`rq worker-pool` would import them in each new process, for every task",
            "https://python-rq.org/docs/workers/#performance-notes",
        ),
        Choice(
            "the default worker class",
            "SimpleWorker is faster, but runs tasks in the worker's own process",
            "https://python-rq.org/docs/workers/#performance-notes",
        ),
        Choice("result_ttl: default", "500 seconds", "https://python-rq.org/docs/results/"),
    ),
)

# The time limit of the client must exceed the wait for a result, which blocks.
queue = Queue(connection=Redis.from_url(os.environ[peer.REDIS], socket_timeout=60))


def noop(number: int) -> int:
    """Do nothing."""
    return number


def nap(number: int) -> None:
    """Wait for 5 ms."""
    peer.nap(number)


def mark(number: int) -> None:
    """Record start and end, or crash."""
    peer.mark(number)


TASKS = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Do nothing, because Redis was emptied before."""


def enqueue(task: str, count: int) -> float:
    """Send one by one."""
    return peer.send_each(lambda number: queue.enqueue(TASKS[task], number), count)


def enqueue_many(task: str, count: int) -> float:
    """Send all tasks in one pipeline."""
    queue.connection.ping()
    return peer.timed(
        lambda: queue.enqueue_many(
            [Queue.prepare_data(TASKS[task], (number,)) for number in range(count)]
        )
    )


def latencies(count: int) -> list[float]:
    """Block on the result's stream."""
    return peer.wait_each(lambda: queue.enqueue(noop, 1).latest_result(timeout=20), count)


def count_done(sent: int) -> int:
    """Count finished jobs."""
    return int(queue.finished_job_registry.get_job_count(cleanup=False))


def crash_state() -> str:
    """Count failed jobs."""
    failed = queue.failed_job_registry.get_job_ids(cleanup=False)
    started = queue.started_job_registry.get_job_ids(cleanup=False)
    return "failed" if failed else "still started" if started else "no trace"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the pool as a library, so that the tasks are imported before it forks."""
    return peer.worker_of_adapter("rq", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""
    WorkerPool([queue], queue.connection, num_workers=slots).start(logging_level="WARNING")
