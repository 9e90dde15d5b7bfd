"""The application under load: tasks that account for themselves in the journal, workflows, schedules.

Every task holds file locks while it runs: one by its id, one slot of its queue, one slot of the cluster.
The kernel releases a lock when its process ends, however it ends. A task that finds its own lock taken
overlaps another execution of itself; the number of its slot is how many tasks ran at that moment.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TypeVar

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    IntervalSchedule,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    RetryPolicy,
    ScheduleConfig,
    TaskError,
    TaskResult,
    TaskSchedule,
    WorkerResilienceConfig,
)
from horsies.current_task import current_task
from tests.soak import journal
from tests.soak.limits import (
    CLUSTER_CAP,
    POOLED_PATIENCE_MS,
    QUEUE_CAPS,
    SCHEDULES,
    recovery_settings,
)
from tests.support.apps import hostile
from tests.support.workers import DATABASE_VARIABLE

Value = TypeVar("Value")
Number = TaskResult[int, TaskError]
CRASHED = "WORKER_CRASHED"
AGAIN = RetryPolicy.fixed([1] * 20, auto_retry_for=[CRASHED], jitter=False)
SPOILT_AGAIN = RetryPolicy.fixed(
    [1] * 20, auto_retry_for=[CRASHED, "TASK_TIMEOUT", "UNHANDLED_EXCEPTION"], jitter=False
)
FLAKY_AGAIN = RetryPolicy.fixed([1] * 20, auto_retry_for=[CRASHED, "FLAKY"], jitter=False)


def read_broker() -> PostgresConfig:
    """The way to the database; for a pooled worker also the one past the pooler."""
    database_url = os.environ[DATABASE_VARIABLE]
    session_url = os.environ.get(journal.SESSION_VARIABLE)
    if session_url is None:
        return PostgresConfig(database_url=database_url)
    return PostgresConfig(
        database_url=database_url,
        session_database_url=session_url,
        pgbouncer_transaction_mode=True,
        tcp_user_timeout_ms=POOLED_PATIENCE_MS,
    )


def read_config() -> AppConfig:
    return AppConfig(
        broker=read_broker(),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name=name, priority=number, max_concurrency=cap)
            for number, (name, cap) in enumerate(QUEUE_CAPS.items(), start=1)
        ],
        cluster_wide_cap=CLUSTER_CAP,
        recovery=RecoveryConfig.model_validate(recovery_settings()),
        resilience=WorkerResilienceConfig(
            db_retry_initial_ms=100, db_retry_max_ms=1_000, notify_poll_interval_ms=2_000
        ),
        schedule=ScheduleConfig(
            schedules=[
                TaskSchedule(
                    name=name,
                    task_name="note_slot",
                    kwargs={"label": name},
                    queue_name="open",
                    pattern=IntervalSchedule(seconds=seconds),
                    catch_up_missed=catches_up,
                )
                for name, (seconds, catches_up) in SCHEDULES.items()
            ],
            check_interval_seconds=1,
        ),
    )


app = Horsies(read_config())


def _locks() -> Path:
    return Path(os.environ[journal.JOURNAL_VARIABLE]).parent / "locks"


def _try_lock(stack: ExitStack, name: str) -> bool:
    """Take a file lock until the stack closes and write the holder into the file."""
    descriptor = os.open(_locks() / name, os.O_RDWR | os.O_CREAT, mode=0o644)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, os.environ[journal.WORKER_VARIABLE].encode(), 0)
    return True


def _holder(name: str) -> str:
    return (_locks() / name).read_text()


def _take_slot(stack: ExitStack, name: str, cap: int | None, task_id: str) -> None:
    """Take the first free slot; one beyond the cap is a breach, noted with the holders of the others."""
    for number in count():
        if _try_lock(stack, f"{name}-{number}"):
            break
    if cap is not None and number >= cap:
        holders = [_holder(f"{name}-{other}") for other in range(number)]
        note("crowded", task_id, slots=name, place=number + 1, cap=cap, holders=holders)


def note(what: journal.What, task_id: str, **fields: object) -> None:
    journal.write(
        what, task_id=task_id, worker=os.environ[journal.WORKER_VARIABLE], pid=os.getpid(), **fields
    )


@contextmanager
def accounted(queue: str, **fields: object) -> Iterator[int]:
    """Note the begin of an attempt, its overlaps and breached caps; the number of the attempt."""
    task = current_task()
    with ExitStack() as stack:
        is_alone = _try_lock(stack, task.id)
        other = None if is_alone else _holder(task.id)
        note("begin", task.id, attempt=task.attempt, other=other, queue=queue, **fields)
        _take_slot(stack, "cluster", CLUSTER_CAP, task.id)
        _take_slot(stack, f"queue-{queue}", QUEUE_CAPS[queue], task.id)
        yield task.attempt


def finish(value: Value) -> TaskResult[Value, TaskError]:
    """Note the result of the attempt, then return it."""
    task = current_task()
    note("end", task.id, attempt=task.attempt, value=value)
    return TaskResult(ok=value)


def answer_to(number: int) -> int:
    """The right result of a task with this number."""
    return 7 * number + 1


def work(queue: str, number: int, seconds: float) -> Number:
    with accounted(queue, number=number):
        time.sleep(seconds)
        return finish(answer_to(number))


@app.task("work_once", queue_name="open")
def work_once(number: int, seconds: float) -> Number:
    return work("open", number, seconds)


@app.task("work_again", queue_name="open", retry_policy=AGAIN)
def work_again(number: int, seconds: float) -> Number:
    return work("open", number, seconds)


@app.task("work_wide", queue_name="wide", retry_policy=AGAIN)
def work_wide(number: int, seconds: float) -> Number:
    return work("wide", number, seconds)


@app.task("work_narrow", queue_name="narrow", retry_policy=AGAIN)
def work_narrow(number: int, seconds: float) -> Number:
    return work("narrow", number, seconds)


@app.task("blink", queue_name="quick", burst=True)
def blink(number: int, seconds: float) -> Number:
    """Very short, and handed to children in windows; not retried."""
    return work("quick", number, seconds)


@app.task("blink_again", queue_name="quick", retry_policy=AGAIN)
def blink_again(number: int, seconds: float) -> Number:
    return work("quick", number, seconds)


@app.task("nap", queue_name="quick", retry_policy=AGAIN)
async def nap(number: int, seconds: float) -> Number:
    """A coroutine, for async children."""
    with accounted("quick", number=number):
        await asyncio.sleep(seconds)
        return finish(answer_to(number))


@app.task("misbehave", queue_name="quick", retry_policy=SPOILT_AGAIN, timeout_ms=3_000)
def misbehave(number: int, how: str) -> Number:
    """Harm its own process in the first attempt."""
    with accounted("quick", number=number, how=how) as attempt:
        pass
    if attempt == 1:
        hostile.KINDS[how]()
    return finish(answer_to(number))


@app.task("misbehave_async", queue_name="quick", retry_policy=SPOILT_AGAIN, timeout_ms=3_000)
async def misbehave_async(number: int, how: str) -> Number:
    """Harm the event loop in the first attempt."""
    with accounted("quick", number=number, how=how) as attempt:
        await asyncio.sleep(0)
    if attempt == 1:
        await hostile.LOOP_KINDS[how]()
    return finish(answer_to(number))


@app.task("fail_first", queue_name="open", retry_policy=FLAKY_AGAIN)
def fail_first(number: int, seconds: float) -> Number:
    """Fail the first attempt by itself; a crash may take that attempt's place."""
    with accounted("open", number=number) as attempt:
        time.sleep(seconds)
        if attempt == 1:
            return TaskResult(err=TaskError(error_code="FLAKY", message="not yet"))
        return finish(answer_to(number))


@app.task("note_slot", queue_name="open", retry_policy=AGAIN)
def note_slot(label: str, scheduled_for: datetime | None = None) -> Number:
    shown = None if scheduled_for is None else scheduled_for.isoformat()
    with accounted("open", label=label, slot=shown):
        return finish(0)
