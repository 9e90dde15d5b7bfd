"""A small application for children to load; it needs no database."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel, field_serializer, field_validator

from horsies.app import Horsies, get_current_app
from horsies.config.app import AppConfig, PayloadConfig
from horsies.config.postgres import PostgresConfig
from horsies.errors import TaskStopped
from horsies.task_result import TaskError, TaskResult

app = Horsies(
    AppConfig(
        broker=PostgresConfig(database_url="postgresql://nobody@127.0.0.1:1/nothing"),
        payload=PayloadConfig(warn_bytes=500, max_result_bytes=1000),
    )
)
hooks_that_ran: list[str] = []


@app.on_child_process_start
def note_start() -> None:
    hooks_that_ran.append("note_start")


@app.task("add")
def add(a: int, b: int = 1) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a + b)


@app.task("add_later")
async def add_later(a: int, b: int) -> TaskResult[int, TaskError]:
    await asyncio.sleep(0)
    return TaskResult(ok=a + b)


@app.task("refuse")
def refuse() -> TaskResult[int, TaskError]:
    return TaskResult(err=TaskError(error_code="NO_STOCK", message="nothing left"))


@app.task("fail")
def fail() -> TaskResult[int, TaskError]:
    raise ValueError("out of order")


@app.task("fail_strangely")
def fail_strangely() -> TaskResult[int, TaskError]:
    raise ValueError("half a character: \udc80")


@app.task("leave")
def leave() -> TaskResult[int, TaskError]:
    sys.exit(3)


@app.task("interrupt")
def interrupt() -> TaskResult[int, TaskError]:
    raise KeyboardInterrupt


@app.task("recurse")
def recurse() -> TaskResult[int, TaskError]:
    def deeper(depth: int) -> int:
        return deeper(depth + 1)

    return TaskResult(ok=deeper(0))


@app.task("return_text")
def return_text(length: int) -> TaskResult[str, TaskError]:
    return TaskResult(ok="x" * length)


@app.task("fail_at_length")
def fail_at_length(length: int) -> TaskResult[str, TaskError]:
    return TaskResult(err=TaskError(error_code="TOO_MUCH", message="x" * length))


@app.task("return_strange_value")
def return_strange_value() -> TaskResult[Any, TaskError]:
    return TaskResult(ok=object())


@app.task("wait")
def wait(marker: str) -> TaskResult[int, TaskError]:
    with open(marker, "w") as file:
        file.write("started")
    while True:
        asyncio.run(asyncio.sleep(60))


@app.task("wait_async")
async def wait_async(marker: str) -> TaskResult[int, TaskError]:
    os.mkdir(marker)
    await asyncio.Event().wait()
    return TaskResult(ok=1)


def mark(marker: str) -> None:
    Path(marker).touch()


def mark_and_block(marker: str, seconds: float) -> None:
    mark(marker)
    time.sleep(seconds)


@app.task("wait_and_wrap")
def wait_and_wrap(marker: str) -> TaskResult[int, TaskError]:
    try:
        mark_and_block(marker, 600)
    except BaseException as error:
        raise RuntimeError("rolled back") from error
    return TaskResult(ok=1)


async def keep_busy(marker: str) -> None:
    while True:
        mark_and_block(marker, 0.01)
        await asyncio.sleep(0)


@app.task("wait_for_group")
async def wait_for_group(marker: str) -> TaskResult[int, TaskError]:
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_busy(marker))
    return TaskResult(ok=1)


@app.task("wait_beside_background")
async def wait_beside_background(marker: str) -> TaskResult[int, TaskError]:
    background = asyncio.create_task(keep_busy(marker))
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        mark(marker + ".cleaned")
    return TaskResult(ok=len(background.get_name()))


@app.task("wait_beside_callbacks")
async def wait_beside_callbacks(marker: str) -> TaskResult[int, TaskError]:
    def call_again() -> None:
        mark_and_block(marker, 0.01)
        asyncio.get_running_loop().call_soon(call_again)

    asyncio.get_running_loop().call_soon(call_again)
    try:
        await asyncio.sleep(600)
    finally:
        mark(marker + ".cleaned")
    return TaskResult(ok=1)


@app.task("block_in_coroutine")
async def block_in_coroutine(marker: str) -> TaskResult[int, TaskError]:
    try:
        mark_and_block(marker, 600)
    finally:
        await asyncio.sleep(0)
        mark(marker + ".cleaned")
    return TaskResult(ok=1)


@app.task("finish_when_stopped")
def finish_when_stopped(marker: str) -> TaskResult[str, TaskError]:
    try:
        mark_and_block(marker, 600)
    except TaskStopped:
        return TaskResult(ok="as far as it came")
    return TaskResult(ok="all of it")


@app.task("stop_loop")
async def stop_loop(marker: str) -> TaskResult[int, TaskError]:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    mark(marker)
    return TaskResult(ok=1)


class Exiting(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def leave(cls, number: int) -> int:
        sys.exit(4)


@app.task("take_exiting")
def take_exiting(value: Exiting) -> TaskResult[int, TaskError]:
    return TaskResult(ok=value.number)


@app.task("close_stderr", exception_mapper={ValueError: "MINE"})
def close_stderr() -> TaskResult[int, TaskError]:
    sys.stderr.close()
    raise ValueError("mine")


class SlowToStore(BaseModel):
    number: int

    @field_serializer("number")
    def store(self, number: int) -> int:
        time.sleep(0.3)
        return number


@app.task("leave_alarm")
def leave_alarm() -> TaskResult[SlowToStore, TaskError]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError("a bell nobody took down")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return TaskResult(ok=SlowToStore(number=1))


@app.task("describe_child")
def describe_child() -> TaskResult[list[str], TaskError]:
    current = get_current_app()
    return TaskResult(
        ok=[
            "current" if current is app else "other",
            "suppressed" if app.are_sends_suppressed() else "sending",
            app.role,
            os.environ.get("HORSIES_CHILD_PROCESS", ""),
            *hooks_that_ran,
        ]
    )


assert app.are_sends_suppressed() or "HORSIES_CHILD_PROCESS" not in os.environ
