"""Chancy: a pool of processes, on PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from chancy import Chancy, Queue, Worker, job
from chancy.app import setup_default_logger

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

PAGE = "https://tkte.ch/chancy"
NEVER = 1_000_000_000

FACTS = Facts(
    package="chancy",
    servers=("PostgreSQL",),
    isolates="partly: a crash breaks the pool of processes",
    results="no: the state of the job only",
    durable="yes: PostgreSQL, synchronous commits",
    recycles=True,
    choices=(
        Choice("executor: the default, processes", "the executor that isolates", f"{PAGE}/"),
        Choice(
            "concurrency = slots, eager_polling = True",
            "the worker fetches again as soon as a job completes",
            f"{PAGE}/",
        ),
        Choice(
            "maximum_jobs_per_worker: very high",
            "the default of 100 is recycling, which is measured by itself",
            f"{PAGE}/",
        ),
        Choice(
            "send_outgoing_interval = 0.01",
            "the default writes the states of finished jobs once a second, which would be the latency",
            f"{PAGE}/",
        ),
        Choice("wait_for_job(interval=0.001)", "the default polls every second", f"{PAGE}/"),
    ),
)


@job()
def noop(*, number: int) -> None:
    """Do nothing."""


@job()
def nap(*, number: int) -> None:
    """Wait for 5 ms."""
    peer.nap(number)


@job()
def mark(*, number: int) -> None:
    """Record start and end, or crash."""
    peer.mark(number)


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Apply the migrations."""

    async def run(chancy: Any) -> None:
        await chancy.migrate()

    _with_chancy(run)


def enqueue(task: str, count: int) -> float:
    """Send one by one."""

    async def run(chancy: Any) -> float:
        return await peer.send_each_async(
            lambda number: chancy.push(TASKS[task].job.with_kwargs(number=number)), count
        )

    return float(_with_chancy(run))


def enqueue_many(task: str, count: int) -> float:
    """Send in batches with the bulk call."""

    async def run(chancy: Any) -> float:
        started = asyncio.get_running_loop().time()
        jobs = [TASKS[task].job.with_kwargs(number=number) for number in range(count)]
        async for _ in chancy.push_many(jobs):
            pass
        return asyncio.get_running_loop().time() - started

    return float(_with_chancy(run))


def latencies(count: int) -> list[float]:
    """Poll the state of the job with the call that waits."""

    async def run(chancy: Any) -> list[float]:
        async def call() -> None:
            reference = await chancy.push(noop.job.with_kwargs(number=1))
            await chancy.wait_for_job(reference, interval=peer.POLL_SECONDS, timeout=20)

        return await peer.wait_each_async(call, count)

    taken: list[float] = _with_chancy(run)
    return taken


def count_done(sent: int) -> int:
    """Count finished jobs."""
    return peer.count_rows("SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'")


def crash_state() -> str:
    """Read the row of the job."""
    with peer.database() as connection:
        row = connection.execute(
            "SELECT state FROM chancy_jobs WHERE kwargs ->> 'number' = '50'"
        ).fetchone()
    return str(row[0]) if row else "gone"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the worker as a library, because a program declares its queues anyway."""
    return peer.worker_of_adapter("chancy", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""

    async def run(chancy: Any) -> None:
        queue = Queue(
            name="default",
            concurrency=slots,
            eager_polling=True,
            executor_options={"maximum_jobs_per_worker": recycle or NEVER},
        )
        await chancy.declare(queue, upsert=True)
        waiting = Worker(chancy)
        waiting.send_outgoing_interval = 0.01
        async with waiting as worker:
            await worker.wait_for_shutdown()

    _with_chancy(run)


def _with_chancy(run: Any) -> Any:
    async def connected() -> Any:
        # The default log level writes three lines per job.
        log = setup_default_logger(logging.WARNING)
        async with Chancy(os.environ[peer.DATABASE], log=log) as chancy:
            return await run(chancy)

    return asyncio.run(connected())
