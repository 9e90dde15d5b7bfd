"""An application with tasks that attack their own process, next to ordinary tasks."""

from __future__ import annotations

import asyncio
import os
import time

from horsies import Horsies
from tests.support.apps.bursts import note
from tests.support.apps.hostile import KINDS, LOOP_KINDS
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
# The time limit that ends a task that stops its own process.
TIME_LIMIT_MS = 1_000


@app.task("attack", timeout_ms=TIME_LIMIT_MS)
def attack(kind: str) -> str:
    KINDS[kind]()
    return "done"


@app.task("attack_burst", burst=True, timeout_ms=TIME_LIMIT_MS)
def attack_burst(kind: str) -> str:
    if kind:  # Without an argument, the task is as short as the others of a window.
        KINDS[kind]()
    return "done"


@app.task("attack_async", timeout_ms=TIME_LIMIT_MS)
async def attack_async(kind: str) -> str:
    if kind in LOOP_KINDS:
        await LOOP_KINDS[kind]()
    else:
        KINDS[kind]()
    return "done"


@app.task("innocent")
def innocent() -> str:
    note()
    return "done"


@app.task("innocent_burst", burst=True)
def innocent_burst() -> str:
    note()
    return "done"


@app.task("innocent_async")
async def innocent_async(seconds: float) -> str:
    note()
    await asyncio.sleep(seconds)
    return "done"


@app.task("wait", burst=True)
def wait(label: str) -> str:
    """Wait until the test releases the label or this task is cancelled."""
    note()
    while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
        time.sleep(0.01)
    return "done"
