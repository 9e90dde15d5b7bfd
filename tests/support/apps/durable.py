"""Durable functions for workers that are killed; every call of a step adds a line to the journal."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from horsies import (
    AsyncDurable,
    AsyncTaskTransaction,
    Durable,
    Horsies,
    RetryPolicy,
    StepFailed,
    TaskError,
    TaskResult,
    TaskTransaction,
    current_task,
)
from horsies.db.task_transaction import AsyncTaskSession, TaskSession
from horsies.durable.async_engine import AsyncEngine
from horsies.durable.engine import Engine
from horsies.worker import turn
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

app = Horsies(read_config())
AGAIN = RetryPolicy.fixed([0.02] * 500, auto_retry_for=["WORKER_CRASHED"], jitter=False)


def note(what: str, token: str) -> None:
    """Add a line (task, step, token) to the journal in one write, so that a kill cannot truncate the
    line.
    """
    journal = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{current_task().id} {what} {token}\n".encode())
    os.close(journal)


def act(number: int, pause: float) -> str:
    """Create an effect outside the database; no two calls return the same value."""
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
    """Run every kind of step and several waits."""
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
    """Run a step that lasts until the test releases the label, then a step in the database."""

    def wait_for_release() -> str:
        token = os.urandom(4).hex()
        note("wait", token)
        while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
            time.sleep(0.005)
        return token

    token = ctx.step(wait_for_release)
    ctx.tx_step(write, 1, 0.0)
    return token


@app.durable("late", retry_policy=AGAIN, deadline=2.0)
def late(ctx: Durable, label: str) -> None:
    """Reach the deadline of the run, either in an endless step or while the run is parked."""

    def never_end() -> None:
        note("wait", "-")
        while True:
            time.sleep(0.005)

    ctx.with_options(name="undo").on_cancel(act, 1, 0.0)
    if label == "running":
        ctx.step(never_end)
    ctx.wait_signal("go")


def write_after_release(tx: TaskTransaction, label: str) -> int:
    note("wait", "-")
    tx.connection.execute("INSERT INTO durable_effects VALUES (%s, 1)", (current_task().id,))
    while not os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}"):
        time.sleep(0.005)
    return 1


@app.durable("rest_in_transaction", retry_policy=AGAIN)
def rest_in_transaction(ctx: Durable, label: str) -> int:
    """Keep a transaction open until the test releases the label."""
    return ctx.tx_step(write_after_release, label)


@app.durable("ask", retry_policy=AGAIN)
def ask(ctx: Durable) -> str:
    return ctx.wait_signal("go", str)


async def act_async(number: int, pause: float) -> str:
    """``act`` in a coroutine."""
    token = os.urandom(4).hex()
    await asyncio.sleep(pause)
    note(f"act-{number}", token)
    await asyncio.sleep(pause)
    return token


async def write_async(tx: AsyncTaskTransaction, number: int, pause: float) -> int:
    own = await tx.connection()
    await own.execute("INSERT INTO durable_effects VALUES (%s, %s)", (current_task().id, number))
    await asyncio.sleep(pause)
    return number


@app.durable("async_tour", retry_policy=AGAIN)
async def async_tour(ctx: AsyncDurable, pause: float) -> list[str]:
    """Run ``tour`` in an async child, next to other runs."""
    tokens = [await ctx.with_options(name="first", timeout_ms=60_000).step(act_async, 0, pause)]
    await ctx.tx_step(write_async, 1, pause)
    await ctx.sleep(1.05)
    child = await ctx.start(double, 21)
    tokens += await ctx.gather(*[ctx.call(act_async, number, pause) for number in (1, 2)])
    twice = await ctx.result(child)
    tokens.append(str(twice))
    tokens.append(await ctx.wait_signal("go", str))
    await ctx.tx_step(write_async, 2, pause)
    tokens.append(await ctx.with_options(name="last").step(act_async, 3, pause))
    return tokens


def undo(number: int) -> None:
    note(f"undo-{number}", "-")


@app.durable("saga", retry_policy=AGAIN)
def saga(ctx: Durable, pause: float) -> int:
    """Run effects with clean-up steps, waits between them, and a child that is cancelled with the run."""
    for number in range(4):
        ctx.on_cancel(undo, number)
        ctx.step(act, number, pause)
        if number == 1:
            ctx.start(double.with_options(delay=timedelta(hours=1)), number)
            ctx.sleep(1.05)
    ctx.wait_signal("go", str)
    return 4


def die_once(point: str, wanted: str) -> None:
    """Kill this process once, at the point that the run names."""
    marker = f"{os.environ[JOURNAL_VARIABLE]}.{current_task().id}.died"
    if point == wanted and not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)


# The point inside the library at which the process of this run is to be killed.
wanted_point = ""


def dies_around(method: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    """Wrap a method of the library so that the process is killed before or after it."""

    def is_point(args: tuple[Any, ...]) -> bool:
        is_step = len(args) == 1 or getattr(args[1], "name", "") == "record_step"
        return bool(wanted_point) and is_step

    def call(*args: Any) -> Any:
        if not is_point(args):
            return method(*args)
        die_once(before, wanted_point)
        done = method(*args)
        die_once(after, wanted_point)
        return done

    async def call_async(*args: Any) -> Any:
        if not is_point(args):
            return await method(*args)
        die_once(before, wanted_point)
        done = await method(*args)
        die_once(after, wanted_point)
        return done

    return call_async if inspect.iscoroutinefunction(method) else call


# The number of the effect before or after which the process of this run is killed; -1 for none.
wanted_number: int | None = None


def pass_point() -> None:
    """Count a point of the run, in a file across all its calls, and be killed there if it is the one."""
    path = f"{os.environ[JOURNAL_VARIABLE]}.{current_task().id}.points"
    points = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(points, b".")
    # Concurrent steps may reach points at the same time.
    number = os.lseek(points, 0, os.SEEK_CUR) - 1
    os.close(points)
    die_once(str(number), str(wanted_number))


def dies_at_effects(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the engine so that the process is killed before or after one chosen effect."""

    def call(*args: Any) -> Any:
        if wanted_number is None:
            return method(*args)
        pass_point()
        done = method(*args)
        pass_point()
        return done

    async def call_async(*args: Any) -> Any:
        if wanted_number is None:
            return await method(*args)
        pass_point()
        done = await method(*args)
        pass_point()
        return done

    return call_async if inspect.iscoroutinefunction(method) else call


for engine in (Engine, AsyncEngine):
    engine._done = dies_at_effects(engine._done)  # type: ignore[method-assign]
    engine._execute = dies_around(engine._execute, "before the INSERT", "after the INSERT")  # type: ignore[method-assign]
for session in (TaskSession, AsyncTaskSession):
    session.commit = dies_around(session.commit, "before COMMIT", "after COMMIT")  # type: ignore[method-assign]


def effect(wanted: str) -> str:
    token = os.urandom(4).hex()
    die_once("before the effect", wanted)
    note("effect", token)
    die_once("after the effect", wanted)
    return token


def effect_in_database(tx: TaskTransaction, wanted: str) -> None:
    write(tx, 1, 0.0)
    die_once("in the transaction", wanted)


@app.durable("swept", retry_policy=AGAIN, signals={"go": str})
def swept(ctx: Durable, number: int) -> list[str]:
    """Run every kind of step; the run is killed once, before or after the effect with this number."""
    global wanted_number
    wanted_number = number
    try:
        token = ctx.step(effect, "")
        ctx.tx_step(write, 1, 0.0)
        ctx.on_cancel(undo, 1)
        ctx.now()
        ctx.patched("change")
        ctx.sleep(1.05)
        child = ctx.start(double, 21)
        ctx.wait_any(child)
        twice = ctx.result(child)
        answer = ctx.wait_signal("go", str, timeout=3600)
        both = ctx.gather(ctx.call(abs, -1), ctx.call(abs, 1))
        return [token, str(twice), answer, str(sum(both))]
    finally:
        wanted_number = None


def fail_once() -> str:
    marker = f"{os.environ[JOURNAL_VARIABLE]}.{current_task().id}.failed"
    if not os.path.exists(marker):
        os.close(os.open(marker, os.O_CREAT))
        raise OSError("down")
    return "tried again"


def code_of(wait: Callable[[], object]) -> str:
    try:
        wait()
    except StepFailed as failed:
        return failed.code
    return "none"


doubled = double.node()(number=21)
doubling = app.workflow("doubling", [doubled], output=doubled, definition_key="e2e.doubling")
SOON = RetryPolicy.fixed([0.01], auto_retry_for=[OSError], jitter=False)


@app.durable("swept_rest", retry_policy=AGAIN)
def swept_rest(ctx: Durable, number: int, found: list[str] | None = None) -> None:
    """Run the kinds of steps that ``swept`` leaves out. The run continues with an empty record, and ends
    when it is cancelled.
    """
    global wanted_number
    wanted_number = number  # Kept after the call, because the clean-up steps follow it.
    try:
        if found is None:
            found = [
                ctx.with_options(retry=SOON).step(fail_once),
                code_of(lambda: ctx.wait_signal("never", timeout=0.05)),
                code_of(lambda: ctx.wait_any("never", timeout=0.05)),
                str(ctx.result(ctx.start(doubling))),
            ]
            ctx.continue_as(number, found)
        ctx.on_cancel(undo, 1)
        ctx.tx_step(write, 1, 0.0)
        ctx.on_cancel(undo, 2)
        ctx.wait_signal("end")
    finally:
        pass_point()


@app.durable("boundary", retry_policy=AGAIN)
def boundary(ctx: Durable, wanted: str) -> str:
    """Run a durable function that is killed once, at the given point."""
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


async def effect_async(wanted: str) -> str:
    return effect(wanted)


async def effect_in_database_async(tx: AsyncTaskTransaction, wanted: str) -> None:
    await write_async(tx, 1, 0.0)
    die_once("in the transaction", wanted)


async def absolute(number: int) -> int:
    return abs(number)


@app.durable("async_swept", retry_policy=AGAIN, signals={"go": str})
async def async_swept(ctx: AsyncDurable, number: int) -> list[str]:
    """Run ``swept`` on an event loop."""
    global wanted_number
    wanted_number = number
    try:
        token = await ctx.step(effect_async, "")
        await ctx.tx_step(write_async, 1, 0.0)
        await ctx.on_cancel(undo, 1)
        await ctx.now()
        await ctx.patched("change")
        await ctx.sleep(1.05)
        child = await ctx.start(double, 21)
        await ctx.wait_any(child)
        twice = await ctx.result(child)
        answer = await ctx.wait_signal("go", str, timeout=3600)
        both = await ctx.gather(ctx.call(absolute, -1), ctx.call(absolute, 1))
        return [token, str(twice), answer, str(sum(both))]
    finally:
        wanted_number = None


@app.durable("async_boundary", retry_policy=AGAIN)
async def async_boundary(ctx: AsyncDurable, wanted: str) -> str:
    """Run ``boundary`` on an event loop."""
    global wanted_point
    wanted_point = wanted
    try:
        note("call", "-")
        token = await ctx.step(effect_async, wanted)
        await ctx.tx_step(effect_in_database_async, wanted)
        try:
            await ctx.sleep(1.05)
        finally:
            if ctx.is_parking:
                die_once("before the park", wanted)
        die_once("after the wake-up", wanted)
        child = await ctx.start(double, 21)
        die_once("after the start of a child", wanted)
        twice = await ctx.result(child)
        token += str(twice) + await ctx.wait_signal("go", str)
        die_once("before the outcome", wanted)
        return token
    finally:
        wanted_point = ""


@app.durable("visit", retry_policy=AGAIN)
def visit(ctx: Durable, number: int) -> list[str]:
    """Run a step of each kind, a wait and a child, as an item of a map or as a node."""
    tokens = [ctx.with_options(name="first").step(act, number, 0.005)]
    ctx.tx_step(write, 1, 0.005)
    ctx.sleep(1.05)
    tokens.append(str(ctx.result(ctx.start(double, number))))
    ctx.tx_step(write, 2, 0.005)
    tokens.append(ctx.with_options(name="last").step(act, number, 0.005))
    return tokens


@app.durable("begin", retry_policy=AGAIN)
def begin(ctx: Durable, count: int) -> list[int]:
    """The first node returns the numbers that the map iterates over."""
    ctx.step(act, 0, 0.005)
    ctx.tx_step(write, 1, 0.005)
    ctx.sleep(1.05)
    ctx.tx_step(write, 2, 0.005)
    return list(range(1, count + 1))


@app.durable("finish", retry_policy=AGAIN)
def finish(
    ctx: Durable, visited: TaskResult[list[TaskResult[list[str], TaskError]], TaskError]
) -> list[list[str]]:
    """The last node returns the values of the items and the value of its own step."""
    token = ctx.step(act, 0, 0.005)
    ctx.tx_step(write, 1, 0.005)
    ctx.sleep(1.05)
    ctx.tx_step(write, 2, 0.005)
    return [*[one.ok_value for one in visited.ok_value], [token]]


# The versions of `release` that a process has, such as "1 2"; without this variable it has none.
VERSIONS = "HORSIES_TEST_VERSIONS"


def release_of(version: int) -> Callable[[Durable], list[str]]:
    """Return the code of one release; its step names differ from the other releases."""

    def release(ctx: Durable) -> list[str]:
        tokens = [ctx.with_options(name=f"first of {version}").step(act, version, 0.0)]
        ctx.wait_signal("go", str)
        ctx.tx_step(write, version, 0.0)
        tokens.append(ctx.with_options(name=f"last of {version}").step(act, version, 0.0))
        return tokens

    return release


versions = os.environ.get(VERSIONS, "").split()
for one in map(int, versions):
    app.durable("release", version=one, retry_policy=AGAIN)(release_of(one))


@app.durable("unversioned", retry_policy=AGAIN)
def unversioned(ctx: Durable) -> str:
    """Run a step whose name is another one in a process with another first version."""
    token = ctx.with_options(name=f"begin {versions[0]}").step(act, 0, 0.0)
    ctx.wait_signal("go", str)
    return token


@app.durable("doze", retry_policy=AGAIN, timeout_ms=8_000)
def doze(ctx: Durable) -> None:
    """Wait for longer than the time limit, in all."""
    ctx.sleep(4.1)
    ctx.sleep(4.1)


@app.durable("nap", retry_policy=AGAIN)
def nap(ctx: Durable) -> str:
    """Run one step of each kind before a wait, and none after it."""
    token = ctx.step(effect, "")
    ctx.tx_step(write, 1, 0.0)
    ctx.sleep(1.05)
    return token


# The environment variable with the point at which the worker is killed.
WORKER_DIES = "HORSIES_TEST_WORKER_DIES"
parked_at: float | None = None


def dies_in_turns(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the transaction of a worker's turn so that the worker is killed before or after it."""

    def die(point: str) -> None:
        if point == os.environ[WORKER_DIES]:
            marker = f"{os.environ[JOURNAL_VARIABLE]}.{point.replace(' ', '-')}.died"
            os.close(os.open(marker, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)

    def call(pipeline: Any, steps: Any, *args: Any) -> Any:
        global parked_at
        names = {statement.name for statement, _ in steps.values()}
        is_woken = parked_at is not None and time.monotonic() > parked_at + 1.0
        if "park_tasks" in names:
            die("before the park")
        if "complete_tasks" in names:
            die("before the outcome")
        if "claim_tasks" in names and is_woken:
            die("before the claim of a woken run")
        done = run(pipeline, steps, *args)
        if "park_tasks" in names:
            parked_at = time.monotonic()
            die("after the park")
        if "complete_tasks" in names:
            die("after the outcome")
        if any(one.generation > 1 for one in done.claimed):
            die("after the claim of a woken run")
        return done

    return call


if WORKER_DIES in os.environ:
    turn._run = dies_in_turns(turn._run)
