"""Tasks that log in threads, before a crash, in transactions, and in runs that wait."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from datetime import timedelta

from horsies import Durable, Horsies, RetryPolicy, TaskTransaction
from horsies.current_task import current_task
from tests.support.apps.bursts import AGAIN
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
logger = logging.getLogger("talking")


def note(text: str) -> None:
    """Log a line, then add it to the journal."""
    task = current_task()
    logger.info("%s", text)
    journal = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{task.id} {task.attempt} {os.getpid()} {text}\n".encode())
    os.close(journal)


def wait_for(label: str) -> None:
    while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
        time.sleep(0.01)


@app.task("talk", timeout_ms=3_000)
def talk(count: int, label: str = "") -> int:
    for number in range(count):
        logger.info("line %d", number)
    if label:
        note("waiting")
        try:
            wait_for(label)
        finally:
            logger.warning("leaving")
    return count


@app.task("stumble", retry_policy=RetryPolicy.fixed([1], auto_retry_for=[KeyError], jitter=False))
def stumble() -> str:
    task = current_task()
    task.logger.info("attempt %d", task.attempt)
    thread = threading.Thread(target=logger.warning, args=("from a thread",))
    thread.start()
    thread.join()
    logger.debug("not kept")
    if task.attempt == 1:
        raise KeyError("password=swordfish")
    return "done"


@app.task("quiet")
def quiet() -> str:
    return "done"


@app.task("wait_here")
def wait_here(label: str) -> str:
    note("before")
    wait_for(label)
    return "done"


@app.task("short", burst=True, retry_policy=AGAIN)
def short(number: int) -> int:
    """A task for windows that sometimes kills its child."""
    note(f"number {number}")
    if number % 25 == 7 and current_task().attempt == 1:
        os._exit(3)
    return number


@app.task("steady", retry_policy=AGAIN)
def steady(number: int) -> int:
    note(f"number {number}")
    time.sleep(0.02)
    return number


@app.task("wait_async")
async def wait_async(label: str) -> str:
    for number in range(3):
        note(f"{label} {number}")
        await asyncio.sleep(0)
    await asyncio.to_thread(wait_for, label)
    return label


@app.task("talk_in_transaction")
def talk_in_transaction(tx: TaskTransaction) -> str:
    tx.connection.execute("SELECT 1")
    logger.info("inside")
    return "done"


@app.durable("talk_and_sleep")
def talk_and_sleep(ctx: Durable) -> str:
    logger.info("first stay")
    ctx.sleep(timedelta(seconds=1.5))
    logger.info("second stay")
    return "done"
