"""Celery, prefork, in three variants: Redis, Redis with late acknowledgement, RabbitMQ."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.peers import adapter as peer
from benchmarks.peers.adapter import Choice, Facts

GUIDE = "https://docs.celeryq.dev/en/stable/userguide"
ON_RABBITMQ = peer.variant() == "rabbitmq"
LATE = peer.variant() == "redis-late"

FACTS = Facts(
    package="celery",
    servers=("RabbitMQ", "Redis") if ON_RABBITMQ else ("Redis",),
    isolates="yes: prefork, a process per slot",
    results="yes, in Redis",
    durable="partly: messages yes, results no"
    if ON_RABBITMQ
    else "no: as durable as Redis is set up",
    recycles=True,
    bulk=False,
    choices=(
        Choice(
            "--pool prefork", "the default, and the pool that isolates", f"{GUIDE}/workers.html"
        ),
        Choice(
            "worker_prefetch_multiplier = 64",
            "the guide names 64 or 128 for many short tasks",
            f"{GUIDE}/optimizing.html#prefetch-limits",
        ),
        Choice(
            f"task_acks_late = {LATE}",
            "late: a task is repeated if its worker dies"
            if LATE
            else "the default: a task is acknowledged before it runs; see celery-late for the other",
            f"{GUIDE}/tasks.html#Task.acks_late",
        ),
        Choice(
            "result_backend = redis, ignore_result = False",
            "the other peers store results or states too",
            f"{GUIDE}/configuration.html#result-backend",
        ),
        Choice(
            "--without-gossip --without-mingle",
            "gossip serves clusters; there is one worker",
            f"{GUIDE}/workers.html",
        ),
    ),
)

EXCHANGES = ("celery", "celeryev", "celery.pidbox")
BROKER_KEYS = (
    *("celery", "unacked", "unacked_index", "unacked_mutex", "_kombu.binding_deadlines"),
    *(f"_kombu.binding.{name}" for name in EXCHANGES),
    *(f"_kombu.binding_permanent.{name}" for name in EXCHANGES),
)

app = Celery(
    "peers",
    broker=os.environ[peer.AMQP] if ON_RABBITMQ else os.environ[peer.REDIS],
    backend=os.environ[peer.REDIS],
)
app.conf.update(
    worker_prefetch_multiplier=64,
    task_acks_late=LATE,
    task_reject_on_worker_lost=LATE,
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop(number: int) -> int:
    """Do nothing."""
    return number


@app.task(name="nap")
def nap(number: int) -> None:
    """Wait for 5 ms."""
    peer.nap(number)


@app.task(name="mark")
def mark(number: int) -> None:
    """Record start and end, or crash."""
    peer.mark(number)


TASKS: dict[str, Any] = {"noop": noop, "nap": nap, "mark": mark}


def set_up() -> None:
    """Empty the queue; Redis was emptied before."""
    app.control.purge()


def enqueue(task: str, count: int) -> float:
    """Send one by one; the id of the crash test's tasks is their number."""

    def send(number: int) -> None:
        task_id = f"number-{number}" if task == "mark" else None
        TASKS[task].apply_async((number,), task_id=task_id)

    return peer.send_each(send, count)


# Celery has no bulk call: a group sends its signatures one by one.
enqueue_many = enqueue


def latencies(count: int) -> list[float]:
    """Wait for the message of the result."""
    return peer.wait_each(lambda: noop.delay(1).get(timeout=20), count)


@cache
def _redis() -> Any:
    return Redis.from_url(os.environ[peer.REDIS])


def count_done(sent: int) -> int:
    """Count the results: all keys except the broker's keys."""
    return int(_redis().dbsize() - _redis().exists(*BROKER_KEYS))


def crash_state() -> str:
    """Read the result of the task."""
    result = app.AsyncResult(f"number-{peer.CRASHING_NUMBER}")
    return f"{result.state} {type(result.result).__name__ if result.result else ''}".strip()


def worker_command(slots: int, recycle: int | None) -> Sequence[str]:
    """Return the worker's command line from Celery's documentation."""
    return [
        *(sys.executable, "-m", "celery", "-A", f"{__name__}:app", "worker"),
        *("--pool", "prefork", "--concurrency", str(slots), "--loglevel", "WARNING"),
        *("--without-gossip", "--without-mingle"),
        *(("--max-tasks-per-child", str(recycle)) if recycle else ()),
    ]
