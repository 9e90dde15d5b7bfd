"""arq: coroutines in one process, on Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker
from redis import Redis

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

PAGE = "https://arq-docs.helpmanual.io/"

FACTS = Facts(
    package="arq",
    servers=("Redis",),
    isolates="no: coroutines in one process",
    results="yes, in Redis",
    durable="no: as durable as Redis is set up",
    bulk=False,
    choices=(
        Choice("max_jobs = slots", "coroutines that run at a time", PAGE),
        Choice(
            "poll_delay = 0.01",
            "the worker only polls; the default of half a second would be the latency",
            PAGE,
        ),
        Choice("Job.result(poll_delay=0.001)", "waiting for a result also polls", PAGE),
    ),
)

SETTINGS = RedisSettings.from_dsn(os.environ[peer.REDIS])


async def noop(_: Any, number: int) -> int:
    """Do nothing."""
    return number


async def nap(_: Any, number: int) -> None:
    """Wait for 5 ms."""
    await asyncio.sleep(peer.NAP_SECONDS)


async def mark(_: Any, number: int) -> None:
    """Record start and end, or crash."""
    await peer.mark_async(number)


def set_up() -> None:
    """Do nothing, because Redis was emptied before."""


def enqueue(task: str, count: int) -> float:
    """Send one by one; the id of the crash test's tasks is their number."""

    async def run() -> float:
        pool = await create_pool(SETTINGS)

        async def send(number: int) -> None:
            job_id = f"number-{number}" if task == "mark" else None
            await pool.enqueue_job(task, number, _job_id=job_id)

        return await peer.send_each_async(send, count)

    return asyncio.run(run())


# arq has no bulk call.
enqueue_many = enqueue


def latencies(count: int) -> list[float]:
    """Poll for the result."""

    async def run() -> list[float]:
        pool = await create_pool(SETTINGS)

        async def call() -> None:
            job = await pool.enqueue_job("noop", 1)
            await job.result(timeout=20, poll_delay=peer.POLL_SECONDS)

        return await peer.wait_each_async(call, count)

    return asyncio.run(run())


@cache
def _redis() -> Any:
    return Redis.from_url(os.environ[peer.REDIS])


def count_done(sent: int) -> int:
    """Return the number of sent tasks minus the length of the queue, which keeps a task until its result
    is stored.
    """
    return sent - int(_redis().zcard("arq:queue"))


def crash_state() -> str:
    """Return the remaining keys of the task."""
    redis = _redis()
    job = f"number-{peer.CRASHING_NUMBER}"
    if redis.exists(f"arq:result:{job}"):
        return "has a result"
    locked = redis.exists(f"arq:in-progress:{job}")
    return "queued, locked as in progress" if locked else "queued"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the worker as a library, because the command line takes its settings from a class."""
    return peer.worker_of_adapter("arq", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    Worker([noop, nap, mark], redis_settings=SETTINGS, max_jobs=slots, poll_delay=0.01).run()
