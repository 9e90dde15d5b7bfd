"""Tasks that try to separate their effects from their outcome, with threads, forks, statements and
leftover state.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.orm import Session

from horsies import INJECTED, AsyncTaskTransaction, TaskTransaction, current_task
from tests.support.apps.booking import app, engine, insert, insert_async, rest
from tests.support.apps.programs import write_down

__all__ = ["app"]

INSERT = "INSERT INTO bookings VALUES (%s, %s, %s)"
kept: list[Any] = []


def try_insert(connection: psycopg.Connection[Any], row: tuple[Any, ...], label: str) -> None:
    """Try to write a row, and record whether the connection accepted it."""
    try:
        connection.execute(INSERT, row)
    except Exception as error:
        write_down(label, str(error))
    else:
        write_down(label, "written")


@contextmanager
def raising_at_exit() -> Iterator[None]:
    yield
    raise ValueError("at exit")


@app.task("write_later")
def write_later(number: int, label: str, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Leave a thread behind that writes once the test releases the label."""
    insert(tx, number)
    connection = tx.connection
    row = (number + 1, tx.attempt, current_task().id)

    def write() -> None:
        rest(label)
        try_insert(connection, row, f"{label} wrote")

    threading.Thread(target=write, daemon=True).start()
    if how == "raise":
        raise ValueError("no")
    return number


@app.task("return_beside_a_thread")
def return_beside_a_thread(number: int, tx: TaskTransaction = INJECTED) -> int:
    """Return while a thread is executing a statement."""
    insert(tx, number)
    connection = tx.connection
    threading.Thread(target=_sleep_in_session, args=(connection,), daemon=True).start()
    while connection.info.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
        pass
    return number


def _sleep_in_session(connection: psycopg.Connection[Any]) -> None:
    try:
        connection.execute("SELECT pg_sleep(30)")
    except psycopg.Error:
        return


@app.task("fork")
def fork(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Fork and use the transaction in both processes."""
    insert(tx, number)
    connection, row = tx.connection, (number + 1, tx.attempt, current_task().id)
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(
            target=try_insert, args=(connection, row, "forked wrote")
        )
        process.start()
        process.join()
        return number
    pid = os.fork()
    if pid == 0:
        if how == "write":
            try_insert(connection, row, "forked wrote")
        if how == "raise":
            raise ValueError("in the forked process")
        return number + 1
    os.waitpid(pid, 0)
    return number


def execute_in_some_way(connection: psycopg.Connection[Any], how: str) -> None:
    """Execute a statement with psycopg's other methods, or below psycopg."""
    match how:
        case "composed":
            connection.execute(sql.SQL("COMMIT"))
        case "cursor":
            with connection.cursor() as cursor:
                cursor.execute(b"commit and chain")
        case "raw commit":
            connection.pgconn.exec_(b"COMMIT")
        case "executemany":
            connection.cursor().executemany("COMMIT", [()])
        case "stream":
            list(connection.cursor().stream("COMMIT"))
        case "copy":
            with connection.cursor().copy(b"COPY (SELECT 1) TO STDOUT") as copy:
                assert list(copy)
        case statement:
            connection.execute(statement.encode())


@app.task("meddle")
def meddle(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Write a row, then change the transaction or the session."""
    insert(tx, number)
    connection = tx.connection
    match how:
        case "open block":
            kept.append(connection.transaction())
            kept[-1].__enter__()
        case "savepoint":
            connection.execute("SAVEPOINT one")
            insert(tx, number + 1)
            connection.execute("ROLLBACK TO one")
            connection.execute("SAVEPOINT left_open")
        case "raise at exit":
            with raising_at_exit():
                return number
        case "raise inside the connection":
            with connection:
                raise ValueError("no")
        case "close the socket":
            os.close(connection.fileno())
        case "finish":
            connection.pgconn.finish()
        case _:
            execute_in_some_way(connection, how)
    return number


@app.task("return_unstorable")
def return_unstorable(number: int, tx: TaskTransaction = INJECTED) -> Any:
    """Return a value that JSON cannot represent."""
    insert(tx, number)
    return threading.Lock()


@app.task("return_unstorable_async")
async def return_unstorable_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> Any:
    await insert_async(tx, number)
    return threading.Lock()


@app.task("prepare_and_roll_back")
def prepare_and_roll_back(number: int, tx: TaskTransaction = INJECTED) -> int:
    """Make psycopg prepare a statement on its fifth use and deallocate it after a rollback."""
    for _ in range(7):
        insert(tx, number)
        tx.connection.execute("DELETE FROM bookings WHERE number = %s", (number,))
    with tx.connection.transaction(force_rollback=True):
        insert(tx, number + 1)
    insert(tx, number)
    return number


@app.task("prepare_and_roll_back_async")
async def prepare_and_roll_back_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> int:
    """Like ``prepare_and_roll_back``, on the session that all coroutines of this child share."""
    for _ in range(7):
        await insert_async(tx, number)
        connection = await tx.connection()
        await connection.execute("DELETE FROM bookings WHERE number = %s", (number,))
    async with connection.transaction(force_rollback=True):
        await insert_async(tx, number + 1)
    await insert_async(tx, number)
    return number


@app.task("record_in_savepoint")
def record_in_savepoint(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Record the outcome in a savepoint that could be rolled back separately."""
    row = {"number": number, "attempt": tx.attempt, "id": current_task().id}
    with Session(engine) as session:
        session.execute(text("INSERT INTO bookings VALUES (:number, :attempt, :id)"), row)
        if how == "session":
            with session.begin_nested():
                tx.record_in(session, number)
        else:
            with session.connection().begin_nested():
                tx.record_in(session.connection(), number)
        session.commit()
    return number


@app.task("write_later_async")
async def write_later_async(number: int, how: str, tx: AsyncTaskTransaction = INJECTED) -> int:
    """Leave a coroutine behind that writes after the end of the task."""
    await insert_async(tx, number)
    connection, row = await tx.connection(), (number + 1, tx.attempt, current_task().id)
    own, is_over = asyncio.current_task(), asyncio.Event()
    assert own is not None
    own.add_done_callback(lambda _: is_over.set())

    async def write() -> None:
        await is_over.wait()
        try:
            await connection.execute(INSERT, row)
        except Exception as error:
            write_down("coroutine wrote", str(error))
        else:
            write_down("coroutine wrote", "written")

    kept.append(asyncio.create_task(write()))
    if how == "raise":
        raise ValueError("no")
    return number


@app.task("cancel_own_commit")
async def cancel_own_commit(number: int, steps: int, tx: AsyncTaskTransaction = INJECTED) -> int:
    """Cancel this task's coroutine a few steps of the event loop after its return."""
    await insert_async(tx, number)
    own, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert own is not None

    def cancel(left: int) -> None:
        if left == 0:
            own.cancel()
        else:
            loop.call_soon(cancel, left - 1)

    loop.call_soon(cancel, steps)
    return number


# The state that a task may leave in its session; the next task counts it.
LEFT_BEHIND = {
    "advisory locks": "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    "channels": "SELECT count(*) FROM pg_listening_channels()",
    "cursors": "SELECT count(*) FROM pg_cursors WHERE is_holdable",
    "temporary tables": "SELECT count(*) FROM pg_class WHERE relpersistence = 't' "
    "AND relnamespace = pg_my_temp_schema()",
    "role": "SELECT (current_user <> session_user)::integer",
    "settings": "SELECT count(*) FROM pg_settings WHERE source = 'session' "
    "AND name IN ('work_mem', 'statement_timeout', 'search_path', 'session_replication_role')",
}
LEAVING = (
    "SELECT pg_advisory_lock(4712)",
    "LISTEN left_behind",
    "DECLARE left_behind CURSOR WITH HOLD FOR SELECT 1",
    "CREATE TEMPORARY TABLE left_behind (number integer)",
    "SET statement_timeout = '50s'",
    "SET search_path = pg_temp",
    "SET work_mem = '5MB'",
    "SET ROLE pg_monitor",
)


@app.task("leave_behind")
def leave_behind(tx: TaskTransaction = INJECTED) -> dict[str, int]:
    """Return the state that the previous task left in this session, and leave the same state behind."""
    connection = tx.connection
    found = {
        name: connection.execute(query).fetchone()[0]  # type: ignore[index]
        for name, query in LEFT_BEHIND.items()
    }
    found["handlers"] = len(connection._notice_handlers) + len(connection._notify_handlers)
    found["threshold"] = int(connection.prepare_threshold != 5)
    found["pid"] = connection.info.backend_pid
    connection.add_notice_handler(kept.append)
    connection.add_notify_handler(kept.append)
    connection.prepare_threshold = 1
    for statement in LEAVING:
        connection.execute(statement.encode())
    return found


@app.task("leave_behind_async")
async def leave_behind_async(tx: AsyncTaskTransaction = INJECTED) -> dict[str, int]:
    """Run ``leave_behind`` in a coroutine."""
    connection, found = await tx.connection(), {}
    for name, query in LEFT_BEHIND.items():
        row = await (await connection.execute(query)).fetchone()
        found[name] = row[0]  # type: ignore[index]
    found["handlers"] = len(connection._notice_handlers) + len(connection._notify_handlers)
    found["threshold"] = int(connection.prepare_threshold != 5)
    found["pid"] = connection.info.backend_pid
    connection.add_notice_handler(kept.append)
    connection.add_notify_handler(kept.append)
    connection.prepare_threshold = 1
    for statement in LEAVING:
        await connection.execute(statement.encode())
    return found
