"""Procrastinate: coroutines in one process, on PostgreSQL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import procrastinate

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

GUIDE = "https://procrastinate.readthedocs.io/en/stable"

FACTS = Facts(
    package="procrastinate",
    servers=("PostgreSQL",),
    isolates="no: coroutines in one process",
    results="no: the state of the job only",
    durable="yes: PostgreSQL, synchronous commits",
    choices=(
        Choice(
            "concurrency = slots",
            "asynchronous tasks run side by side in one worker",
            f"{GUIDE}/howto/production/concurrency.html",
        ),
        Choice("listen_notify: default", "the worker is woken, not polling", f"{GUIDE}/"),
        Choice(
            "PsycopgConnector with its default pool",
            "the recommended connector",
            f"{GUIDE}/howto/basics/connector.html",
        ),
    ),
)

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ[peer.DATABASE])
)


@app.task(name="noop")
async def noop(number: int) -> int:
    """Do nothing."""
    return number


@app.task(name="nap")
async def nap(number: int) -> None:
    """Wait for 5 ms."""
    await asyncio.sleep(peer.NAP_SECONDS)


@app.task(name="mark")
async def mark(number: int) -> None:
    """Record start and end, or crash."""
    await peer.mark_async(number)


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Apply the schema."""

    async def run() -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    asyncio.run(run())


def enqueue(task: str, count: int) -> float:
    """Send one by one."""

    async def run() -> float:
        async with app.open_async():
            return await peer.send_each_async(
                lambda number: TASKS[task].defer_async(number=number), count
            )

    return asyncio.run(run())


def enqueue_many(task: str, count: int) -> float:
    """Send all tasks in one statement."""

    async def run() -> float:
        async with app.open_async():
            await app.check_connection_async()
            started = asyncio.get_running_loop().time()
            numbers = [{"number": number} for number in range(count)]
            await TASKS[task].batch_defer_async(*numbers)
            return asyncio.get_running_loop().time() - started

    return asyncio.run(run())


def latencies(count: int) -> list[float]:
    """Poll the state of the job, because Procrastinate has no call that waits."""

    async def run() -> list[float]:
        async with app.open_async():
            manager = app.job_manager

            async def call() -> None:
                job_id = await noop.defer_async(number=1)
                while (await manager.get_job_status_async(job_id)).value != "succeeded":  # noqa: ASYNC110
                    await asyncio.sleep(peer.POLL_SECONDS)

            return await peer.wait_each_async(call, count)

    return asyncio.run(run())


def count_done(sent: int) -> int:
    """Count finished jobs."""
    return peer.count_rows("SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'")


def crash_state() -> str:
    """Read the row of the job."""
    with peer.database() as connection:
        row = connection.execute(
            "SELECT status FROM procrastinate_jobs WHERE args ->> 'number' = '50'"
        ).fetchone()
    return str(row[0]) if row else "gone"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the worker as a library, with the same options as its command line."""
    return peer.worker_of_adapter("procrastinate", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""

    async def run() -> None:
        async with app.open_async():
            await app.run_worker_async(concurrency=slots)

    asyncio.run(run())
