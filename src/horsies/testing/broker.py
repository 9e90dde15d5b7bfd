"""A broker without a database: it keeps checked send requests in memory. Every operation of an
application is a script of statements. This broker executes the statements that store tasks and runs, and
the statements that look for an identical earlier request; all other statements need a database.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from horsies.app import Horsies
from horsies.db.statement import Script, Statement, drive
from horsies.db.statements.tasks import (
    DebouncedTask,
    DebounceTask,
    IdempotentTask,
    InsertedTasks,
    InsertTask,
    InsertTasks,
    SentTask,
    TaskId,
    debounce_task,
    find_idempotent_task,
    find_sent_tasks,
    find_unique_task,
    insert_new_tasks,
    insert_task,
    insert_tasks,
)
from horsies.db.statements.workflows import StartedRun, start_runs
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, failure

T = TypeVar("T")


class NoDatabaseError(Exception):
    """The application used an operation that needs a database."""


class Receiver(Protocol):
    """Receives the stored requests of an application, one call per operation."""

    @property
    def name(self) -> str:
        """The name of the function that the test called."""

    def take(self, stored: Stored) -> None: ...

    async def take_async(self, stored: Stored) -> None: ...

    def end_of(self, task_id: str) -> Any:
        """Return the row for which a waiter waits; raise NoDatabaseError if no such row will ever exist."""


class Stored:
    """The tasks and runs that one operation stores; ``transaction`` is the caller's connection."""

    def __init__(self, broker: InMemoryBroker, transaction: object) -> None:
        self._broker = broker
        self.transaction = transaction
        self.tasks: list[InsertTask] = []
        self.runs: list[dict[str, Any]] = []

    def answer(self, statement: Statement[Any, Any], params: Any) -> list[Any]:
        """Return the rows that the database would return for these statements."""
        if statement is insert_task:
            return self._insert(params)
        if statement is debounce_task:
            self.tasks.append(_debounced(params))
            return [DebouncedTask(params.id)]
        if statement is insert_new_tasks or statement is insert_tasks:
            rows = _rows(params)
            self.tasks += rows
            return [InsertedTasks(len(rows))] if statement is insert_tasks else []
        if statement is start_runs:
            (runs,) = params
            return self._start(runs)
        return self._broker.look_up(statement, params)

    def _insert(self, row: InsertTask) -> list[TaskId]:
        if self._broker.holder(row.task_name, key_of(row)) is not None:
            return []
        self.tasks.append(row)
        return [TaskId(row.id)]

    def _start(self, runs: str) -> list[StartedRun]:
        self._broker.refuse_runs()
        plans = json.loads(runs)
        self.runs += plans
        return [StartedRun(run["id"], True, run["name"], run["fingerprint"]) for run in plans]


class InMemoryBroker:
    """Stands in for a ``PostgresBroker``; the receiver decides what happens to stored requests.

    Options about connections and transactions have no effect here.
    """

    # Every send runs its script.
    is_direct = False
    # The application's broker before this one; see in_place_of_broker.
    replaced: Any = None

    def __init__(self, receiver: Receiver, *, takes_runs: bool) -> None:
        self._receiver = receiver
        self._takes_runs = takes_runs
        self._tasks: dict[str, InsertTask] = {}
        self._holders: dict[tuple[str, str], InsertTask] = {}
        self.waiters = _Waiters(receiver)

    def perform(
        self,
        code: BrokerErrorCode,
        script: Script[T],
        transaction: object = None,
        **_options: bool,
    ) -> BrokerResult[T]:
        done, stored = self._run(code, script, transaction)
        self._receiver.take(stored)
        return done

    async def perform_async(
        self,
        code: BrokerErrorCode,
        script: Script[T],
        transaction: object = None,
        **_options: bool,
    ) -> BrokerResult[T]:
        done, stored = self._run(code, script, transaction)
        await self._receiver.take_async(stored)
        return done

    def store(
        self, make_script: Callable[[], Script[T]], transaction: object = None, **_options: bool
    ) -> BrokerResult[T]:
        return self.perform(BrokerErrorCode.ENQUEUE_FAILED, make_script(), transaction)

    async def store_async(
        self, make_script: Callable[[], Script[T]], transaction: object = None, **_options: bool
    ) -> BrokerResult[T]:
        return await self.perform_async(BrokerErrorCode.ENQUEUE_FAILED, make_script(), transaction)

    def close(self) -> BrokerResult[None]:
        return Ok(None)

    async def close_async(self) -> BrokerResult[None]:
        return Ok(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoDatabaseError(_needs_database(self._receiver.name, f"broker.{name}"))

    def _run(
        self, code: BrokerErrorCode, script: Script[T], transaction: object
    ) -> tuple[BrokerResult[T], Stored]:
        """Run a script; a failed script stores nothing, like a rolled-back transaction."""
        stored = Stored(self, transaction)
        try:
            answer = drive(stored.answer, script)
        except Exception as error:
            return Err(failure(code, error)), Stored(self, transaction)
        for row in stored.tasks:
            self._tasks[row.id] = row
            if (key := key_of(row)) is not None:
                self._holders[row.task_name, key] = row
        return Ok(answer), stored

    def holder(self, task_name: str, key: str | None) -> InsertTask | None:
        """Return the task that holds an idempotency key."""
        return None if key is None else self._holders.get((task_name, key))

    def release_key(self, row: InsertTask) -> None:
        """Free the key of a task that has ended, unless it is unique forever."""
        if row.unique_key is not None:
            self._holders.pop((row.task_name, row.unique_key), None)

    def refuse_runs(self) -> None:
        """Refuse to start a workflow if the receiver cannot advance it."""
        if not self._takes_runs:
            raise NoDatabaseError(
                f"{self._receiver.name} runs single tasks; workflows advance in the database: use "
                "run_pending, or capture_sends to record the start."
            )

    def look_up(self, statement: Statement[Any, Any], params: Any) -> list[Any]:
        if statement is find_sent_tasks:
            (ids,) = params
            found = (self._tasks.get(task_id) for task_id in ids)
            return [SentTask(row.id, row.enqueue_sha) for row in found if row is not None]
        if statement is find_idempotent_task or statement is find_unique_task:
            task_name, key = params
            row = self.holder(task_name, key)
            return [] if row is None else [IdempotentTask(row.id, row.idempotency_sha)]
        raise NoDatabaseError(_needs_database(self._receiver.name, statement.name))


class _Waiters:
    """Returns results to waiting callers without delay."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def watch(self, task_id: str, *, once: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._receiver.end_of(task_id))
        except NoDatabaseError as error:
            future.set_exception(error)
        return future

    def watch_run(self, workflow_id: str, until: object, *, once: bool = False) -> Future[Any]:
        return self.watch(workflow_id)

    def forget(self, task_id: str, future: Future[Any]) -> None:
        return None


@contextmanager
def in_place_of_broker(app: Horsies, broker: InMemoryBroker) -> Iterator[None]:
    """Give the application this broker for the duration of the block; its own broker stays unchanged.
    Blocks for the same application may overlap and end in any order, because fixtures do.
    """
    stand_in: Any = broker
    broker.replaced, app._broker = app._broker, stand_in
    try:
        yield
    finally:
        if app._broker is stand_in:
            app._broker = broker.replaced
        else:
            _replace_beneath(app._broker, broker)


def _replace_beneath(newest: object, broker: InMemoryBroker) -> None:
    """An inner block that ends later must restore the broker from before this block."""
    while isinstance(newest, InMemoryBroker):
        if newest.replaced is broker:
            newest.replaced = broker.replaced
        newest = newest.replaced


def key_of(row: InsertTask) -> str | None:
    """Return the idempotency key of a request, ignoring how long the key stays unique."""
    return row.idempotency_key or row.unique_key


def _debounced(params: DebounceTask) -> InsertTask:
    """Return the row of a debounced send; without a clock, no send replaces another send."""
    values = params._asdict() | {
        "enqueue_at": None,
        "idempotency_key": None,
        "unique_while": "waiting",
    }
    return InsertTask(**{name: values[name] for name in InsertTask._fields if name in values})


def _rows(params: InsertTasks) -> list[InsertTask]:
    """Return the rows of a ``send_many`` chunk."""
    columns = (params.ids, params.args, params.kwargs, params.enqueue_shas)
    return [
        InsertTask(
            id=task_id,
            task_name=params.task_name,
            queue_name=params.queue_name,
            priority=params.priority,
            args=args,
            kwargs=kwargs,
            sent_at=params.sent_at,
            enqueue_at=params.enqueue_at,
            delay_seconds=params.delay_seconds,
            good_until=params.good_until,
            max_retries=params.max_retries,
            task_options=params.task_options,
            timeout_ms=params.timeout_ms,
            retention_seconds=params.retention_seconds,
            enqueue_sha=sha,
            idempotency_key=None,
            idempotency_sha=None,
            unique_key=None,
            unique_while=None,
        )
        for task_id, args, kwargs, sha in zip(*(one.split("\n") for one in columns), strict=True)
    ]


def _needs_database(name: str, what: str) -> str:
    return f"{name} has no database to answer {what!r}; use the fixture horsies_database and run_pending."
