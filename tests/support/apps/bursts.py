"""Very short tasks that children may hold in windows, and one task that they may not hold."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from horsies import Horsies, RetryPolicy
from horsies.current_task import current_task
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
AGAIN = RetryPolicy.fixed([1] * 20, auto_retry_for=["WORKER_CRASHED"], jitter=False)


def note() -> None:
    """Add a line (task, attempt, process) to the journal in one write, so that a kill cannot truncate
    the line.
    """
    task = current_task()
    journal = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{task.id} {task.attempt} {os.getpid()}\n".encode())
    os.close(journal)


@app.task("blink", retry_policy=AGAIN)
def blink(seconds: float = 0.0, label: str = "") -> str:
    """Wait for this many seconds or, with a label, until the test releases the label."""
    note()
    time.sleep(seconds)
    while label and not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
        time.sleep(0.01)
    return "done"


@app.task("flash", burst=True)
def flash(seconds: float = 0.0) -> str:
    note()
    time.sleep(seconds)
    return "done"


@app.task("plain")
def plain() -> str:
    note()
    return "done"


@app.task("misbehave", retry_policy=AGAIN)
def misbehave(how: str) -> str:
    """Misbehave in the first attempt, mostly by killing the process; do nothing in later attempts."""
    note()
    if current_task().attempt > 1:
        return "done"
    match how:
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "close":
            os.closerange(3, 2000)
        case "fork":
            if os.fork() == 0:
                os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("refused")
        case "much":
            return "x" * 20_000_000
    return "done"
