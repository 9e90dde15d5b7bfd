"""``Engine`` for ``async def``: the same scripts, on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import psycopg

from horsies.db.database import AsyncPool, Database
from horsies.db.errors import is_transient
from horsies.db.pipeline import execute_async
from horsies.db.statement import Statement, drive_async
from horsies.db.statements.durable import RecordStep, hold_run, record_step
from horsies.db.task_transaction import (
    AsyncSessionConnection,
    AsyncTaskConnection,
    AsyncTaskSession,
)
from horsies.durable.calls import Call, Called, Unstorable
from horsies.durable.engine import (
    FOUND,
    PATIENCE_SECONDS,
    NotRecorded,
    check_end,
    fails_with,
    first_leaving,
    pause_after,
)
from horsies.durable.leaving import Leaving
from horsies.durable.run import Answer, Effects, Invoke, Pause, Run, Start, Transact, current_step
from horsies.durable.steps import Failure
from horsies.encryption import Plain
from horsies.errors import DurableMisuse, TransactionMisuse
from horsies.retry import Backoff
from horsies.tasks.transaction import AsyncTaskTransaction

T = TypeVar("T")


class AsyncSessions(Protocol):
    """Lends the connections of a child to coroutines."""

    @property
    def database(self) -> Database: ...

    def pool_async(self) -> AsyncPool: ...


class AsyncEngine:
    """Executes one call of an ``async def`` durable function."""

    def __init__(self, run: Run, sessions: AsyncSessions) -> None:
        self.run = run
        self._sessions = sessions
        self._database = sessions.database
        self._is_direct = not self._database.config.pgbouncer_transaction_mode

    async def perform(self, script: Effects[Answer]) -> Answer:
        """Perform the operations that the script yields, and return its return value."""
        answer: Any = None
        try:
            while True:
                answer = await self._done(script.send(answer))
        except StopIteration as ended:
            returned: Answer = ended.value
            return returned
        except Leaving as how:
            self.run.left = how
            raise

    async def _done(self, effect: Any) -> Any:
        if type(effect) is Invoke:
            return await self._invoke(effect.name, effect.call)
        if type(effect) is Transact:
            return await self._transact(effect.name, effect.call)
        if type(effect) is Start:
            return await self._start(effect)
        if type(effect) is Pause:
            return await asyncio.sleep(effect.seconds)
        return await patiently_async(lambda: self._execute(*effect))

    async def _execute(self, statement: Statement[Any, Any], params: Any) -> list[Any]:
        pool = self._database.pool_async()
        lent = await pool.take()
        try:
            if statement is record_step and self._is_direct:
                return FOUND * await execute_async(lent.connection, statement, params)
            return await statement.run_async(lent.connection, params)
        finally:
            pool.put(lent)

    async def _invoke(self, name: str, call: Call) -> Called:
        token, started = current_step.set(name), time.perf_counter_ns()
        try:
            with self.run.surround(name):
                value, error = await call.invoke_async(), None
        except DurableMisuse:
            raise
        except Exception as raised:
            value, error = None, raised
        finally:
            current_step.reset(token)
        return Called(value, error, (time.perf_counter_ns() - started) // 1_000)

    async def _transact(self, name: str, call: Call) -> Called:
        """Run ``Engine._transact`` for a coroutine function."""
        started = time.perf_counter_ns()

        async def once() -> Called:
            try:
                return await self._transacted(name, call, started)
            except (DurableMisuse, TransactionMisuse):
                raise
            except Exception as error:
                if is_transient(error):
                    raise
                return Called(error=error)

        return await patiently_async(once)

    async def _transacted(self, name: str, call: Call, started: int) -> Called:
        pool = self._sessions.pool_async()
        lent = await pool.take()
        fence = self.run.fence
        session = AsyncTaskSession(cast("AsyncSessionConnection", lent.connection), fence.mark)
        token = current_step.set(name)
        try:
            await session.begin()
            given = AsyncTaskTransaction(
                fence.attempt, fence.generation, _StepSession(session.lent)
            )
            try:
                with self.run.surround(name):
                    value = await call.invoke_async(given)
            except Exception as error:
                return fails_with(error, session.is_lost)
            text = call.described.encode(name, value)
            if isinstance(text, Failure):
                raise Unstorable(text)
            check_end(name, session.is_lost, session.end_loan())
            run_us = (time.perf_counter_ns() - started) // 1_000
            step = self.run.made(name, "tx", text, run_us=run_us)
            recorded = await session.record([(hold_run, fence.held), (record_step, step)])
            check_end(name, False, recorded.problem)
            if not recorded.is_owned:
                return Called(recorded=False)
            await session.commit()
            await session.give_up()
            return Called(value, recorded=step)
        finally:
            current_step.reset(token)
            session.abandon()
            pool.put(lent)

    async def gather(self, calls: Sequence[Call]) -> tuple[Any, ...]:
        """Run steps concurrently; raise the first failure after all steps have ended."""
        run = self.run
        names = [run.past.name(call.base) for call in calls]
        try:
            run.dealt(names)
        except Leaving as how:
            run.left = how
            raise
        pairs = zip(calls, names, strict=True)
        found = await asyncio.gather(
            *[self._beside(call, name, names) for call, name in pairs], return_exceptions=True
        )
        errors = [one if isinstance(one, BaseException) else None for one in found]
        if (how_all := first_leaving(errors)) is not None:
            run.left = how_all
            raise how_all
        for error in errors:
            if error is not None:
                raise error
        return tuple(found)

    async def _beside(self, call: Call, name: str, names: Sequence[str]) -> Any:
        if (known := self.run.past.visit(name, "step")) is not None:
            return call.read(known)
        return await self.perform(self.run.new_step(call, name, "step", names))

    async def _start(self, effect: Start) -> RecordStep | None:
        launch = effect.launch()

        async def once() -> RecordStep:
            async with (
                self._database.connection_async() as connection,
                connection.transaction(),
            ):
                child_id = await drive_async(
                    lambda one, params: one.run_async(connection, params), launch.script()
                )
                step = self.run.made(effect.name, effect.kind, Plain(f'"{child_id}"'))
                held = await hold_run.run_async(connection, self.run.fence.held)
                if held and await record_step.run_async(connection, step):
                    return step
                raise NotRecorded

        try:
            step = await patiently_async(once)
        except NotRecorded:
            return None
        launch.end()
        return step


async def patiently_async(action: Callable[[], Awaitable[T]]) -> T:
    """Run ``patiently`` without blocking the event loop."""
    gives_up_at = time.monotonic() + PATIENCE_SECONDS
    backoff: Backoff | None = None
    while True:
        try:
            return await action()
        except psycopg.Error as error:
            backoff = backoff or Backoff(100, 2_000)
            seconds = pause_after(error, backoff, gives_up_at)
        await asyncio.sleep(seconds)


class _StepSession:
    """The methods that the ``tx`` of a tx_step provides."""

    def __init__(self, connection: AsyncTaskConnection) -> None:
        self._connection = connection

    async def connection(self) -> AsyncTaskConnection:
        return self._connection

    async def record_in(self, transaction: object, result: object) -> None:
        raise TransactionMisuse("record_in is not for a tx_step; write through tx.connection.")
