"""Durable functions for workers that are killed: every call of a step leaves a line in the journal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from horsies import Durable, Horsies, RetryPolicy, TaskTransaction, current_task
from horsies.db.task_transaction import TaskSession
from horsies.durable.engine import Engine
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
AGAIN = RetryPolicy.fixed([0.02] * 500, auto_retry_for=["WORKER_CRASHED"], jitter=False)


def note(what: str, token: str) -> None:
    """Add a line to the journal in one call, so that no kill can cut it: task, step, token."""
    journal = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{current_task().id} {what} {token}\n".encode())
    os.close(journal)


def act(number: int, pause: float) -> str:
    """An effect outside of the database, whose value no second call returns again."""
    token = os.urandom(4).hex()
    time.sleep(pause)
    note(f"act-{number}", token)
    time.sleep(pause)
    return token


def write(tx: TaskTransaction, number: int, pause: float) -> int:
    tx.connection.execute(
        "INSERT INTO durable_effects VALUES (%s, %s)", (current_task().id, number)
    )
    time.sleep(pause)
    return number


@app.task("double", retry_policy=AGAIN)
def double(number: int) -> int:
    return 2 * number


@app.durable("tour", retry_policy=AGAIN)
def tour(ctx: Durable, pause: float) -> list[str]:
    """Every kind of step, several waits."""
    tokens = [ctx.with_options(name="first").step(act, 0, pause)]
    ctx.tx_step(write, 1, pause)
    ctx.sleep(1.05)
    child = ctx.start(double, 21)
    tokens += ctx.gather(*[ctx.call(act, number, pause) for number in (1, 2)])
    tokens.append(str(ctx.result(child)))
    tokens.append(ctx.wait_signal("go", str))
    ctx.tx_step(write, 2, pause)
    tokens.append(ctx.with_options(name="last").step(act, 3, pause))
    return tokens


@app.durable("steps", retry_policy=AGAIN)
def steps(ctx: Durable, count: int) -> int:
    return sum(ctx.step(abs, number) for number in range(count))


@app.durable("rest", retry_policy=AGAIN)
def rest(ctx: Durable, label: str) -> str:
    """A step that lasts until the test releases the label, then one in the database."""

    def wait_for_release() -> str:
        token = os.urandom(4).hex()
        note("wait", token)
        while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
            time.sleep(0.005)
        return token

    token = ctx.step(wait_for_release)
    ctx.tx_step(write, 1, 0.0)
    return token


def undo(number: int) -> None:
    note(f"undo-{number}", "-")


@app.durable("saga", retry_policy=AGAIN)
def saga(ctx: Durable, pause: float) -> int:
    """Effects with their clean-up, waits between them, and a child that outlives none of them."""
    for number in range(4):
        ctx.on_cancel(undo, number)
        ctx.step(act, number, pause)
        if number == 1:
            ctx.start(double.with_options(delay=timedelta(hours=1)), number)
            ctx.sleep(1.05)
    ctx.wait_signal("go", str)
    return 4


def die_once(point: str, wanted: str) -> None:
    """Kill this process if the run wants to die at this point and has not done so yet."""
    marker = f"{os.environ[JOURNAL_VARIABLE]}.{current_task().id}.died"
    if point == wanted and not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)


# Where the run of this process wants to die, for the points inside of the library.
wanted_point = ""


def dies_around(method: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    """A method of the library that dies before or after its work."""

    def call(*args: Any) -> Any:
        is_step = len(args) == 1 or getattr(args[1], "name", "") == "record_step"
        if not (wanted_point and is_step):
            return method(*args)
        die_once(before, wanted_point)
        done = method(*args)
        die_once(after, wanted_point)
        return done

    return call


Engine._execute = dies_around(Engine._execute, "before the INSERT", "after the INSERT")  # type: ignore[method-assign]
TaskSession.commit = dies_around(TaskSession.commit, "before COMMIT", "after COMMIT")  # type: ignore[method-assign]


def effect(wanted: str) -> str:
    token = os.urandom(4).hex()
    die_once("before the effect", wanted)
    note("effect", token)
    die_once("after the effect", wanted)
    return token


def effect_in_database(tx: TaskTransaction, wanted: str) -> None:
    write(tx, 1, 0.0)
    die_once("in the transaction", wanted)


@app.durable("boundary", retry_policy=AGAIN)
def boundary(ctx: Durable, wanted: str) -> str:
    """Die once, at the wanted point."""
    global wanted_point
    wanted_point = wanted
    try:
        note("call", "-")
        token = ctx.step(effect, wanted)
        ctx.tx_step(effect_in_database, wanted)
        try:
            ctx.sleep(1.05)
        finally:
            if ctx.is_parking:
                die_once("before the park", wanted)
        die_once("after the wake-up", wanted)
        child = ctx.start(double, 21)
        die_once("after the start of a child", wanted)
        token += str(ctx.result(child)) + ctx.wait_signal("go", str)
        die_once("before the outcome", wanted)
        return token
    finally:
        wanted_point = ""
