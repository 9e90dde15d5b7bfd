"""An application of coroutines, for workers with async children: the tasks of one child must not disturb
each other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from horsies import (
    Horsies,
    RetryPolicy,
    TaskError,
    TaskFailed,
    TaskNode,
    TaskResult,
    WorkflowSpec,
    current_task,
)
from tests.support.apps.programs import read_config, write_down
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
hooks: list[str] = []


@app.on_child_process_start
async def open_session() -> None:
    hooks.append(f"open {id(asyncio.get_running_loop())}")


@app.on_child_process_stop
def close_session() -> None:
    with Path(f"{os.environ[JOURNAL_VARIABLE]}.hooks").open("a") as file:
        file.write(f"{os.getpid()} {len(hooks)}\n")


@app.task("nap")
async def nap(seconds: float) -> int:
    write_down("start")
    await asyncio.sleep(seconds)
    return os.getpid()


@app.task("retried_nap", retry_policy=RetryPolicy.fixed([0.1], auto_retry_for=["WORKER_CRASHED"]))
async def retried_nap(seconds: float) -> int:
    write_down("start")
    if current_task().attempt == 1:
        await asyncio.sleep(seconds)
    return current_task().attempt


@app.task("ordinary")
def ordinary() -> int:
    return os.getpid()


@app.task("wrapped")
async def wrapped(value: int) -> TaskResult[int, TaskError]:
    await asyncio.sleep(0)
    if value < 0:
        return TaskResult(err=TaskError(error_code="NEGATIVE", message="below zero"))
    return TaskResult(ok=value)


@app.task("failing")
async def failing(how: str) -> Any:
    await asyncio.sleep(0)
    match how:
        case "raise":
            raise ValueError("no such order")
        case "fail":
            raise TaskFailed("CARD_REFUSED", "refused")
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "unstorable":
            return object()
        case "nested exit":
            await asyncio.create_task(_exit())
    return None


async def _exit() -> None:
    sys.exit(3)


@app.task("third_time", retry_policy=RetryPolicy.fixed([0.1, 0.1], auto_retry_for=[ValueError]))
async def third_time() -> int:
    if current_task().attempt < 3:
        raise ValueError("not yet")
    return current_task().attempt


@app.task("limited_nap", timeout_ms=1_000)
async def limited_nap(seconds: float) -> None:
    write_down("start")
    try:
        await asyncio.sleep(seconds)
    finally:
        write_down("end")


@app.task("endless", timeout_ms=300)
async def endless() -> None:
    """Keep running, even if the task is cancelled."""
    write_down("start")
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            write_down("cancelled")


@app.task("blocks_the_loop")
async def blocks_the_loop(seconds: float) -> None:
    write_down("start")
    time.sleep(seconds)  # noqa: ASYNC251


@app.task("blocks_in_a_task")
async def blocks_in_a_task(seconds: float) -> None:
    async def work() -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    await asyncio.create_task(work())


@app.task("ends_its_process")
async def ends_its_process(how: str) -> None:
    await asyncio.sleep(0.2)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task("who_am_i")
async def who_am_i() -> list[str]:
    """Return this task's id as seen by its coroutine, by an asyncio task and by a thread."""
    found = [current_task().id]
    current_task().logger.warning("before %s.", current_task().id)
    await asyncio.sleep(0.1)
    found.append(current_task().id)
    found.append(await asyncio.create_task(_id_later()))
    found.append(await asyncio.to_thread(lambda: current_task().id))
    current_task().logger.warning("after %s.", current_task().id)
    return found


async def _id_later() -> str:
    await asyncio.sleep(0.05)
    return current_task().id


@app.task("reports_progress")
async def reports_progress(total: int) -> bool:
    for done in range(total):
        current_task().progress(done + 1, total, f"row {done + 1}")
        await asyncio.sleep(0.05)
    return current_task().should_stop()


@app.task("sends_with_headers")
async def sends_with_headers(name: str) -> str:
    await asyncio.sleep(0.05)
    return (await wrapped.send_async(1)).unwrap().task_id


@app.task("hook_loop")
async def hook_loop() -> list[str]:
    return [*hooks, f"open {id(asyncio.get_running_loop())}"]


@app.task("double")
async def double(value: int) -> TaskResult[int, TaskError]:
    await asyncio.sleep(0.01)
    return TaskResult(ok=value * 2)


@app.task("add_up")
async def add_up(
    left: TaskResult[int, TaskError], right: TaskResult[int, TaskError]
) -> TaskResult[int, TaskError]:
    return TaskResult(ok=left.ok_value + right.ok_value)


@app.workflow_builder()
def sum_of_doubles() -> WorkflowSpec[int]:
    """Build two nodes and a third that takes their results; all their tasks are coroutines."""
    doubles = [TaskNode(double, kwargs={"value": value}) for value in (3, 4)]
    names = dict(zip(("left", "right"), doubles, strict=True))
    total = TaskNode(add_up, args_from=names, waits_for=doubles)
    return app.workflow("doubles", [*doubles, total], output=total, definition_key="e2e.doubles")
