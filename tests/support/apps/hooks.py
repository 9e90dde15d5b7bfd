"""An application whose children run start hooks; the environment names the hook that fails."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from horsies import Horsies, TaskError, TaskResult
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

FAILING_VARIABLE = "HORSIES_E2E_FAILING_HOOK"
FILE_VARIABLE = "HORSIES_E2E_HOOK_FAILS_IF"

app = Horsies(read_config())
ran: list[str] = []
loops: list[asyncio.AbstractEventLoop] = []


@app.on_child_process_start
def open_first() -> None:
    ran.append("open_first")


@app.on_child_process_start
def open_second() -> None:
    match os.environ.get(FAILING_VARIABLE):
        case "raises":
            raise RuntimeError("no licence left")
        case "overruns":
            time.sleep(600)
        case "raises later" if Path(os.environ[FILE_VARIABLE]).exists():
            raise RuntimeError("no licence left")
    ran.append("open_second")


app.on_child_process_start(open_first)


@app.on_child_process_start
async def open_async() -> None:
    loops.append(asyncio.get_running_loop())
    ran.append("open_async")


def note_stop(name: str) -> None:
    with open(os.environ[JOURNAL_VARIABLE], "a") as journal:
        journal.write(f"{name} {os.getpid()}\n")


@app.on_child_process_stop
def close_first() -> None:
    note_stop("close_first")
    if os.environ.get(FAILING_VARIABLE) == "stop overruns":
        time.sleep(600)


@app.on_child_process_stop
async def close_second() -> None:
    note_stop("close_second")
    raise RuntimeError("already closed")


@app.task("is_on_the_loop_of_the_hook")
async def is_on_the_loop_of_the_hook() -> TaskResult[bool, TaskError]:
    return TaskResult(ok=loops == [asyncio.get_running_loop()])


@app.task("hooks_that_ran")
def hooks_that_ran() -> TaskResult[list[str], TaskError]:
    return TaskResult(ok=[str(os.getpid()), *ran])


@app.task("rest")
def rest(seconds: float) -> TaskResult[str, TaskError]:
    time.sleep(seconds)
    return TaskResult(ok="done")
