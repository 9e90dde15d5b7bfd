"""Oban for Python: coroutines in one process, on PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import orjson
import uvloop
from oban import Oban, Record, job
from oban.schema import install
from psycopg.types.json import set_json_dumps, set_json_loads

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

PAGE = "https://oban.pro/docs/py"

FACTS = Facts(
    package="oban",
    servers=("PostgreSQL",),
    isolates="no: coroutines in one process (processes are in Oban Pro)",
    results="yes, recorded with the job",
    durable="yes: PostgreSQL, synchronous commits",
    choices=(
        Choice("queues = {default: slots}", "the limit of a queue", f"{PAGE}/defining_queues.html"),
        Choice("default pool and plugins", "as `oban start` runs them", f"{PAGE}/"),
        Choice("uvloop and orjson", "as `oban start` runs them", f"{PAGE}/"),
        Choice("tasks return Record", "the other peers store results or states too", f"{PAGE}/"),
    ),
)

set_json_dumps(orjson.dumps)
set_json_loads(orjson.loads)


@job(queue="default")
async def noop(number: int) -> Any:
    """Do nothing."""
    return Record(number)


@job(queue="default")
async def nap(number: int) -> None:
    """Wait for 5 ms."""
    await asyncio.sleep(peer.NAP_SECONDS)


@job(queue="default")
async def mark(number: int) -> None:
    """Record start and end, or crash."""
    await peer.mark_async(number)


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Install the schema."""

    async def run(oban: Any, pool: Any) -> None:
        await install(pool)

    _with_oban(run)


def enqueue(task: str, count: int) -> float:
    """Send one by one."""

    async def run(oban: Any, _: Any) -> float:
        return await peer.send_each_async(
            lambda number: oban.enqueue(TASKS[task].new(number)), count
        )

    return float(_with_oban(run))


def enqueue_many(task: str, count: int) -> float:
    """Send all tasks in one statement."""

    async def run(oban: Any, _: Any) -> float:
        started = asyncio.get_running_loop().time()
        await oban.enqueue_many([TASKS[task].new(number) for number in range(count)])
        return asyncio.get_running_loop().time() - started

    return float(_with_oban(run))


def latencies(count: int) -> list[float]:
    """Poll the job, because Oban has no call that waits."""

    async def run(oban: Any, _: Any) -> list[float]:
        async def call() -> None:
            sent = await oban.enqueue(noop.new(1))
            while (await oban.get_job(sent.id)).state != "completed":  # noqa: ASYNC110
                await asyncio.sleep(peer.POLL_SECONDS)

        return await peer.wait_each_async(call, count)

    taken: list[float] = _with_oban(run)
    return taken


def count_done(sent: int) -> int:
    """Count finished jobs."""
    return peer.count_rows("SELECT count(*) FROM oban_jobs WHERE state = 'completed'")


def crash_state() -> str:
    """Read the row of the job."""
    with peer.database() as connection:
        row = connection.execute(
            "SELECT state::text FROM oban_jobs WHERE args::text LIKE '%50%'"
        ).fetchone()
    return str(row[0]) if row else "gone"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Run the worker as a library, with the same options as its command line."""
    return peer.worker_of_adapter("oban", slots, recycle)


def run_worker(slots: int, recycle: int | None) -> None:
    """Run until a signal arrives."""

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        pool = await Oban.create_pool(os.environ[peer.DATABASE])
        async with Oban(pool=pool, queues={"default": slots}):
            await stopped.wait()
        await pool.close()

    uvloop.run(run())


def _with_oban(run: Any) -> Any:
    async def connected() -> Any:
        pool = await Oban.create_pool(os.environ[peer.DATABASE])
        try:
            return await run(Oban(pool=pool), pool)
        finally:
            await pool.close()

    return uvloop.run(connected())
