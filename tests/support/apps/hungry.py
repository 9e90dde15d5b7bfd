"""Tasks with a memory limit, some of which exceed it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time

from horsies import Horsies, RetryPolicy
from horsies.current_task import current_task
from tests.support.apps.programs import read_config, write_down
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
LIMIT_MB = int(os.environ.get("HUNGRY_LIMIT_MB", "300"))
MEGABYTE = 1 << 20
KEPT: list[bytes] = []


def fill(megabytes: int) -> bytes:
    """Allocate memory and write to every page, so that it is in use."""
    return b"x" * (megabytes * MEGABYTE)


@app.task("eat", memory_limit_mb=LIMIT_MB)
def eat(step_mb: int, pause_seconds: float = 0.0) -> str:
    """Allocate without end."""
    write_down("start")
    eaten = []
    while True:
        eaten.append(fill(step_mb))
        time.sleep(pause_seconds)


@app.task("eat_in_threads", memory_limit_mb=LIMIT_MB)
def eat_in_threads(threads: int, step_mb: int) -> str:
    """Allocate memory in threads of the process; each thread keeps its memory."""
    write_down("start")
    eaten: list[bytes] = []

    def fill_on() -> None:
        while True:
            eaten.append(fill(step_mb))
            time.sleep(0.01)

    eaters = [threading.Thread(target=fill_on, daemon=True) for _ in range(threads)]
    for eater in eaters:
        eater.start()
    eaters[0].join()
    return "done"


@app.task("quick", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"]))
def quick(number: int) -> int:
    """Do nothing; the task may wait in a child behind the running task."""
    return number


@app.task(
    "eat_once",
    memory_limit_mb=LIMIT_MB,
    retry_policy=RetryPolicy.fixed([1], auto_retry_for=["MEMORY_LIMIT"], jitter=False),
)
def eat_once(megabytes: int) -> str:
    """Exceed the limit in the first attempt only, if possible with a program that outlives the kill."""
    write_down("start")
    if current_task().attempt == 1:
        started = subprocess.Popen(["sleep", "600"])
        write_down("program", str(started.pid))
        kept = fill(megabytes)
        time.sleep(600)
        return str(len(kept))
    return "done"


@app.task("keep", memory_limit_mb=LIMIT_MB)
def keep(megabytes: int) -> int:
    """Leave allocated memory in the process."""
    KEPT.append(fill(megabytes))
    return os.getpid()


@app.task("own_pid", memory_limit_mb=LIMIT_MB)
async def own_pid() -> int:
    await asyncio.sleep(0)
    return os.getpid()


@app.task("eat_async", memory_limit_mb=LIMIT_MB)
async def eat_async(step_mb: int) -> str:
    eaten = []
    while True:
        eaten.append(fill(step_mb))
        await asyncio.sleep(0.01)


def wait_for(label: str) -> None:
    while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
        time.sleep(0.01)


@app.task("nap")
async def nap(label: str) -> str:
    """Wait until the test releases the label."""
    write_down("start", label)
    await asyncio.to_thread(wait_for, label)
    return "done"


@app.task("unlimited")
def unlimited(megabytes: int) -> int:
    kept = fill(megabytes)
    time.sleep(0.3)
    return len(kept) // MEGABYTE
