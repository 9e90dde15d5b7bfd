"""Horsies: one isolated process per running task, PostgreSQL only."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts
from horsies import AppConfig, Horsies, PostgresConfig
from horsies.db.migrate import apply_migrations

BURST = peer.variant() == "burst"
ASYNC = peer.variant() == "async"

FACTS = Facts(
    package="horsies",
    servers=("PostgreSQL",),
    isolates="no: coroutines in one child process" if ASYNC else "yes: a process per running task",
    results="yes, with the row of the task",
    durable="yes: PostgreSQL, synchronous commits",
    recycles=not ASYNC,
    choices=(
        Choice(
            "--processes 0 --async-children 1 --async-slots slots",
            "coroutines in one process, as arq, Procrastinate, PgQueuer and Oban run them",
            "docs/async-tasks.md#async-children",
        )
        if ASYNC
        else Choice(
            f"--processes slots, burst = {BURST}",
            "a process may hold several short tasks in advance"
            if BURST
            else "the default: a process holds one task; see horsies-burst for windows",
            "docs/workers.md",
        ),
        Choice(
            "--max-tasks-per-child 0",
            "no peer recycles in the other workloads; recycling is measured by itself",
            "docs/workers.md",
        ),
        Choice(
            "--loglevel WARNING", "no peer writes a line per task to its log", "docs/workers.md"
        ),
    ),
)

app = Horsies(AppConfig(broker=PostgresConfig(database_url=os.environ[peer.DATABASE])))


def noop(number: int) -> int:
    """Do nothing."""
    return number


async def noop_async(number: int) -> int:
    """Do nothing, as a coroutine."""
    return number


async def nap_async(_: int) -> None:
    """Wait for 5 ms, as a coroutine."""
    await asyncio.sleep(peer.NAP_SECONDS)


FUNCTIONS: dict[str, Any] = (
    {"noop": noop_async, "nap": nap_async, "mark": peer.mark_async}
    if ASYNC
    else {"noop": noop, "nap": peer.nap, "mark": peer.mark}
)
TASKS = {name: app.task(name, burst=BURST)(function) for name, function in FUNCTIONS.items()}


def set_up() -> None:
    """Apply the migrations."""
    with peer.database() as connection:
        apply_migrations(connection)


def enqueue(task: str, count: int) -> float:
    """Send one by one."""
    return peer.send_each(TASKS[task].enqueue, count)


def enqueue_many(task: str, count: int) -> float:
    """Send all tasks in one statement."""
    function = TASKS[task]
    return peer.timed(
        lambda: function.send_many(function.bind(number) for number in range(count)).unwrap()
    )


def latencies(count: int) -> list[float]:
    """Wait for the notification of the result."""
    return peer.wait_each(lambda: TASKS["noop"].enqueue(1).result(timeout_ms=20_000), count)


def count_done(sent: int) -> int:
    """Count terminal rows."""
    return peer.count_rows("SELECT count(*) FROM horsies_tasks WHERE status = 'COMPLETED'")


def crash_state() -> str:
    """Read the row of the task."""
    with peer.database() as connection:
        row = connection.execute(
            "SELECT status || coalesce(' ' || error_code, '') FROM horsies_tasks WHERE args = '[50]'"
        ).fetchone()
    return str(row[0]) if row else "gone"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Return the command line from the documentation."""
    return [
        *(sys.executable, "-m", "horsies", "worker", f"{__name__}:app"),
        *("--processes", "0" if ASYNC else str(slots), "--loglevel", "WARNING"),
        *(("--async-children", "1", "--async-slots", str(slots)) if ASYNC else ()),
        *("--max-tasks-per-child", str(recycle or 0)),
    ]
