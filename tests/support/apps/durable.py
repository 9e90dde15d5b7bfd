"""Durable functions for workers that are killed: every call of a step leaves a line in the journal."""

from __future__ import annotations

import os
import time

from horsies import Durable, Horsies, RetryPolicy, TaskTransaction, current_task
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
