"""An application with caps, whose tasks count how many of them run at the same time.

Every task takes the first free slot, a file lock that the kernel releases even if the process is killed.
The slot's number, which the task records, shows how many others were running.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    RetryPolicy,
    TaskError,
    TaskResult,
    WorkerResilienceConfig,
)
from tests.support.workers import CONFIG_VARIABLE, JOURNAL_VARIABLE, broker_settings

CLUSTER_CAP = 5
QUEUE_CAPS = {"wide": 3, "narrow": 1, "open": None}


def read_resilience() -> WorkerResilienceConfig:
    config = json.loads(os.environ.get(CONFIG_VARIABLE) or "{}")
    # The pause is short, so that tasks of dead workers are recovered soon after a server's start.
    return WorkerResilienceConfig(db_retry_max_ms=500, **config.get("resilience", {}))


app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name=name, priority=number, max_concurrency=cap)
            for number, (name, cap) in enumerate(QUEUE_CAPS.items(), start=1)
        ],
        cluster_wide_cap=CLUSTER_CAP,
        resilience=read_resilience(),
        recovery=RecoveryConfig(check_interval_ms=1_000),
    )
)
AGAIN = RetryPolicy.fixed([1] * 20, auto_retry_for=["WORKER_CRASHED"], jitter=False)


@contextmanager
def slot(name: str) -> Iterator[int]:
    """Return the number of the first free slot with this name."""
    directory = Path(os.environ[JOURNAL_VARIABLE]).parent
    for number in count():
        held = os.open(directory / f"slot-{name}-{number}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield number
            return
        except BlockingIOError:
            continue
        finally:
            os.close(held)


def occupy(queue: str, seconds: float) -> TaskResult[int, TaskError]:
    with slot("cluster") as place, slot(queue) as place_here:
        line = f"{queue} {place + 1} {place_here + 1}\n"
        places = os.open(
            Path(os.environ[JOURNAL_VARIABLE]).parent / "places",
            os.O_WRONLY | os.O_APPEND | os.O_CREAT,
        )
        os.write(places, line.encode())
        os.close(places)
        time.sleep(seconds)
    return TaskResult(ok=place + 1)


@app.task("occupy_wide", queue_name="wide", retry_policy=AGAIN)
def occupy_wide(seconds: float) -> TaskResult[int, TaskError]:
    return occupy("wide", seconds)


@app.task("occupy_narrow", queue_name="narrow", retry_policy=AGAIN)
def occupy_narrow(seconds: float) -> TaskResult[int, TaskError]:
    return occupy("narrow", seconds)


@app.task("occupy_narrow_once", queue_name="narrow")
def occupy_narrow_once(seconds: float) -> TaskResult[int, TaskError]:
    return occupy("narrow", seconds)


@app.task("occupy_open", queue_name="open", retry_policy=AGAIN)
def occupy_open(seconds: float) -> TaskResult[int, TaskError]:
    return occupy("open", seconds)
