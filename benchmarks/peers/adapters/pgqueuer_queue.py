"""PgQueuer: coroutines in one process, on PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.core.completion import CompletionWatcher
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

GUIDE = "https://pgqueuer.readthedocs.io/en/latest"

FACTS = Facts(
    package="pgqueuer",
    servers=("PostgreSQL",),
    isolates="no: coroutines in one process",
    results="no: the outcome in a log table only",
    durable="yes: PostgreSQL, synchronous commits",
    choices=(
        Choice("asyncpg driver, uvloop", "the fastest documented pair", f"{GUIDE}/"),
        Choice(
            "batch_size = slots, at least 10; no max_concurrent_tasks",
            "10 is the default, and no-op tasks gain nothing from a limit",
            f"{GUIDE}/",
        ),
        Choice(
            "5 ms tasks: max_concurrent_tasks = 8, batch_size = 4",
            "as many at a time as the others; a batch may be half of it at most",
            f"{GUIDE}/",
        ),
        Choice(
            "result: batch_size = 1",
            "the outcome is written when a batch is complete, or after 100 ms, which would be the latency",
            f"{GUIDE}/",
        ),
        Choice(
            "CompletionWatcher(debounce=0)",
            "the default of 50 ms would be the latency",
            f"{GUIDE}/",
        ),
    ),
)


def set_up() -> None:
    """Install the schema."""

    async def run(queries: Any) -> None:
        await queries.install()

    _with_queries(run)


def enqueue(task: str, count: int) -> float:
    """Send one by one."""

    async def run(queries: Any) -> float:
        return await peer.send_each_async(
            lambda number: queries.enqueue(task, str(number).encode()), count
        )

    return float(_with_queries(run))


def enqueue_many(task: str, count: int) -> float:
    """Send all tasks in one statement."""

    async def run(queries: Any) -> float:
        started = asyncio.get_running_loop().time()
        payloads = [str(number).encode() for number in range(count)]
        await queries.enqueue([task] * count, payloads, [0] * count)
        return asyncio.get_running_loop().time() - started

    return float(_with_queries(run))


def latencies(count: int) -> list[float]:
    """Wait for the notification of the outcome."""

    async def run(queries: Any) -> list[float]:
        watcher = CompletionWatcher(
            queries.driver, queries=queries, debounce=timedelta(milliseconds=0)
        )
        async with watcher:

            async def call() -> None:
                (job,) = await queries.enqueue("noop", b"1")
                await watcher.wait_for(job)

            return await peer.wait_each_async(call, count)

    taken: list[float] = _with_queries(run)
    return taken


def count_done(sent: int) -> int:
    """Count the log of finished jobs, including jobs that aggregation moved to the statistics."""
    return peer.count_rows("SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'")


def crash_state() -> str:
    """Read the row of the job."""
    with peer.database() as connection:
        row = connection.execute(
            "SELECT status::text FROM pgqueuer WHERE payload = '50'::bytea"
        ).fetchone()
    return str(row[0]) if row else "gone"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the worker as a library, with the same options as its command line."""
    return peer.worker_of_adapter("pgqueuer", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""
    uvloop.run(_work(slots))


async def _work(slots: int) -> None:
    worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(os.environ[peer.DATABASE])))

    @worker.entrypoint("noop")
    async def noop(job: Any) -> None:
        """Do nothing."""

    @worker.entrypoint("nap")
    async def nap(job: Any) -> None:
        await asyncio.sleep(peer.NAP_SECONDS)

    @worker.entrypoint("mark")
    async def mark(job: Any) -> None:
        await peer.mark_async(int(job.payload))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.shutdown.set)
    limits: dict[str, int] = {"batch_size": max(slots, 10)}
    if os.environ.get(peer.WORKLOAD) in ("naps", "crash"):
        limits = {"batch_size": slots // 2, "max_concurrent_tasks": slots}
    elif os.environ.get(peer.WORKLOAD) == "latency":
        limits = {"batch_size": 1, "max_concurrent_tasks": slots}
    await worker.run(log_aggregation_interval=timedelta(0), **limits)


def _with_queries(run: Any) -> Any:
    async def connected() -> Any:
        connection = await asyncpg.connect(os.environ[peer.DATABASE])
        try:
            return await run(Queries(AsyncpgDriver(connection)))
        finally:
            await connection.close()

    return uvloop.run(connected())
