"""The cost of a step: one statement, which is its own transaction, and nothing in a replay."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest

from horsies import AsyncDurable, Durable, DurableMisuse, Horsies, StepFailed
from horsies.db.statements.durable import load_steps
from horsies.durable.async_engine import AsyncEngine
from horsies.durable.engine import Engine
from horsies.durable.past import STEPS_MAX, Past
from horsies.durable.run import Fence, Run
from horsies.worker.child import durable_run
from horsies.worker.child.transact import Transactions
from horsies.worker.protocol import Assignment
from tests.support.applications import run_closing
from tests.support.database import Database
from tests.support.rows import add_task
from tests.support.statements import traced

# How many steps ``take_steps`` records.
STEPS = 8
# The most memory that a small recorded step may take in a replay.
BYTES_PER_STEP = 1_000


def one() -> int:
    return 1


def fail() -> None:
    raise ValueError("no")


def run_of(task_id: str, past: Past) -> Run:
    return Run(Fence("w", task_id, 1, 1), past, lambda _: "UNHANDLED_EXCEPTION")


def running(connection: Database) -> str:
    return add_task(connection, status="RUNNING", claimed_by_worker_id="w", generation=1)


def take_steps(ctx: Durable) -> None:
    ctx.step(one)
    ctx.now()
    ctx.random()
    ctx.uuid()
    assert ctx.patched("change")
    ctx.sleep(0.001)
    ctx.on_cancel(one)
    with pytest.raises(StepFailed):
        ctx.step(fail)


async def take_steps_async(ctx: AsyncDurable) -> None:
    await ctx.step(one)
    await ctx.now()
    await ctx.random()
    await ctx.uuid()
    assert await ctx.patched("change")
    await ctx.sleep(0.001)
    await ctx.on_cancel(one)
    with pytest.raises(StepFailed):
        await ctx.step(fail)


def called(app: Horsies, task_id: str, past: Past) -> Counter[str]:
    """The messages on the connection of the steps."""
    ctx = Durable(Engine(run_of(task_id, past), Transactions(app, "w")))
    ctx.with_options(name="first").step(one)  # the session prepares the statement
    with app.get_broker().database.connection() as lent:
        connection = lent
    with traced(connection) as messages:
        take_steps(ctx)
    return messages


def called_async(app: Horsies, task_id: str, past: Past) -> Counter[str]:
    async def call() -> Counter[str]:
        ctx = AsyncDurable(AsyncEngine(run_of(task_id, past), Transactions(app, "w")))
        await ctx.with_options(name="first").step(one)
        async with app.get_broker().database.connection_async() as lent:
            connection = lent
        with traced(connection) as messages:
            await take_steps_async(ctx)
        return messages

    messages: Counter[str] = run_closing(app, call())
    return messages


@pytest.mark.parametrize("call", [called, called_async])
def test_a_step_is_one_statement_and_one_commit_and_its_replay_none(
    app: Horsies, connection: Database, call: Callable[..., Counter[str]]
) -> None:
    task_id = running(connection)
    messages = call(app, task_id, Past())
    assert (messages["Execute"], messages["Query"]) == (STEPS, 0)
    assert messages["ReadyForQuery"] == STEPS, "the end of a transaction each"
    rows = connection.execute(
        "SELECT count(*), count(DISTINCT xmin::text) FROM horsies_steps WHERE task_id = %s",
        (task_id,),
    ).fetchone()
    assert rows == (STEPS + 1,) * 2
    past = Past(load_steps.fetch(connection, task_id, 1))
    assert not call(app, task_id, past), "a recorded step reaches no server"


def record_many(connection: Database, count: int) -> str:
    """Add a running task with this many recorded steps."""
    task_id = running(connection)
    connection.execute(
        "INSERT INTO horsies_steps (task_id, name, position, kind, result, attempt, started_at, ended_at) "
        "SELECT %s, CASE number WHEN 1 THEN 'one' ELSE 'one#' || number END, number, 'step', number::text, "
        "1, now(), now() FROM generate_series(1, %s) AS number",
        (task_id, count),
    )
    return task_id


def replayed(app: Horsies, past: Past, task_id: str, count: int) -> tuple[float, Durable]:
    """The processor seconds for each step of a replay, and the context behind it."""
    ctx = Durable(Engine(run_of(task_id, past), Transactions(app, "w")))
    started = time.thread_time()
    total = sum(ctx.step(one) for _ in range(count))
    seconds = time.thread_time() - started
    assert total == count * (count + 1) // 2
    return seconds / count, ctx


def test_a_replay_of_the_longest_record_is_linear_in_time_and_memory(
    app: Horsies, connection: Database
) -> None:
    few, many = STEPS_MAX // 10, STEPS_MAX - 1
    short, long = (record_many(connection, count) for count in (few, many))
    with app.get_broker().database.connection() as own:
        pasts = [load_steps.fetch(own, short, 1) for _ in range(5)]
        tracemalloc.start()
        rows = load_steps.fetch(own, long, 1)
        _, ctx = replayed(app, Past(rows), long, many)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < many * BYTES_PER_STEP
    quickest = min(replayed(app, Past(steps), short, few)[0] for steps in pasts)
    assert min(replayed(app, Past(rows), long, many)[0] for _ in range(3)) < 5 * quickest
    ctx.step(one)
    with pytest.raises(DurableMisuse, match="10,000 recorded steps, the most that a run may have"):
        ctx.step(one)


def opened(app: Horsies, given: Assignment) -> tuple[Counter[str], Run]:
    """The messages of the start of a call, and the run with its past."""

    @app.durable("work")
    def work(ctx: Durable) -> None: ...

    with app.get_broker().database.connection() as lent:
        connection = lent
    with traced(connection) as messages:
        engine = durable_run.begun(Transactions(app, "w"), work.definition, given)
    return messages, engine.run


def opened_async(app: Horsies, given: Assignment) -> tuple[Counter[str], Run]:
    @app.durable("work")
    async def work(ctx: AsyncDurable) -> None: ...

    async def call() -> tuple[Counter[str], Run]:
        async with app.get_broker().database.connection_async() as lent:
            connection = lent
        with traced(connection) as messages:
            engine = await durable_run.begun_async(Transactions(app, "w"), work.definition, given)
        return messages, engine.run

    found: tuple[Counter[str], Run] = run_closing(app, call())
    return found


@pytest.mark.parametrize("begin", [opened, opened_async])
def test_the_first_claim_of_a_run_reads_nothing_and_a_later_one_reads_all_steps_at_once(
    app: Horsies, connection: Database, begin: Callable[..., tuple[Counter[str], Run]]
) -> None:
    task_id = running(connection)
    first = Assignment(task_id, 1, "work", 1, "[]", "{}", None)
    messages, run = begin(app, first)
    assert not messages
    assert run.past.unvisited == []
    connection.execute(
        "INSERT INTO horsies_steps (task_id, name, position, kind, attempt, started_at, ended_at) "
        "SELECT %s, 'one#' || number, number, 'step', 1, now(), now() FROM generate_series(1, 9) AS number",
        (task_id,),
    )
    messages, run = begin(app, first._replace(generation=2))
    assert messages["Execute"] + messages["Query"] == 1
    assert len(run.past.unvisited) == 9
