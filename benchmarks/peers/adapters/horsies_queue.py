"""Horsies: one isolated process per running task, PostgreSQL only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts
from horsies import AppConfig, Horsies, PostgresConfig
from horsies.db.migrate import apply_migrations

BURST = peer.variant() == "burst"

FACTS = Facts(
    package="horsies",
    servers=("PostgreSQL",),
    isolates="yes: a process per running task",
    results="yes, with the row of the task",
    durable="yes: PostgreSQL, synchronous commits",
    recycles=True,
    choices=(
        Choice(
            f"burst = {BURST}",
            "a process may hold several short tasks in advance"
            if BURST
            else "the default: a process holds one task; horsies-burst has the other way",
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


@app.task("noop", burst=BURST)
def noop(number: int) -> int:
    """Do nothing."""
    return number


@app.task("nap", burst=BURST)
def nap(number: int) -> None:
    """Wait for 5 ms."""
    peer.nap(number)


@app.task("mark", burst=BURST)
def mark(number: int) -> None:
    """Write down start and end, or crash."""
    peer.mark(number)


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Apply the migrations."""
    with peer.database() as connection:
        apply_migrations(connection)


def enqueue(task: str, count: int) -> float:
    """Send one by one."""
    return peer.send_each(TASKS[task].enqueue, count)


def enqueue_many(task: str, count: int) -> float:
    """Send all in one statement."""
    function = TASKS[task]
    return peer.timed(
        lambda: function.send_many(function.bind(number) for number in range(count)).unwrap()
    )


def latencies(count: int) -> list[float]:
    """Wait for the notification of the result."""
    return peer.wait_each(lambda: noop.enqueue(1).result(timeout_ms=20_000), count)


def count_done() -> int:
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
    """Return the command line of the documentation."""
    return [
        *(sys.executable, "-m", "horsies", "worker", f"{__name__}:app"),
        *("--processes", str(slots), "--loglevel", "WARNING"),
        *("--max-tasks-per-child", str(recycle or 0)),
    ]
