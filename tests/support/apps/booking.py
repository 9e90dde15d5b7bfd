"""Tasks whose outcome commits together with their effects: rows of the table `bookings`, and sent tasks."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from horsies import (
    INJECTED,
    AsyncTaskTransaction,
    Horsies,
    RetryPolicy,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskTransaction,
    current_task,
)
from tests.support.apps.programs import read_config, write_down
from tests.support.transactions import OWN_ROLE
from tests.support.workers import DATABASE_VARIABLE, JOURNAL_VARIABLE

app = Horsies(read_config())
AGAIN = RetryPolicy.fixed(
    [0.02] * 100, auto_retry_for=["WORKER_CRASHED", "TRANSACTION_LOST", "AGAIN"], jitter=False
)
AGAIN_AFTER_CONFLICTS = RetryPolicy.fixed(
    [0.02] * 5, auto_retry_for=["TRANSACTION_CONFLICT"], jitter=False
)
left_open: list[Any] = []


def insert(tx: TaskTransaction, number: int) -> None:
    tx.connection.execute(
        "INSERT INTO bookings VALUES (%s, %s, %s)", (number, tx.attempt, current_task().id)
    )


def is_released(label: str) -> bool:
    return os.path.exists(f"{os.environ[JOURNAL_VARIABLE]}.{label}")


def rest(label: str) -> None:
    """Record that the task has reached this point, and wait until the test releases the label."""
    write_down(label)
    while not is_released(label):
        time.sleep(0.005)


async def rest_async(label: str) -> None:
    write_down(label)
    while not is_released(label):  # noqa: ASYNC110 - the test creates a file
        await asyncio.sleep(0.005)


def note() -> None:
    """Add a line (task, attempt) to the journal in one write, so that a kill cannot truncate the line."""
    task = current_task()
    journal = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{task.id} {task.attempt}\n".encode())
    os.close(journal)


@app.task("receipt")
def receipt(number: int, pause: float) -> int:
    return number


@app.task("book", retry_policy=AGAIN)
def book(number: int, pause: float, tx: TaskTransaction = INJECTED) -> int:
    """Write a row and send the receipt, with pauses before, between and after them."""
    note()
    time.sleep(pause)
    insert(tx, number)
    time.sleep(pause)
    receipt.with_options(transaction=tx).enqueue(number, pause)
    time.sleep(pause)
    return number


@app.task("book_and_rest", retry_policy=AGAIN)
def book_and_rest(number: int, label: str, tx: TaskTransaction = INJECTED) -> int:
    insert(tx, number)
    rest(label)
    return number


@app.task("book_in_turn", retry_policy=AGAIN)
def book_in_turn(number: int, label: str, tx: TaskTransaction = INJECTED) -> int:
    """Book after the test has released this attempt's label."""
    insert(tx, number)
    rest(f"{label} {tx.attempt}")
    return number


@app.task("book_link", retry_policy=AGAIN)
def book_link(before: int, label: str, tx: TaskTransaction = INJECTED) -> int:
    """Book and send a receipt as one node of a chain whose workers are killed; the last node stays inside
    its transaction until the test releases its label.
    """
    note()
    insert(tx, before + 1)
    receipt.with_options(transaction=tx).enqueue(before + 1, 0.0)
    while label and not is_released(label):
        tx.connection.execute("SELECT pg_sleep(0.01)")  # this fails if the session was ended
    return before + 1


@app.task("book_slowly")
def book_slowly(number: int, seconds: float, tx: TaskTransaction = INJECTED) -> int:
    """Keep the transaction open, both inside a statement and between two statements."""
    insert(tx, number)
    write_down("slow")
    tx.connection.execute("SELECT pg_sleep(%s)", (seconds / 2,))
    time.sleep(seconds / 2)
    return number


@app.task("rest_node")
def rest_node(label: str) -> str:
    rest(label)
    return label


@app.task("record_slowly")
def record_slowly(number: int, seconds: float, tx: TaskTransaction = INJECTED) -> int:
    """Keep the transaction open inside a statement, after the outcome is recorded."""
    with Session(engine) as session, session.begin():
        row = {"number": number, "attempt": tx.attempt, "id": current_task().id}
        session.execute(text("INSERT INTO bookings VALUES (:number, :attempt, :id)"), row)
        tx.record_in(session, number)
        write_down("slow")
        session.execute(text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})
    return number


@app.task("book_and_sleep", timeout_ms=300)
def book_and_sleep(number: int, tx: TaskTransaction = INJECTED) -> int:
    """Exceed the time limit inside a statement."""
    insert(tx, number)
    tx.connection.execute("SELECT pg_sleep(30)")
    return number


@app.task("unused")
def unused(number: int, tx: TaskTransaction = INJECTED) -> int:
    return number + tx.fencing_token - tx.attempt


def try_again(attempt: int, tries: int, token: int) -> None:
    """Record the attempt's fencing token; fail before the last attempt."""
    write_down("token", str(token))
    if attempt < tries:
        raise TaskFailed("AGAIN", "not the last attempt")


@app.task("tell_token", retry_policy=AGAIN)
def tell_token(tries: int, tx: TaskTransaction = INJECTED) -> None:
    try_again(tx.attempt, tries, tx.fencing_token)


@app.task("tell_token_async", retry_policy=AGAIN)
async def tell_token_async(tries: int, tx: AsyncTaskTransaction = INJECTED) -> None:
    try_again(tx.attempt, tries, tx.fencing_token)


@app.task("optional")
def optional(number: int, tx: TaskTransaction | None = None) -> int:
    assert tx is not None
    insert(tx, number)
    return number


@app.task("fail_after_booking")
def fail_after_booking(number: int, how: str, tx: TaskTransaction) -> TaskResult[int, TaskError]:
    insert(tx, number)
    if how == "raise":
        raise ValueError("no")
    if how == "refuse":
        raise TaskFailed("REFUSED", "not this one")
    return TaskResult(err=TaskError(error_code="RETURNED", message="no"))


@app.task("misuse")
def misuse(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Use the connection in ways that would separate the effects from the outcome."""
    connection = tx.connection
    insert(tx, number)
    match how:
        case "commit" | "rollback" | "close":
            getattr(connection, how)()
        case "autocommit":
            connection.autocommit = False
        case "two-phase":
            connection.tpc_begin(connection.xid(1, "a", "b"))
        case "with":
            with connection:
                pass
        case "pipeline":
            left_open.append(connection.pipeline())
            left_open[-1].__enter__()
        case "swallow":
            try:
                connection.execute("SELECT 1 / 0")
            except psycopg.Error:
                return number
        case statement:
            connection.execute(statement.encode())
    return number


@app.task("conflict")
def conflict(number: int, state: str, tx: TaskTransaction = INJECTED) -> int:
    insert(tx, number)
    tx.connection.execute(
        f"DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '{state}'; END $$".encode()
    )
    return number


@app.task("undo_a_part")
def undo_a_part(number: int, tx: TaskTransaction = INJECTED) -> int:
    insert(tx, number)
    try:
        with tx.connection.transaction():
            insert(tx, -1)
    except psycopg.errors.CheckViolation:
        pass
    return number


@app.task("serializable")
def serializable(number: int, tx: TaskTransaction = INJECTED) -> str:
    tx.connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    insert(tx, number)
    row = tx.connection.execute("SHOW transaction_isolation").fetchone()
    assert row is not None
    return str(row[0])


@app.task("leave_traces")
def leave_traces(tx: TaskTransaction = INJECTED) -> str:
    """Change the session; return the changes that the previous task left behind."""
    row = tx.connection.execute("SELECT current_setting('work_mem')").fetchone()
    assert row is not None
    tx.connection.execute("SET work_mem = '5MB'")
    tx.connection.execute("CREATE TEMP TABLE scratch (n int)")
    return f"{row[0]} {tx.connection.info.backend_pid}"


ALCHEMY_URL = os.environ[DATABASE_VARIABLE].replace("postgresql://", "postgresql+psycopg://")
OWN_SESSIONS = {"application_name": OWN_ROLE}
# SQLAlchemy cannot read a URL with several hosts.
engine = create_engine(
    "postgresql+psycopg://",
    creator=lambda: psycopg.connect(os.environ[DATABASE_VARIABLE], application_name=OWN_ROLE),
)


@app.task("book_in_session", retry_policy=AGAIN)
def book_in_session(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Write with a SQLAlchemy session, record the outcome in its transaction, and end it in the given
    way.
    """
    with Session(engine) as session:
        row = {"number": number, "attempt": tx.attempt, "id": current_task().id}
        session.execute(text("INSERT INTO bookings VALUES (:number, :attempt, :id)"), row)
        if how == "twice":
            tx.connection.execute("SELECT 1")
        elif how == "commit before":
            session.commit()
        elif how == "in turn":
            rest(f"{how} {tx.attempt}")
        result = tx.record_in(session, "a text" if how == "wrong type" else number)
        if how == "roll back":
            session.rollback()
        elif how == "raise":
            raise ValueError("before the commit")
        elif how != "forget":
            session.commit()
        if how == "raise after":
            raise ValueError("after the commit")
    return result  # type: ignore[return-value]


@app.task("book_with_psycopg")
def book_with_psycopg(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    with psycopg.connect(
        os.environ[DATABASE_VARIABLE], autocommit=how == "autocommit"
    ) as connection:
        if how == "elsewhere":
            url = make_conninfo(os.environ[DATABASE_VARIABLE], dbname="postgres")
            with psycopg.connect(url) as other:
                return tx.record_in(other, number)
        if how == "two-phase":
            connection.tpc_begin(connection.xid(1, "a", "b"))
        row = (number, tx.attempt, current_task().id)
        connection.execute("INSERT INTO bookings VALUES (%s, %s, %s)", row)
        if how == "pipeline":
            with connection.pipeline():
                return tx.record_in(connection, number)
        if "commit before" in how:
            connection.commit()
        result = tx.record_in(connection, number)
        if "roll back" in how:
            connection.rollback()
        return result


@app.task("book_next")
def book_next(before: int, tx: TaskTransaction = INJECTED) -> int:
    insert(tx, before + 1)
    return before + 1


def receipt_run(number: int) -> Any:
    """A run of one node; builders with a precise return type are checked when the worker starts."""
    node = receipt.node()(number=number, pause=0.0)
    return app.workflow("receipt", [node], definition_key="booking.receipt")


@app.task("book_and_start")
def book_and_start(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    insert(tx, number)
    receipt_run(number).start(transaction=tx).unwrap()
    if how == "raise":
        raise ValueError("no")
    return number


@app.task("list_numbers")
def list_numbers(count: int, tx: TaskTransaction = INJECTED) -> list[int]:
    insert(tx, 1000)
    return list(range(count))


async def insert_async(tx: AsyncTaskTransaction, number: int) -> None:
    connection = await tx.connection()
    await connection.execute(
        "INSERT INTO bookings VALUES (%s, %s, %s)", (number, tx.attempt, current_task().id)
    )


@app.task("book_next_async")
async def book_next_async(before: int, tx: AsyncTaskTransaction = INJECTED) -> int:
    await insert_async(tx, before + 1)
    return before + 1


@app.task("book_async", retry_policy=AGAIN)
async def book_async(number: int, pause: float, tx: AsyncTaskTransaction = INJECTED) -> int:
    note()
    await insert_async(tx, number)
    await asyncio.sleep(pause)
    await receipt.with_options(transaction=tx).enqueue_async(number, pause)
    await asyncio.sleep(pause)
    return number


@app.task("book_and_start_async")
async def book_and_start_async(number: int, how: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    await insert_async(tx, number)
    (await receipt_run(number).start_async(transaction=tx)).unwrap()
    if how == "raise":
        raise ValueError("no")
    return number


@app.task("book_in_turn_async", retry_policy=AGAIN)
async def book_in_turn_async(number: int, label: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    await insert_async(tx, number)
    await rest_async(f"{label} {tx.attempt}")
    return number


@app.task("misuse_async")
async def misuse_async(number: int, how: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    await insert_async(tx, number)
    connection = await tx.connection()
    match how:
        case "commit":
            await connection.commit()
        case "raise":
            raise ValueError("no")
        case "sleep":
            write_down("sleeping")
            await connection.execute("SELECT pg_sleep(30)")
        case statement:
            await connection.execute(statement.encode())
    return number


@app.task("unused_async")
async def unused_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> int:
    return number + tx.fencing_token - tx.attempt


@app.task("book_in_async_session", retry_policy=AGAIN)
async def book_in_async_session(number: int, how: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    engine = create_async_engine(ALCHEMY_URL, poolclass=NullPool, connect_args=OWN_SESSIONS)
    async with AsyncSession(engine) as session:
        row = {"number": number, "attempt": tx.attempt, "id": current_task().id}
        await session.execute(text("INSERT INTO bookings VALUES (:number, :attempt, :id)"), row)
        if how == "commit before":
            await session.commit()
        elif how == "in turn":
            await rest_async(f"{how} {tx.attempt}")
        result = await tx.record_in(session, number)
        if how == "roll back":
            await session.rollback()
        elif how == "raise":
            raise ValueError("before the commit")
        elif how != "forget":
            await session.commit()
        if how == "raise after":
            raise ValueError("after the commit")
    await engine.dispose()
    return result


@app.task("book_in_time", timeout_ms=5_000)
def book_in_time(number: int, tx: TaskTransaction = INJECTED) -> int:
    insert(tx, number)
    return number


@app.task("book_or_return", on_stop="requeue", retry_policy=AGAIN)
def book_or_return(number: int, label: str, tx: TaskTransaction = INJECTED) -> int:
    """Return the task to its queue if the worker stops; the next attempt runs elsewhere."""
    write_down("token", str(tx.fencing_token))
    if label:
        rest(label)
    insert(tx, number)
    receipt.with_options(transaction=tx).enqueue(number, 0.0)
    return number


@app.task("book_or_return_async", on_stop="requeue", retry_policy=AGAIN)
async def book_or_return_async(number: int, label: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    write_down("token", str(tx.fencing_token))
    if label:
        await rest_async(label)
    await insert_async(tx, number)
    await receipt.with_options(transaction=tx).enqueue_async(number, 0.0)
    return number


@app.task("book_own_id", retry_policy=AGAIN)
def book_own_id(tx: TaskTransaction = INJECTED) -> None:
    """Write a number that no other task writes, without taking it as an argument."""
    insert(tx, int(current_task().id[-7:], 16))


@app.task("withdraw", retry_policy=AGAIN_AFTER_CONFLICTS)
def withdraw(number: int, label: str, tx: TaskTransaction = INJECTED) -> int:
    """Write a row into an empty table in a serializable transaction, so that the last task that reads
    the table conflicts.
    """
    tx.connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    row = tx.connection.execute("SELECT count(*) FROM bookings").fetchone()
    assert row is not None
    if tx.attempt == 1:
        rest(label)
    if row[0] < 1:
        insert(tx, number)
    return int(row[0])


@app.task("lock_two", retry_policy=AGAIN_AFTER_CONFLICTS)
def lock_two(number: int, label: str, tx: TaskTransaction = INJECTED) -> int:
    """Lock two numbers, with a wait in between."""
    tx.connection.execute("SET LOCAL deadlock_timeout = '50ms'")
    tx.connection.execute("SELECT pg_advisory_xact_lock(1)")
    if tx.attempt == 1:
        rest(label)
    tx.connection.execute("SELECT pg_advisory_xact_lock(2)")
    insert(tx, number)
    return tx.attempt
