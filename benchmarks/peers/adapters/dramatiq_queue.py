"""Dramatiq on Redis: processes with threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis import Redis

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

FACTS = Facts(
    package="dramatiq",
    servers=("Redis",),
    isolates="partly: the threads of a process share it",
    results="yes, in Redis",
    durable="no: as durable as Redis is set up",
    bulk=False,
    choices=(
        Choice(
            "--processes 2 --threads slots/2",
            "one process per core, and threads in each, as the guide recommends",
            "https://dramatiq.io/guide.html#workers",
        ),
        Choice(
            "Results(store_results=True)",
            "the other peers store results or states too",
            "https://dramatiq.io/cookbook.html#results",
        ),
        Choice(
            "default prefetch",
            "two messages per thread",
            "https://dramatiq.io/advanced.html#queue-prefetch",
        ),
    ),
)

broker = RedisBroker(url=os.environ[peer.REDIS])
backend = RedisBackend(url=os.environ[peer.REDIS])
broker.add_middleware(Results(backend=backend, store_results=True))
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(number: int) -> int:
    """Do nothing."""
    return number


@dramatiq.actor
def nap(number: int) -> None:
    """Wait for 5 ms."""
    peer.nap(number)


@dramatiq.actor
def mark(number: int) -> int:
    """Record start and end, or crash."""
    peer.mark(number)
    return number


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Do nothing, because Redis was emptied before."""


def enqueue(task: str, count: int) -> float:
    """Send one by one."""
    return peer.send_each(TASKS[task].send, count)


# Dramatiq has no bulk call: a group sends its messages one by one.
enqueue_many = enqueue


def latencies(count: int) -> list[float]:
    """Wait for the result in Redis."""
    return peer.wait_each(lambda: noop.send(1).get_result(block=True, timeout=20_000), count)


@cache
def _redis() -> Any:
    return Redis.from_url(os.environ[peer.REDIS])


def count_done(sent: int) -> int:
    """Return the number of sent tasks minus the number of messages, which are kept until the result is
    stored.
    """
    return sent - int(_redis().hlen("dramatiq:default.msgs"))


def crash_state() -> str:
    """Return the place of the message."""
    left = _redis().hlen("dramatiq:default.msgs")
    return f"{left} message(s) unacknowledged" if left else "no trace"


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Return the command line from Dramatiq's documentation."""
    return [
        *(sys.executable, "-m", "dramatiq", __name__),
        *("--processes", "2", "--threads", str(max(1, slots // 2))),
    ]
