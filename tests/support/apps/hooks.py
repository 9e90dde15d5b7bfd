"""An application whose children run start hooks; the environment says which of them fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

from horsies import Horsies, TaskError, TaskResult
from tests.support.apps.programs import read_config

FAILING_VARIABLE = "HORSIES_E2E_FAILING_HOOK"
FILE_VARIABLE = "HORSIES_E2E_HOOK_FAILS_IF"

app = Horsies(read_config())
ran: list[str] = []


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


@app.task("hooks_that_ran")
def hooks_that_ran() -> TaskResult[list[str], TaskError]:
    return TaskResult(ok=[str(os.getpid()), *ran])


@app.task("rest")
def rest(seconds: float) -> TaskResult[str, TaskError]:
    time.sleep(seconds)
    return TaskResult(ok="done")
