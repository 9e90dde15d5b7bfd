"""Tasks that record their outcome in their own transaction and pause at a chosen point."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import Any

import asyncpg
import psycopg
import psycopg2  # type: ignore[import-untyped]
from psycopg.conninfo import make_conninfo
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from horsies import (
    INJECTED,
    AsyncTaskTransaction,
    RetryPolicy,
    TaskTransaction,
    current_task,
)
from horsies.errors import TaskStopped, TransactionMisuse
from tests.support.apps.booking import (
    AGAIN,
    ALCHEMY_URL,
    OWN_SESSIONS,
    app,
    engine,
    is_released,
    rest,
    rest_async,
)
from tests.support.apps.programs import write_down
from tests.support.workers import DATABASE_VARIABLE

__all__ = ["app"]

INSERT = "INSERT INTO bookings VALUES (:number, :attempt, :id)"
# A waiting transaction must not be idle for two seconds after it has recorded its outcome.
BRIEFLY = text("SELECT pg_sleep(0.01)")

SERIALIZABLE = {"isolation_level": "SERIALIZABLE"}
AGAIN_AFTER_FAULTS = RetryPolicy.fixed(
    [0.02] * 5, auto_retry_for=["TRANSACTION_CONFLICT", "TRANSACTION_LOST"], jitter=False
)
engines = {
    "psycopg": engine,
    "psycopg2": create_engine(
        "postgresql+psycopg2://",
        creator=partial(psycopg2.connect, os.environ[DATABASE_VARIABLE], **OWN_SESSIONS),
        poolclass=NullPool,
    ),
}


def row_of(tx: TaskTransaction | AsyncTaskTransaction, number: int) -> dict[str, Any]:
    return {"number": number, "attempt": tx.attempt, "id": current_task().id}


def async_engine(driver: str) -> AsyncEngine:
    if driver == "psycopg":
        return create_async_engine(ALCHEMY_URL, poolclass=NullPool, connect_args=OWN_SESSIONS)
    url = os.environ[DATABASE_VARIABLE]
    creator = partial(asyncpg.connect, url, server_settings=OWN_SESSIONS)
    return create_async_engine("postgresql+asyncpg://", async_creator=creator, poolclass=NullPool)


@asynccontextmanager
async def async_session(driver: str = "psycopg") -> AsyncIterator[AsyncSession]:
    made = async_engine(driver)
    try:
        async with AsyncSession(made) as session:
            yield session
    finally:
        await made.dispose()


@contextmanager
def noting_stop() -> Iterator[None]:
    """Record when the worker's stop reaches this process: as a frame in an async child, otherwise as a
    signal.
    """
    running = current_task()._page
    if hasattr(running, "is_stopped"):
        with _watching(running):
            yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        write_down("asked to stop")
        before(number, frame)

    signal.signal(signal.SIGTERM, note)  # The child restores its own handler.
    yield


@contextmanager
def _watching(running: Any) -> Iterator[None]:
    is_over = threading.Event()

    def watch() -> None:
        while not (running.is_stopped or is_over.wait(0.005)):
            pass
        if running.is_stopped:
            write_down("asked to stop")

    thread = threading.Thread(target=copy_context().run, args=(watch,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def rest_in(session: Session, label: str) -> None:
    """Wait inside the transaction."""
    write_down(label)
    while not is_released(label):
        session.execute(BRIEFLY)


async def rest_in_async(session: AsyncSession, label: str) -> None:
    write_down(label)
    while not is_released(label):
        await session.execute(BRIEFLY)


def record(number: int, point: str, tx: TaskTransaction) -> int:
    """Write, record and commit, with a wait before, between or after them."""
    with noting_stop(), Session(engine) as session:
        session.execute(text(INSERT), row_of(tx, number))
        if point == "written":
            rest_in(session, point)
        tx.record_in(session, number)
        if point == "recorded":
            rest_in(session, point)
        session.commit()
        if point == "committed":
            rest(point)
    return number


async def record_async(number: int, point: str, tx: AsyncTaskTransaction) -> int:
    with noting_stop():
        async with async_session() as session:
            await session.execute(text(INSERT), row_of(tx, number))
            if point == "written":
                await rest_in_async(session, point)
            await tx.record_in(session, number)
            if point == "recorded":
                await rest_in_async(session, point)
            await session.commit()
            if point == "committed":
                await rest_async(point)
    return number


@app.task("record_or_return", on_stop="requeue", retry_policy=AGAIN)
def record_or_return(number: int, point: str, tx: TaskTransaction = INJECTED) -> int:
    return record(number, point, tx)


@app.task("record_or_return_async", on_stop="requeue", retry_policy=AGAIN)
async def record_or_return_async(
    number: int, point: str, tx: AsyncTaskTransaction = INJECTED
) -> int:
    return await record_async(number, point, tx)


@app.task("record_in_a_task", on_stop="requeue")
async def record_in_a_task(number: int, point: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    """Record in another asyncio task."""
    return await asyncio.create_task(record_async(number, point, tx))


@app.task("record_in_time", timeout_ms=5_000)
def record_in_time(number: int, tx: TaskTransaction = INJECTED) -> int:
    return record(number, "recorded", tx)


@app.task("record_in_time_async", timeout_ms=5_000)
async def record_in_time_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> int:
    return await record_async(number, "recorded", tx)


@app.task("record_when_stopped", on_stop="requeue")
def record_when_stopped(number: int, tx: TaskTransaction = INJECTED) -> int:
    """Write, record and commit only when the worker stops the task."""
    try:
        rest("until stopped")
    finally:
        with Session(engine) as session, session.begin():
            session.execute(text(INSERT), row_of(tx, number))
            tx.record_in(session, number)
    return number


@app.task("record_when_stopped_async", on_stop="requeue")
async def record_when_stopped_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> int:
    try:
        await rest_async("until stopped")
    finally:
        async with async_session() as session, session.begin():
            await session.execute(text(INSERT), row_of(tx, number))
            await tx.record_in(session, number)
    return number


@app.task("stop_after_commit")
def stop_after_commit(number: int, tx: TaskTransaction = INJECTED) -> int:
    """Raise the worker's stop exception after the commit."""
    record(number, "", tx)
    raise TaskStopped


def unusable_connection(how: str) -> psycopg.Connection[Any]:
    url = os.environ[DATABASE_VARIABLE]
    if how == "elsewhere":
        return psycopg.connect(make_conninfo(url, dbname="postgres"))
    return psycopg.connect(url, autocommit=True)


@app.task("rest_after_refusal")
def rest_after_refusal(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Catch the refusal of record_in, and wait until the worker stops the task."""
    with unusable_connection(how) as connection, suppress(TransactionMisuse):
        tx.record_in(connection, number)
    try:
        rest("refused")
    finally:
        write_down("stopped")
    return number


@app.task("rest_after_refusal_async")
async def rest_after_refusal_async(
    number: int, how: str, tx: AsyncTaskTransaction = INJECTED
) -> int:
    parameters = {"dbname": "postgres"} if how == "elsewhere" else {}
    url = make_conninfo(os.environ[DATABASE_VARIABLE], **parameters)
    async with await psycopg.AsyncConnection.connect(
        url, autocommit=how == "autocommit"
    ) as connection:
        with suppress(TransactionMisuse):
            await tx.record_in(connection, number)
    try:
        await rest_async("refused")
    finally:
        write_down("stopped")
    return number


@app.task("idle_after_record", retry_policy=AGAIN)
def idle_after_record(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Leave the transaction idle between record_in and the commit, in the first attempt."""
    with Session(engine) as session:
        session.execute(text(INSERT), row_of(tx, number))
        tx.record_in(session, number)
        if tx.attempt == 1:
            rest("idle")
        try:
            session.commit()
        except SQLAlchemyError:
            if how == "raise":
                raise
    return number


@app.task("idle_after_record_async", retry_policy=AGAIN)
async def idle_after_record_async(
    number: int, how: str, tx: AsyncTaskTransaction = INJECTED
) -> int:
    async with async_session() as session:
        await session.execute(text(INSERT), row_of(tx, number))
        await tx.record_in(session, number)
        if tx.attempt == 1:
            await rest_async("idle")
        try:
            await session.commit()
        except SQLAlchemyError:
            if how == "raise":
                raise
    return number


@app.task("withdraw_by_driver", retry_policy=AGAIN_AFTER_FAULTS)
def withdraw_by_driver(
    number: int, driver: str, point: str, label: str, tx: TaskTransaction = INJECTED
) -> int:
    """Read the table and write a row in a serializable transaction; the first attempt waits at the point."""
    with Session(engines[driver]) as session:
        session.connection(execution_options=SERIALIZABLE)
        found: int = session.execute(text("SELECT count(*) FROM bookings")).scalar_one()
        if point == "read" and tx.attempt == 1:
            rest(label)
        session.execute(text(INSERT), row_of(tx, number))
        if point == "written" and tx.attempt == 1:
            rest(label)
        tx.record_in(session, found)
        if point == "recorded" and tx.attempt == 1:
            rest(label)
        session.commit()
    return found


@app.task("withdraw_by_driver_async", retry_policy=AGAIN_AFTER_FAULTS)
async def withdraw_by_driver_async(
    number: int, driver: str, point: str, label: str, tx: AsyncTaskTransaction = INJECTED
) -> int:
    async with async_session(driver) as session:
        await session.connection(execution_options=SERIALIZABLE)
        found: int = (await session.execute(text("SELECT count(*) FROM bookings"))).scalar_one()
        if point == "read" and tx.attempt == 1:
            await rest_async(label)
        await session.execute(text(INSERT), row_of(tx, number))
        if point == "written" and tx.attempt == 1:
            await rest_async(label)
        await tx.record_in(session, found)
        if point == "recorded" and tx.attempt == 1:
            await rest_async(label)
        await session.commit()
    return found
