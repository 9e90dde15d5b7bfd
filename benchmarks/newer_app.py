"""The tasks of ``noop_app.py``, and tasks with features that older checkouts do not have."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress

from benchmarks.noop_app import AGAIN, STEPS, app, burst, chain, noop
from horsies import TaskError, TaskResult, TaskStopped, current_task

__all__ = [
    "STEPS",
    "app",
    "blocking_nap",
    "burst",
    "burst_for",
    "chain",
    "noop",
    "report",
    "sleeping_nap",
]


@app.task("burst_for", retry_policy=AGAIN)
def burst_for(seconds: float) -> TaskResult[list[float], TaskError]:
    """Wait until the time limit at most; return the start time and the seconds waited."""
    began_at, started = time.time(), time.perf_counter()
    with suppress(TaskStopped):
        time.sleep(seconds)
    return TaskResult(ok=[began_at, time.perf_counter() - started])


@app.task("sleeping_nap")
async def sleeping_nap() -> None:
    """Wait for a second on the event loop."""
    await asyncio.sleep(1)


@app.task("blocking_nap")
async def blocking_nap() -> None:
    """Wait without the event loop, which blocks it."""
    time.sleep(1.6)  # noqa: ASYNC251 - what async children must report


@app.task("report")
def report() -> TaskResult[list[float], TaskError]:
    """Report progress ten thousand times a second for five seconds; return the median seconds per call,
    and the number of calls.
    """
    task, taken = current_task(), list[float]()
    ends_at = time.monotonic() + 5.0
    while (now := time.monotonic()) < ends_at:
        started = time.perf_counter()
        for step in range(100):
            task.progress(len(taken) * 100 + step, 50_000, "importing")
        taken.append((time.perf_counter() - started) / 100)
        time.sleep(max(0.0, now + 0.01 - time.monotonic()))
    return TaskResult(ok=[statistics.median(taken), len(taken) * 100])
