"""DBOS: durable workflows in the threads of one process, on PostgreSQL."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from dbos import DBOS, DBOSConfig

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

PAGE = "https://docs.dbos.dev/python/reference/queues"
QUEUE = "bench"

FACTS = Facts(
    package="dbos",
    servers=("PostgreSQL",),
    isolates="no: threads in one process",
    results="yes, with the row of the workflow",
    durable="yes: PostgreSQL, synchronous commits",
    bulk=False,
    choices=(
        Choice("worker_concurrency = slots", "workflows of a queue per process", PAGE),
        Choice(
            "polling_interval_sec = 0.005",
            "queues are only polled; the default of a second would be the rate and the latency",
            PAGE,
        ),
        Choice("get_result(polling_interval_sec=0.001)", "waiting for a result also polls", PAGE),
    ),
)


@DBOS.workflow(name="noop")
def noop(number: int) -> int:
    """Do nothing."""
    return number


@DBOS.workflow(name="nap")
def nap(number: int) -> None:
    """Wait for 5 ms."""
    peer.nap(number)


@DBOS.workflow(name="mark")
def mark(number: int) -> None:
    """Record start and end, or crash."""
    peer.mark(number)


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def _launch(*listen: str) -> None:
    url = os.environ[peer.DATABASE].replace("postgresql://", "postgresql+psycopg://", 1)
    config: DBOSConfig = {
        "name": "peers",
        "system_database_url": url,
        "log_level": "ERROR",
        "application_version": "1",
    }
    DBOS(config=config)
    DBOS.listen_queues(listen)
    DBOS.launch()


def _register(slots: int) -> None:
    # A worker starts with the configured polling interval and shortens it by a tenth per poll,
    # which takes ten seconds from the default of a second. Without a limit, it would fetch the
    # whole queue in one query.
    DBOS.register_queue(
        QUEUE, worker_concurrency=slots, polling_interval_sec=0.005, on_conflict="always_update"
    )


def set_up() -> None:
    """Apply the migrations by launching DBOS."""
    _launch()
    DBOS.destroy()


def enqueue(task: str, count: int) -> float:
    """Send one by one."""
    _launch()
    _register(1)

    def send(number: int) -> None:
        DBOS.enqueue_workflow(QUEUE, TASKS[task], number)

    try:
        return peer.send_each(send, count)
    finally:
        DBOS.destroy()


# DBOS has no bulk call.
enqueue_many = enqueue


def latencies(count: int) -> list[float]:
    """Poll for the result."""
    _launch()

    def call() -> None:
        handle = DBOS.enqueue_workflow(QUEUE, noop, 1)
        handle.get_result(polling_interval_sec=peer.POLL_SECONDS)

    try:
        return peer.wait_each(call, count)
    finally:
        DBOS.destroy()


def count_done(sent: int) -> int:
    """Count finished workflows."""
    return peer.count_rows("SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'")


def crash_state() -> str:
    """Read the rows that are not finished."""
    with peer.database() as connection:
        row = connection.execute(
            "SELECT status FROM dbos.workflow_status WHERE status <> 'SUCCESS' "
            "ORDER BY status = 'PENDING' DESC LIMIT 1"
        ).fetchone()
    return str(row[0]) if row else "gone"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the worker as a library, because DBOS has no command for it."""
    return peer.worker_of_adapter("dbos", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    _launch(QUEUE)
    _register(slots)
    stopped.wait()
    DBOS.destroy()
