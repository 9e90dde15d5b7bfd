"""The interface between the workloads and one peer, and the tasks that every peer runs.

An adapter is a module below ``adapters``. It is imported only in its own processes, so that a missing
peer affects no other peer, and no peer slows down another with its imports. Its tasks are ``noop``,
``nap`` and ``mark``; each takes one number. If a peer runs coroutines, the tasks are coroutines.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import psycopg

DATABASE = "PEERS_DATABASE_URL"
REDIS = "PEERS_REDIS_URL"
AMQP = "PEERS_AMQP_URL"
VARIANT = "PEERS_VARIANT"
JOURNAL = "PEERS_JOURNAL"
WORKLOAD = "PEERS_WORKLOAD"
ANSWER = "PEERS_ANSWER"

NAP_SECONDS = 0.005
CRASHING_NUMBER = 50
# The pause between polls for peers without another way to wait for a result, too short to determine
# the latency.
POLL_SECONDS = 0.001
# The latency of a slow peer is measured fewer times.
WARMING_CALLS, FEWEST_CALLS, CALLS_SECONDS = 5, 20, 8.0


@dataclass(frozen=True)
class Choice:
    """A setting of a peer, with the reason for it and the page of the peer's documentation."""

    setting: str
    reason: str
    link: str


@dataclass(frozen=True)
class Facts:
    """Properties of a peer that figures do not show."""

    package: str
    servers: tuple[str, ...]
    isolates: str
    results: str
    durable: str
    choices: tuple[Choice, ...]
    recycles: bool = False
    bulk: bool = True


class Adapter(Protocol):
    """The functions of an adapter module; functions that enqueue return their duration in seconds."""

    FACTS: Facts

    def set_up(self) -> None:
        """Create the tables or queues, in a database or server that is empty."""

    def enqueue(self, task: str, count: int) -> float:
        """Send tasks one by one, on a connection that is already open."""

    def enqueue_many(self, task: str, count: int) -> float:
        """Send tasks with the peer's bulk call, or one by one if it has none."""

    def latencies(self, count: int) -> list[float]:
        """Send a task and wait for its result, repeatedly; return the seconds of each try."""

    def count_done(self, sent: int) -> int:
        """Return how many of the sent tasks have finished, according to the peer's own records.

        This must be cheap, because the worker is being measured.
        """

    def crash_state(self) -> str:
        """Return the state that the peer shows for the crashed task."""

    def worker_command(self, slots: int, recycle: int | None) -> Sequence[str]:
        """Return the command line of a worker with this many slots."""


# The name of a peer: its module and, if one module serves several peers, its variant.
PEERS: dict[str, tuple[str, str]] = {
    "horsies": ("horsies_queue", ""),
    "horsies-burst": ("horsies_queue", "burst"),
    "horsies-async": ("horsies_queue", "async"),
    "celery": ("celery_queue", "redis"),
    "celery-late": ("celery_queue", "redis-late"),
    "celery-rabbitmq": ("celery_queue", "rabbitmq"),
    "dramatiq": ("dramatiq_queue", ""),
    "rq": ("rq_queue", ""),
    "arq": ("arq_queue", ""),
    "procrastinate": ("procrastinate_queue", ""),
    "pgqueuer": ("pgqueuer_queue", ""),
    "oban": ("oban_queue", ""),
    "chancy": ("chancy_queue", ""),
    "dbos": ("dbos_queue", ""),
}


def module_of(peer: str) -> str:
    """Return the module with the adapter of a peer."""
    return f"benchmarks.peers.adapters.{PEERS[peer][0]}"


def load(peer: str) -> Adapter:
    """Import the adapter of a peer."""
    return cast("Adapter", importlib.import_module(module_of(peer)))


def variant() -> str:
    """Return the variant that this process serves."""
    return os.environ.get(VARIANT, "")


def nap(_: int) -> None:
    """Wait for an external event, as most tasks do."""
    time.sleep(NAP_SECONDS)


def mark(number: int) -> None:
    """Record the start and end of a task; the task with CRASHING_NUMBER kills its process instead."""
    write(f"start {number}")
    if number == CRASHING_NUMBER:
        os._exit(1)
    time.sleep(NAP_SECONDS)
    write(f"end {number}")


async def mark_async(number: int) -> None:
    """Record as ``mark`` does, in a coroutine."""
    write(f"start {number}")
    if number == CRASHING_NUMBER:
        os._exit(1)
    await asyncio.sleep(NAP_SECONDS)
    write(f"end {number}")


def write(line: str) -> None:
    """Append a line to the journal; one write of a short line is atomic."""
    with Path(os.environ[JOURNAL]).open("a") as journal:
        journal.write(line + "\n")


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def send_each(send: Callable[[int], Any], count: int) -> float:
    """Send every number and return the seconds, without the first send, which connects."""
    send(0)
    seconds = timed(lambda: [send(number) for number in range(1, count)])
    return seconds * count / max(count - 1, 1)


async def send_each_async(send: Callable[[int], Awaitable[Any]], count: int) -> float:
    """Send each number as ``send_each`` does, with a coroutine."""
    await send(0)
    started = time.perf_counter()
    for number in range(1, count):
        await send(number)
    return (time.perf_counter() - started) * count / max(count - 1, 1)


async def wait_each_async(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Wait for each result as ``wait_each`` does, with a coroutine."""
    for _ in range(WARMING_CALLS):
        await call()
    taken = []
    for _ in _turns(count):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return taken


def wait_each(call: Callable[[], Any], count: int) -> list[float]:
    """Return the seconds of each call, without the first calls, which warm up and wait for the worker."""
    for _ in range(WARMING_CALLS):
        call()
    return [timed(call) for _ in _turns(count)]


def _turns(count: int) -> Iterator[int]:
    ends_at = time.monotonic() + CALLS_SECONDS
    for turn in range(count):
        if turn >= FEWEST_CALLS and time.monotonic() > ends_at:
            return
        yield turn


@contextmanager
def database() -> Iterator[psycopg.Connection[Any]]:
    """Open a connection to read the tables of a peer."""
    with psycopg.connect(os.environ[DATABASE], autocommit=True) as connection:
        yield connection


_watching: list[psycopg.Connection[Any]] = []


def count_rows(query: str) -> int:
    """Run a counting query on a permanent connection, because the query runs twenty times a second."""
    if not _watching:
        _watching.append(psycopg.connect(os.environ[DATABASE], autocommit=True))
    row = _watching[0].execute(query.encode()).fetchone()
    return int(row[0]) if row else 0


def worker_of_adapter(peer: str, slots: int, recycle: int | None) -> list[str]:
    """Return the command that runs ``run_worker`` of an adapter, for peers used as a library."""
    return [
        *(sys.executable, "-m", "benchmarks.peers.run_worker"),
        *(peer, str(slots), str(recycle or 0)),
    ]
