"""Performs the operations that the scripts of a run yield: statements, pauses and step functions.
Statements are safely repeated after a lost connection: a step is recorded only once, and a repeated
statement finds the record. If the database is unreachable for ``PATIENCE_SECONDS``, the run is parked;
its worker stores that once it reaches the database again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import psycopg

from horsies.db.database import Database, Pool
from horsies.db.errors import CONFLICTS, describe, is_transient
from horsies.db.pipeline import execute
from horsies.db.statement import Statement, drive
from horsies.db.statements.durable import RecordStep, hold_run, record_step
from horsies.db.task_transaction import SessionConnection, TaskConnection, TaskSession
from horsies.durable.calls import Call, Called, Launch, NewChild, Unstorable
from horsies.durable.leaving import Leaving, Parked, RecordRefused
from horsies.durable.run import (
    Answer,
    Effects,
    Invoke,
    Pause,
    Run,
    Start,
    Transact,
    current_step,
)
from horsies.durable.steps import Failure
from horsies.encryption import Plain
from horsies.error_codes import OperationalErrorCode
from horsies.errors import DurableMisuse, TransactionMisuse
from horsies.parking import ParkRequest
from horsies.result import Err
from horsies.retry import Backoff
from horsies.task_result import TaskError
from horsies.tasks.send import PreparedSend, Sender, insert_script
from horsies.tasks.transaction import TaskTransaction

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
# How long a run waits after a step could not be recorded.
REST_SECONDS = 5.0
_THREADS_MAX = 16
FOUND = [True]


class Sessions(Protocol):
    """Lends the database connections of a child process."""

    @property
    def database(self) -> Database: ...

    def pool(self) -> Pool: ...


class NotRecorded(Exception):
    """Another attempt recorded the step first, or owns the run: the transaction is rolled back."""


class Engine:
    """Executes one call of a durable function in the function's thread."""

    def __init__(self, run: Run, sessions: Sessions) -> None:
        self.run = run
        self._sessions = sessions
        self._database = sessions.database
        self._is_direct = not self._database.config.pgbouncer_transaction_mode

    def perform(self, script: Effects[Answer]) -> Answer:
        """Perform the operations that the script yields, and return its return value."""
        answer: Any = None
        try:
            while True:
                answer = self._done(script.send(answer))
        except StopIteration as ended:
            returned: Answer = ended.value
            return returned
        except Leaving as how:
            self.run.left = how
            raise

    def _done(self, effect: Any) -> Any:
        if type(effect) is Invoke:
            return self._invoke(effect.name, effect.call)
        if type(effect) is Transact:
            return self._transact(effect.name, effect.call)
        if type(effect) is Start:
            return self._start(effect)
        if type(effect) is Pause:
            return time.sleep(effect.seconds)
        return patiently(lambda: self._execute(*effect))

    def _execute(self, statement: Statement[Any, Any], params: Any) -> list[Any]:
        pool = self._database.pool()
        lent = pool.take()
        try:
            if statement is record_step and self._is_direct:
                return FOUND * execute(lent.connection, statement, params)
            return statement.run(lent.connection, params)
        finally:
            pool.put(lent)

    def _invoke(self, name: str, call: Call) -> Called:
        token, started = current_step.set(name), time.perf_counter_ns()
        try:
            with self.run.surround(name):
                value, error = call.invoke(), None
        except DurableMisuse:
            raise
        except Exception as raised:
            value, error = None, raised
        finally:
            current_step.reset(token)
        return Called(value, error, (time.perf_counter_ns() - started) // 1_000)

    def _transact(self, name: str, call: Call) -> Called:
        """Call the function in a transaction. After a conflict or a lost session, the transaction is
        rolled back and the function is called again. If only the confirmation of the COMMIT was lost,
        the step's record is found.
        """
        started = time.perf_counter_ns()

        def once() -> Called:
            try:
                return self._transacted(name, call, started)
            except (DurableMisuse, TransactionMisuse):
                raise
            except Exception as error:
                if is_transient(error):
                    raise
                return Called(error=error)

        return patiently(once)

    def _transacted(self, name: str, call: Call, started: int) -> Called:
        pool = self._sessions.pool()
        lent = pool.take()
        fence = self.run.fence
        session = TaskSession(cast("SessionConnection", lent.connection), fence.mark)
        token = current_step.set(name)
        try:
            session.begin()
            given = TaskTransaction(fence.attempt, fence.generation, StepSession(session.lent))
            try:
                with self.run.surround(name):
                    value = call.invoke(given)
            except Exception as error:
                return fails_with(error, session.is_lost)
            text = call.described.encode(name, value)
            if isinstance(text, Failure):
                raise Unstorable(text)
            check_end(name, session.is_lost, session.end_loan())
            run_us = (time.perf_counter_ns() - started) // 1_000
            step = self.run.made(name, "tx", text, run_us=run_us)
            recorded = session.record([(hold_run, fence.held), (record_step, step)])
            check_end(name, False, recorded.problem)
            if not recorded.is_owned:
                return Called(recorded=False)
            session.commit()
            return Called(value, recorded=step)
        finally:
            current_step.reset(token)
            session.give_up()
            pool.put(lent)

    def gather(self, calls: Sequence[Call]) -> tuple[Any, ...]:
        """Run steps concurrently; raise the first failure after all steps have ended."""
        run = self.run
        names = [run.past.name(call.base) for call in calls]
        try:
            run.dealt(names)
        except Leaving as how:
            run.left = how
            raise
        context = copy_context()
        with ThreadPoolExecutor(min(_THREADS_MAX, len(calls) or 1)) as pool:
            futures = [
                pool.submit(context.copy().run, self._beside, call, name, names)
                for call, name in zip(calls, names, strict=True)
            ]
        left = first_leaving([future.exception() for future in futures])
        if left is not None:
            run.left = left
            raise left
        return tuple(future.result() for future in futures)

    def _beside(self, call: Call, name: str, names: Sequence[str]) -> Any:
        """Run one of several concurrent steps in its own thread."""
        if (known := self.run.past.visit(name, "step")) is not None:
            return call.read(known)
        return self.perform(self.run.new_step(call, name, "step", names))

    def _start(self, effect: Start) -> RecordStep | None:
        launch = effect.launch()

        def once() -> RecordStep:
            with self._database.connection() as connection, connection.transaction():
                child_id = drive(lambda one, params: one.run(connection, params), launch.script())
                step = self.run.made(effect.name, effect.kind, Plain(f'"{child_id}"'))
                if hold_run.run(connection, self.run.fence.held) and record_step.run(
                    connection, step
                ):
                    return step
                raise NotRecorded

        try:
            step = patiently(once)
        except NotRecorded:
            return None
        launch.end()
        return step


def fails_with(error: Exception, is_lost: bool) -> Called:
    """Return the failure of a tx_step that its own code caused. A conflict or a lost session is raised
    instead, so that the step is repeated without counting as a try.
    """
    is_conflict = getattr(error, "sqlstate", None) in CONFLICTS
    if is_conflict or is_lost or isinstance(error, DurableMisuse | TransactionMisuse):
        raise error
    return Called(error=error)


def first_leaving(errors: Sequence[BaseException | None]) -> Leaving | None:
    """Return how to leave the function if several steps request it. If all of them wait, return the
    earliest wait.
    """
    left = [one for one in errors if isinstance(one, Leaving)]
    waits = [one.request.seconds for one in left if isinstance(one, Parked)]
    seconds = [one for one in waits if one is not None]
    if left and len(seconds) == len(left):
        return Parked(ParkRequest(seconds=min(seconds)))
    return left[0] if left else None


def check_end(step: str, is_lost: bool, problem: str | None) -> None:
    """Raise if the transaction of a tx_step cannot commit, so that the step is repeated or fails."""
    if is_lost:
        raise psycopg.OperationalError("the session of the step was lost")
    if problem is not None:
        text = f"The transaction of step {step!r} cannot commit: {problem}."
        raise Unstorable(Failure(OperationalErrorCode.TRANSACTION_NOT_COMMITTED, text))


def child_of(
    task: Any, run_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NewChild[Any]:
    """Describe how to start a task or a workflow as the child of a run."""
    sender = getattr(task, "_sender", None)
    if isinstance(sender, Sender):
        definition = sender.definition
        launch = partial(_launched_task, sender, run_id, args, kwargs)
        return NewChild(definition.name, definition.results, launch)
    as_child = getattr(task, "as_child", None)
    if as_child is None or args or kwargs:
        what = type(task).__name__ if as_child is None else "a workflow with arguments"
        raise DurableMisuse(f"ctx.start takes a task or a workflow, not {what}.")
    flow: NewChild[Any] = as_child(run_id)
    return flow


def _launched_task(
    sender: Sender, run_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launch:
    """Return a task as the child of a run; raise DurableMisuse if it cannot be sent."""
    prepared = _prepared_child(sender, args, kwargs)
    row, sending = prepared.request.row._replace(wakes_task_id=run_id), prepared.sending
    return Launch(lambda: insert_script(row), (lambda: None) if sending is None else sending.end)


def _prepared_child(sender: Sender, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedSend:
    ready = sender.prepare(args, kwargs)
    if isinstance(ready, Err):
        raise DurableMisuse(ready.value.message)
    request = ready.value.request
    if ready.value.transaction is not None or request.debounce is not None:
        raise DurableMisuse("ctx.start takes a task without transaction= and without debounce=.")
    if request.row.idempotency_key is not None or request.row.unique_key is not None:
        raise DurableMisuse(
            "ctx.start takes a task without idempotency_key=: its step sends the task once, and the end of a "
            "task that was there before would not wake this run."
        )
    return ready.value


def patiently(action: Callable[[], T]) -> T:
    """Repeat an action while the database is unavailable; after a time, park the run or end its attempt."""
    gives_up_at = time.monotonic() + PATIENCE_SECONDS
    backoff: Backoff | None = None
    while True:
        try:
            return action()
        except psycopg.Error as error:
            backoff = backoff or Backoff(100, 2_000)
            seconds = pause_after(error, backoff, gives_up_at)
        time.sleep(seconds)


def pause_after(error: psycopg.Error, backoff: Backoff, gives_up_at: float) -> float:
    """Return the seconds until a failed statement is repeated; raise if it must not be repeated."""
    seconds = backoff.next_delay_seconds() or 0.0
    if not is_transient(error) or time.monotonic() + seconds > gives_up_at:
        raise left_after(error) from error
    return seconds


def left_after(error: psycopg.Error) -> Leaving:
    """Return how to leave a run whose step cannot be recorded: parked, or failed if the database refuses
    the step.
    """
    if is_transient(error):
        return Parked(ParkRequest(seconds=REST_SECONDS))
    message = f"The database refuses the record of a step: {describe(error)}"
    code = OperationalErrorCode.BROKER_ERROR
    return RecordRefused(TaskError(error_code=code, message=message))


class StepSession:
    """The methods that the ``tx`` of a tx_step provides."""

    def __init__(self, connection: TaskConnection) -> None:
        self._connection = connection

    def connection(self) -> TaskConnection:
        return self._connection

    def record_in(self, transaction: object, result: object) -> None:
        raise TransactionMisuse("record_in is not for a tx_step; write through tx.connection.")
