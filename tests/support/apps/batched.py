"""An application with batched tasks. Each call appends the items that it received to a file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from contextlib import suppress
from typing import Any

from horsies import (
    AppConfig,
    Batch,
    CustomQueueConfig,
    Horsies,
    LogCapture,
    PerKey,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    RetryPolicy,
    TaskError,
    TaskResult,
    TaskStopped,
    current_batch,
    current_task,
)
from tests.support.workers import QUICK_RECOVERY, broker_settings

JOURNAL = os.environ.get("HORSIES_E2E_JOURNAL", "")

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="rows"),
            CustomQueueConfig(name="narrow", max_concurrency=4),
            CustomQueueConfig(name="tenants", per_key=PerKey(max_concurrency=3)),
        ],
        recovery=RecoveryConfig.model_validate(QUICK_RECOVERY["recovery"]),
        log_capture=LogCapture(max_lines=100, max_bytes=8_192),
    )
)

AGAIN = RetryPolicy.fixed([0.05] * 20, auto_retry_for=["ODD", "WORKER_CRASHED", "WORKER_STOPPED"])


def write(name: str, items: list[Any]) -> None:
    """Append the items of one call; the kernel writes the line as a whole."""
    line = json.dumps([name, os.getpid(), items, [one.id for one in current_batch()]]) + "\n"
    journal = os.open(f"{JOURNAL}.batches", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(journal, line.encode())
    finally:
        os.close(journal)


@app.task("double", queue_name="rows", batch=Batch(size=40))
def double(numbers: list[int]) -> list[int]:
    write("double", numbers)
    logging.getLogger("batched").warning("doubling %d", len(numbers))
    return [2 * number for number in numbers]


@app.task("stumble", queue_name="rows", batch=Batch(size=40), retry_policy=AGAIN)
def stumble(numbers: list[int]) -> list[TaskResult[int, TaskError]]:
    """Fail in the first attempt of an odd number, and in every attempt of a negative number."""
    write("stumble", numbers)
    logging.getLogger("batched").warning("stumbling over %d", len(numbers))
    return [
        TaskResult(err=TaskError(error_code="NEGATIVE"))
        if number < 0
        else TaskResult(err=TaskError(error_code="ODD"))
        if number % 2 and task.attempt == 1
        else TaskResult(ok=number)
        for number, task in zip(numbers, current_batch(), strict=True)
    ]


@app.task("explode", queue_name="rows", batch=Batch(size=40))
def explode(numbers: list[int]) -> list[int]:
    write("explode", numbers)
    raise OSError(f"no room for {len(numbers)}")


@app.task("forget", queue_name="rows", batch=Batch(size=40))
def forget(numbers: list[int]) -> list[int]:
    return numbers[1:]


@app.task("linger", queue_name="rows", batch=Batch(size=40), on_stop="fail")
async def linger(seconds: list[float]) -> None:
    write("linger", seconds)
    await asyncio.sleep(max(seconds))


@app.task("salvage", queue_name="rows", batch=Batch(size=40), on_stop="requeue")
def salvage(numbers: list[int]) -> list[TaskResult[int, TaskError]]:
    """Handle the first item, then wait until the call is stopped."""
    write("salvage", numbers)
    if len(numbers) > 1:
        with suppress(TaskStopped):
            time.sleep(600)
    rest = [TaskError(error_code="UNDONE")] * (len(numbers) - 1)
    return [TaskResult(ok=numbers[0]), *(TaskResult(err=one) for one in rest)]


@app.task("die", queue_name="rows", batch=Batch(size=40), retry_policy=AGAIN)
def die(numbers: list[int]) -> list[int]:
    """Kill the process in the first call."""
    write("die", numbers)
    logging.getLogger("batched").warning("dying with %d", len(numbers))
    if current_task().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return numbers


@app.task("slow", queue_name="rows", batch=Batch(size=10), retry_policy=AGAIN)
def slow(numbers: list[int]) -> list[int]:
    write("slow", numbers)
    time.sleep(0.02)
    return numbers


@app.task("tenant", queue_name="tenants", batch=Batch(size=40), key=lambda item: item[0])
def tenant(items: list[tuple[str, int]]) -> None:
    write("tenant", items)
    time.sleep(0.02)


@app.task("narrow", queue_name="narrow", batch=Batch(size=40))
def narrow(numbers: list[int]) -> None:
    write("narrow", numbers)
    time.sleep(0.02)
