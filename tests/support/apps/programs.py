"""The application of these tests' workers, with a task for every behaviour of tasks.
The environment determines its database, its journal and its configuration.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import random
import signal
import string
import subprocess
import threading
import time
from typing import Any

from pydantic import BaseModel

from horsies import AppConfig, Horsies, RetryPolicy, TaskError, TaskResult
from horsies.current_task import current_task
from horsies.errors import RetryLater, TaskStopped
from tests.support.workers import CONFIG_VARIABLE, JOURNAL_VARIABLE, broker_settings

logger = logging.getLogger("programs")


def read_config() -> AppConfig:
    changes = json.loads(os.environ.get(CONFIG_VARIABLE) or "{}") | {"broker": broker_settings()}
    return AppConfig(**changes)


app = Horsies(read_config())


def write_down(what: str, label: str = "") -> None:
    """Add a line to the journal; return once it is on disk."""
    task = current_task()
    line = {
        "what": what,
        "task_id": task.id,
        "attempt": task.attempt,
        "pid": os.getpid(),
        "at": time.time(),
        "label": label,
    }
    journal = os.open(
        os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o644
    )
    try:
        os.write(journal, (json.dumps(line) + "\n").encode())
        os.fsync(journal)
    finally:
        os.close(journal)


def done() -> TaskResult[str, TaskError]:
    return TaskResult(ok="done")


# Tasks that end by themselves


@app.task("add")
def add(a: int, b: int) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a + b)


@app.task("add_async")
async def add_async(a: int, b: int) -> TaskResult[int, TaskError]:
    await asyncio.sleep(0)
    return TaskResult(ok=a + b)


@app.task("noop")
def noop() -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


@app.task("own_pid")
def own_pid() -> TaskResult[int, TaskError]:
    return TaskResult(ok=os.getpid())


@app.task("refuse")
def refuse(code: str = "OUT_OF_STOCK") -> TaskResult[int, TaskError]:
    return TaskResult(err=TaskError(error_code=code, message="nothing left", data={"left": 0}))


@app.task("explode")
def explode(message: str = "boom") -> TaskResult[int, TaskError]:
    raise ValueError(message)


@app.task("exit_politely")
def exit_politely() -> TaskResult[int, TaskError]:
    raise SystemExit(5)


@app.task("recurse")
def recurse() -> TaskResult[int, TaskError]:
    def deeper() -> None:
        deeper()

    deeper()
    return TaskResult(ok=0)


@app.task(
    "lose_connection",
    exception_mapper={ConnectionError: "GATEWAY_DOWN"},
    default_unhandled_error_code="SOMETHING_ELSE",
)
def lose_connection(kind: str = "exact") -> TaskResult[int, TaskError]:
    kinds = {"exact": ConnectionError, "subclass": ConnectionResetError, "other": OSError}
    raise kinds[kind]("gone")


@app.task("return_nothing")
def return_nothing() -> TaskResult[int, TaskError]:
    return None  # type: ignore[return-value]


@app.task("return_wrong_type")
def return_wrong_type() -> TaskResult[int, TaskError]:
    return TaskResult(ok="not a number")  # type: ignore[arg-type]


class Order(BaseModel):
    """Something with a shape."""

    number: int
    items: list[str]


@app.task("pack")
def pack(order: Order) -> TaskResult[Order, TaskError]:
    return TaskResult(ok=Order(number=order.number + 1, items=[*order.items, "receipt"]))


@app.task("return_unstorable")
def return_unstorable() -> TaskResult[Any, TaskError]:
    return TaskResult(ok={"lock": threading.Lock()})


@app.task("make_text")
def make_text(length: int) -> TaskResult[str, TaskError]:
    return TaskResult(ok="x" * length)


@app.task("repeat_text")
def repeat_text(text: str, times: int) -> TaskResult[str, TaskError]:
    return TaskResult(ok=text * times)


@app.task("send_another")
def send_another(a: int, b: int) -> TaskResult[str, TaskError]:
    return TaskResult(ok=add.send(a, b).unwrap().task_id)


@app.task("grow")
def grow(megabytes: int) -> TaskResult[int, TaskError]:
    HOARD.append(os.urandom(1024 * 1024) * megabytes)
    return TaskResult(ok=os.getpid())


HOARD: list[bytes] = []


# Tasks that log


@app.task("log_lines")
def log_lines(text: str) -> TaskResult[None, TaskError]:
    logger.warning("plain %s", text)
    logger.warning("own fields %s", text, extra={"task_id": "my own"})
    thread = threading.Thread(target=logger.warning, args=(f"thread {text}",))
    thread.start()
    thread.join()
    return TaskResult(ok=None)


@app.task("log_line_async")
async def log_line_async(text: str) -> TaskResult[None, TaskError]:
    await asyncio.sleep(0)
    logger.warning("coroutine %s", text)
    return TaskResult(ok=None)


# Tasks that are tried again


@app.task("fail_then_work", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["FLAKY"]))
def fail_then_work() -> TaskResult[str, TaskError]:
    task = current_task()
    if task.attempt == 1:
        return TaskResult(err=TaskError(error_code="FLAKY", message="not yet"))
    return done()


@app.task(
    "fail_on_schedule",
    retry_policy=RetryPolicy.fixed([1, 1, 2], auto_retry_for=["FLAKY"], jitter=False),
)
def fail_on_schedule() -> TaskResult[str, TaskError]:
    write_down("start")
    return TaskResult(err=TaskError(error_code="FLAKY", message="never"))


@app.task(
    "fail_soon_and_late",
    retry_policy=RetryPolicy.fixed([1, 3_600], auto_retry_for=["FLAKY"], jitter=False),
)
def fail_soon_and_late() -> TaskResult[str, TaskError]:
    return TaskResult(err=TaskError(error_code="FLAKY", message="never"))


class Away(Exception):
    """A base class of a library's exceptions."""


class Unplugged(Away):
    pass


@app.task(
    "raise_then_work",
    retry_policy=RetryPolicy.fixed([0.05, 0.1], auto_retry_for=[Away], jitter=False),
)
def raise_then_work() -> TaskResult[str, TaskError]:
    task = current_task()
    if task.attempt < 3:
        raise Unplugged("the cable")
    raise KeyError("something else")


@app.task("ask_for_retry")
def ask_for_retry(seconds: float, times: int) -> TaskResult[str, TaskError]:
    task = current_task()
    if task.attempt <= times:
        raise RetryLater(seconds, "the gateway is busy")
    return done()


@app.task(
    "ask_for_one_retry",
    exception_mapper={RetryLater: "GATEWAY_BUSY"},
    retry_policy=RetryPolicy.fixed([60], auto_retry_for=["TASK_TIMEOUT"]),
)
def ask_for_one_retry() -> TaskResult[str, TaskError]:
    raise RetryLater(0)


# The text is random, because an index compresses repetitive entries.
LONG_CODE = "".join(random.Random(1).choices(string.ascii_uppercase, k=5_000))


@app.task(
    "fail_with_long_code",
    retry_policy=RetryPolicy.fixed([1], auto_retry_for=[LONG_CODE], jitter=False),
)
def fail_with_long_code() -> TaskResult[str, TaskError]:
    return TaskResult(err=TaskError(error_code=LONG_CODE, message="too long", data={"left": 0}))


@app.task(
    "crash_then_work",
    retry_policy=RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"], jitter=False),
)
def crash_then_work() -> TaskResult[str, TaskError]:
    task = current_task()
    if task.attempt == 1:
        os._exit(7)
    return done()


# Tasks that end their process


@app.task("exit_at_once")
def exit_at_once(code: int = 3) -> TaskResult[int, TaskError]:
    os._exit(code)


@app.task("segfault")
def segfault() -> TaskResult[int, TaskError]:
    ctypes.string_at(0)
    return TaskResult(ok=0)


@app.task("kill_itself")
def kill_itself(number: int) -> TaskResult[int, TaskError]:
    os.kill(os.getpid(), number)
    return TaskResult(ok=0)


@app.task("write_to_descriptor")
def write_to_descriptor(descriptor: int) -> TaskResult[str, TaskError]:
    """Write as a C library does, without Python's stream objects; return the name of the file."""
    os.write(descriptor, b"words\n")
    return TaskResult(ok=os.readlink(f"/proc/self/fd/{descriptor}"))


# Tasks that take their time


def rest(seconds: float, label: str) -> TaskResult[str, TaskError]:
    write_down("start", label)
    time.sleep(seconds)
    write_down("end", label)
    return done()


@app.task("sleep")
def sleep(seconds: float, label: str = "") -> TaskResult[str, TaskError]:
    return rest(seconds, label)


@app.task("rest_until_released")
def rest_until_released(label: str) -> TaskResult[str, TaskError]:
    write_down("start", label)
    while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
        time.sleep(0.01)
    write_down("end", label)
    return done()


@app.task(
    "sleep_again",
    retry_policy=RetryPolicy.fixed(
        [1] * 20, auto_retry_for=["WORKER_CRASHED", "WORKER_STOPPED"], jitter=False
    ),
)
def sleep_again(seconds: float, label: str = "") -> TaskResult[str, TaskError]:
    return rest(seconds, label)


@app.task("sleep_async")
async def sleep_async(seconds: float) -> TaskResult[str, TaskError]:
    try:
        write_down("start")
        await asyncio.sleep(seconds)
    finally:
        write_down("clean-up")
    return done()


@app.task("sleep_or_fail", on_stop="fail")
def sleep_or_fail(seconds: float) -> TaskResult[str, TaskError]:
    write_down("start")
    time.sleep(seconds)
    return done()


@app.task("sleep_or_return", on_stop="requeue")
def sleep_or_return(seconds: float) -> TaskResult[str, TaskError]:
    write_down("start")
    time.sleep(seconds)
    return done()


@app.task("sleep_and_clean_up")
def sleep_and_clean_up(seconds: float) -> TaskResult[str, TaskError]:
    try:
        write_down("start")
        time.sleep(seconds)
    except TaskStopped:
        write_down("stopped")
        raise
    finally:
        write_down("clean-up")
    return done()


@app.task("never_stop")
def never_stop() -> TaskResult[str, TaskError]:
    while True:
        try:
            write_down("start")
            while True:
                pass
        except TaskStopped:
            write_down("ignored")


@app.task("start_grandchild")
def start_grandchild() -> TaskResult[str, TaskError]:
    grandchild = subprocess.Popen(["sleep", "600"])
    write_down("start", str(grandchild.pid))
    signal.pause()
    return done()


@app.task("start_programs")
def start_programs(*, changes_user: bool = False, ends: bool = False) -> TaskResult[str, TaskError]:
    """Start programs in the child's process group, in their own session, and as an orphan."""
    if changes_user:
        # The first of the two changes makes the kernel forget the death signal.
        os.seteuid(65534)
        os.seteuid(0)
    plain = subprocess.Popen(["sleep", "600"])
    detached = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    for pid in (plain.pid, detached.pid, start_orphan()):
        write_down("program", str(pid))
    write_down("start")
    if not ends:
        signal.pause()
    return done()


def start_orphan() -> int:
    """Return the pid of a process that has its own session and whose parent has ended."""
    reader, writer = os.pipe()
    intermediate_pid = os.fork()
    if intermediate_pid == 0:
        os.setsid()
        orphan_pid = os.fork()
        while orphan_pid == 0:
            signal.pause()
        os.write(writer, str(orphan_pid).encode())
        os._exit(0)
    os.waitpid(intermediate_pid, 0)
    with open(reader) as pids, open(writer, "w"):
        return int(os.read(pids.fileno(), 20))


@app.task("limited", timeout_ms=300)
def limited(seconds: float) -> TaskResult[str, TaskError]:
    return rest(seconds, "")


@app.task("limited_and_telling", timeout_ms=2_000)
def limited_and_telling(seconds: float) -> TaskResult[str, TaskError]:
    try:
        write_down("start")
        time.sleep(seconds)
    except TaskStopped:
        write_down("stopped")
        raise
    return done()


@app.task("limited_and_wrapping", timeout_ms=300)
def limited_and_wrapping() -> TaskResult[str, TaskError]:
    try:
        return rest(600, "")
    except BaseException as error:
        raise RuntimeError("rolled back") from error


@app.task("limited_in_group", timeout_ms=300)
async def limited_in_group() -> TaskResult[str, TaskError]:
    async with asyncio.TaskGroup() as group:
        group.create_task(block())
    return done()


async def block() -> None:
    rest(600, "")


@app.task("limited_and_deaf", timeout_ms=300)
def limited_and_deaf() -> TaskResult[str, TaskError]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return rest(600, "")


@app.task(
    "limited_and_retried",
    timeout_ms=300,
    retry_policy=RetryPolicy.fixed([1], auto_retry_for=["TASK_TIMEOUT"], jitter=False),
)
def limited_and_retried() -> TaskResult[str, TaskError]:
    task = current_task()
    return rest(600 if task.attempt == 1 else 0, "")
