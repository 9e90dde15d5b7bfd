"""The application the worker benchmarks run: tasks that do nothing, or hardly anything."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import suppress

from horsies import (
    AppConfig,
    Horsies,
    PostgresConfig,
    RetryPolicy,
    TaskError,
    TaskResult,
    TaskStopped,
    current_task,
)

# "off" makes a worker count nothing, to measure what counting costs.
if os.environ.get("HORSIES_BENCH_TALLY") == "off":
    from horsies.worker.tally import Tally

    for _name in ("note_starts", "note_ends", "note_turn"):
        setattr(Tally, _name, lambda *_: None)

# "off" removes the checks for tracing, to measure what they cost an application without it.
if os.environ.get("HORSIES_BENCH_TRACING") == "off":
    from benchmarks.untraced import remove_checks

    remove_checks()

app = Horsies(AppConfig(broker=PostgresConfig.from_env(pool_size=1)))
# A child may hold several tasks that are tried again after a crash.
AGAIN = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])


@app.task("noop")
def noop() -> TaskResult[None, TaskError]:
    """Do nothing, successfully."""
    return TaskResult(ok=None)


@app.task("burst", retry_policy=AGAIN)
def burst() -> TaskResult[None, TaskError]:
    """Do nothing, and be tried again after a crash."""
    return TaskResult(ok=None)


@app.task("burst_nap", retry_policy=AGAIN)
def burst_nap() -> TaskResult[None, TaskError]:
    """Wait for 5 ms, and be tried again after a crash."""
    time.sleep(0.005)
    return TaskResult(ok=None)


@app.task("burst_nap_50", retry_policy=AGAIN)
def burst_nap_50() -> TaskResult[float, TaskError]:
    """Wait for 50 ms and return the time of the start."""
    started = time.time()
    time.sleep(0.05)
    return TaskResult(ok=started)


@app.task("burst_for", retry_policy=AGAIN)
def burst_for(seconds: float) -> TaskResult[list[float], TaskError]:
    """Wait, at most until the time limit; return the time of the start and the seconds."""
    began_at, started = time.time(), time.perf_counter()
    with suppress(TaskStopped):
        time.sleep(seconds)
    return TaskResult(ok=[began_at, time.perf_counter() - started])


@app.task("nap")
def nap() -> TaskResult[None, TaskError]:
    """Wait for something else, as most tasks do."""
    time.sleep(0.005)
    return TaskResult(ok=None)


@app.task("nap_1")
def nap_1() -> TaskResult[None, TaskError]:
    """Wait for 1 ms."""
    time.sleep(0.001)
    return TaskResult(ok=None)


@app.task("sleeping_nap")
async def sleeping_nap() -> None:
    """Wait for a second on the event loop."""
    await asyncio.sleep(1)


@app.task("blocking_nap")
async def blocking_nap() -> None:
    """Wait without the event loop, which stands still meanwhile."""
    time.sleep(1.6)  # noqa: ASYNC251 - what async children must report


@app.task("after")
def after(before: TaskResult[None, TaskError]) -> TaskResult[None, TaskError]:
    """Do nothing with the result of another node."""
    return before


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
