"""Sending inside the caller's transaction: task and notification commit or roll back with it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import psycopg
import pytest
from django.db import connection as django_connection
from django.db import transaction as django_transaction
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from horsies.app import Horsies
from horsies.tasks.request import TaskSendError, TaskSendErrorCode
from tests.support.applications import Task, run_closing
from tests.support.callers import (
    CALLERS,
    Caller,
    alchemy_url,
    asyncpg_connection,
    asyncpg_engine,
    configure_django,
    psycopg2_engine,
)
from tests.support.database import Database
from tests.support.rows import finish, stored

NOTE = "INSERT INTO caller_notes VALUES (1)"


@pytest.fixture(params=CALLERS, ids=str)
def caller(request: pytest.FixtureRequest) -> Caller:
    caller: Caller = request.param
    return caller


@pytest.fixture
def notes(connection: Database) -> Iterator[Callable[[], int]]:
    """A table of the caller's own; gives the number of its rows."""
    connection.execute("CREATE TABLE caller_notes (number integer)")

    def count() -> int:
        return len(connection.execute("SELECT * FROM caller_notes").fetchall())

    yield count
    connection.execute("DROP TABLE caller_notes")


@pytest.fixture
def no_priority_42(connection: Database) -> Iterator[None]:
    """Make the insert of some tasks fail."""
    connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT refuse CHECK (priority <> 42)")
    yield
    connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refuse")


@pytest.fixture
def listener(process_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN task_queue_default")
        yield listener


def heard(listener: psycopg.Connection[Any], seconds: float) -> int:
    return len(list(listener.notifies(timeout=seconds, stop_after=1)))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_task_lives_and_dies_with_the_transaction(
    app: Horsies,
    add: Task,
    connection: Database,
    process_url: str,
    caller: Caller,
    listener: psycopg.Connection[Any],
    notes: Callable[[], int],
    end: str,
) -> None:
    async def work() -> Any:
        async with caller.open(process_url, end) as (transaction, execute):
            await execute(NOTE)
            sender = add.with_options(transaction=transaction)
            sent = await caller.call(sender, "send", 1, 2)
            assert stored(connection) == []
            assert heard(listener, 0.05) == 0
            return sent.unwrap()

    handle = caller.run(app, work())
    kept = end == "commit"
    assert notes() == kept
    assert [str(row["id"]) for row in stored(connection)] == [handle.task_id] * kept
    assert heard(listener, 30 if kept else 0.05) == kept


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_that_begins_with_the_send(
    app: Horsies, add: Task, connection: Database, process_url: str, caller: Caller, end: str
) -> None:
    async def work() -> None:
        async with caller.open(process_url, end) as (transaction, _):
            sender = add.with_options(transaction=transaction)
            (await caller.call(sender, "send", 1)).unwrap()

    caller.run(app, work())
    assert len(stored(connection)) == (end == "commit")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_every_way_of_sending_takes_part(
    app: Horsies, add: Task, connection: Database, process_url: str, caller: Caller, end: str
) -> None:
    async def work() -> None:
        async with caller.open(process_url, end) as (transaction, _):
            sender = add.with_options(transaction=transaction)
            (await caller.call(sender, "send", 1)).unwrap()
            (await caller.call(sender, "schedule", 60, 2)).unwrap()
            (await caller.call(sender, "send_many", [add.bind(3), add.bind(4)])).unwrap()
            keyed = add.with_options(transaction=transaction, idempotency_key="order-1")
            first = (await caller.call(keyed, "send", 5)).unwrap()
            second = (await caller.call(keyed, "send", 5)).unwrap()
            assert first.task_id == second.task_id

    caller.run(app, work())
    assert len(stored(connection)) == (5 if end == "commit" else 0)


def test_a_failing_insert_leaves_the_transaction_usable(
    app: Horsies,
    add: Task,
    connection: Database,
    process_url: str,
    caller: Caller,
    notes: Callable[[], int],
    no_priority_42: None,
) -> None:
    async def work() -> TaskSendError:
        async with caller.open(process_url, "commit") as (transaction, execute):
            await execute(NOTE)
            bad = add.with_options(transaction=transaction, priority=42)
            sent = await caller.call(bad, "send", 1)
            await execute(NOTE)
            good = add.with_options(transaction=transaction)
            (await caller.call(good, "send", 2)).unwrap()
            error: TaskSendError = sent.unwrap_err()
            return error

    error = caller.run(app, work())
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert not error.retryable
    assert error.payload is None
    assert notes() == 2
    assert [row["args"] for row in stored(connection)] == ["[2]"]


def test_a_refused_request_leaves_the_transaction_usable(
    app: Horsies,
    add: Task,
    connection: Database,
    process_url: str,
    caller: Caller,
    notes: Callable[[], int],
) -> None:
    add.with_options(idempotency_key="order-1").send(1).unwrap()

    async def work() -> Any:
        async with caller.open(process_url, "commit") as (transaction, execute):
            keyed = add.with_options(transaction=transaction, idempotency_key="order-1")
            mismatch = await caller.call(keyed, "send", 2)
            invalid = await caller.call(keyed, "send", "one")
            await execute(NOTE)
            return mismatch.unwrap_err().code, invalid.unwrap_err().code

    assert caller.run(app, work()) == (
        TaskSendErrorCode.PAYLOAD_MISMATCH,
        TaskSendErrorCode.VALIDATION_FAILED,
    )
    assert notes() == 1


def test_a_handle_made_in_a_transaction_gives_the_result_after_it(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as transaction:
        handle = add.with_options(transaction=transaction).send(1).unwrap()
    finish(connection, handle.task_id)
    assert handle.get(timeout_ms=30_000).ok_value == 1


def test_a_connection_that_commits_by_itself_is_refused_outside_of_a_transaction(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url, autocommit=True) as caller:
        sending = add.with_options(transaction=caller)
        errors = [
            sending.send(1).unwrap_err(),
            sending.send_many(add.bind(number) for number in range(2)).unwrap_err(),
        ]
        with caller.transaction(force_rollback=True):
            sending.send(2).unwrap()
        caller.execute("BEGIN")
        sending.send(3).unwrap()
        caller.execute("COMMIT")
    for error in errors:
        assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
        assert "open a transaction first" in error.message
    assert [row["args"] for row in stored(connection)] == ["[3]"]


def test_an_asynchronous_connection_that_commits_by_itself_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    async def scenario() -> TaskSendError:
        async with await psycopg.AsyncConnection.connect(process_url, autocommit=True) as caller:
            sending = add.with_options(transaction=caller)
            return (await sending.send_async(1)).unwrap_err()

    assert "open a transaction first" in run_closing(app, scenario()).message
    assert stored(connection) == []


def test_a_savepoint_of_the_caller_takes_the_task_with_it(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as caller:
        add.with_options(transaction=caller).send(1).unwrap()
        with caller.transaction(force_rollback=True):
            add.with_options(transaction=caller).send(2).unwrap()
    assert [row["args"] for row in stored(connection)] == ["[1]"]


def test_the_caller_sees_its_own_task(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as caller:
        add.with_options(transaction=caller).send(1).unwrap()
        assert len(stored(caller)) == 1


def test_row_factories_and_cursors_of_the_caller_do_not_matter(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    row_factory = psycopg.rows.scalar_row
    cursor_factory = psycopg.ClientCursor
    with psycopg.connect(
        process_url, row_factory=row_factory, cursor_factory=cursor_factory
    ) as caller:
        add.with_options(transaction=caller).send(1).unwrap()
    assert len(stored(connection)) == 1


def test_an_aborted_transaction_stays_the_callers_to_end(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as caller:
        with pytest.raises(psycopg.errors.DivisionByZero):
            caller.execute("SELECT 1 / 0")
        error = add.with_options(transaction=caller).send(1).unwrap_err()
        caller.rollback()
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert "aborted" in error.message


def test_a_connection_lost_in_the_middle_is_an_error_value_and_cannot_be_replayed(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as caller:
        caller.execute("SELECT 1")
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (caller.info.backend_pid,))
        error = add.with_options(transaction=caller).send(1).unwrap_err()
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert error.retryable
    refused = add.retry_send(error).unwrap_err()
    assert refused.code is TaskSendErrorCode.VALIDATION_FAILED
    assert "repeated with that transaction" in refused.message
    assert stored(connection) == []


# Objects that are no transaction


def unusable(error: TaskSendError) -> str:
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert not error.retryable
    assert "\n" not in error.message
    return error.message


def test_what_is_no_connection_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    engine = create_engine(alchemy_url(process_url), poolclass=NullPool)
    file = sqlite3.connect(":memory:")
    for strange in (object(), 5, process_url, engine, file, connection.cursor(), Session):
        message = unusable(add.with_options(transaction=strange).send(1).unwrap_err())
        assert message.startswith("transaction= takes an open psycopg, asyncpg, SQLAlchemy")
        assert type(strange).__name__ in message
        sent = run_closing(app, add.with_options(transaction=strange).send_async(1))
        assert "transaction= takes" in unusable(sent.unwrap_err())
    file.close()
    assert stored(connection) == []


def test_an_asynchronous_transaction_needs_an_asynchronous_send(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    engine = create_async_engine(alchemy_url(process_url), poolclass=NullPool)

    async def main() -> None:
        async with (
            await psycopg.AsyncConnection.connect(process_url) as plain,
            engine.connect() as alchemy,
            AsyncSession(engine) as session,
            asyncpg_connection(process_url, "rollback") as (own, _),
        ):
            for transaction in (plain, alchemy, session, own):
                sent = add.with_options(transaction=transaction).send(1)
                message = unusable(sent.unwrap_err())
                assert message.startswith(f"This {type(transaction).__name__} is asynchronous: use")
                kind = "synchronous connection" if transaction is own else "Session"
                assert transaction not in (session, own) or message.endswith(f"pass a {kind}.")

    asyncio.run(main())
    assert stored(connection) == []


def test_a_synchronous_transaction_needs_a_synchronous_send(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    configure_django(process_url)
    engine = create_engine(alchemy_url(process_url), poolclass=NullPool)
    with (
        psycopg.connect(process_url) as plain,
        engine.connect() as alchemy,
        Session(engine) as session,
    ):
        for transaction in (plain, alchemy, session, django_connection):
            sent = run_closing(app, add.with_options(transaction=transaction).send_async(1))
            message = unusable(sent.unwrap_err())
            name = type(transaction).__name__
            assert message.startswith(f"This {name} is synchronous: use send or start with it")
            is_django = transaction is django_connection
            assert message.endswith("." if is_django else f", or pass an Async{name}.")
    assert stored(connection) == []


def test_a_connection_in_pipeline_mode_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    engine = create_engine(alchemy_url(process_url), poolclass=NullPool)
    with psycopg.connect(process_url) as plain, plain.pipeline(), engine.connect() as alchemy:
        driver = alchemy.connection.driver_connection
        assert driver is not None
        with driver.pipeline():
            for transaction in (plain, alchemy):
                for key in (None, "order-1"):
                    sender = add.with_options(transaction=transaction, idempotency_key=key)
                    assert "leave the pipeline" in unusable(sender.send(1).unwrap_err())
    with psycopg.connect(process_url) as left:
        with left.pipeline():
            left.execute("SELECT 1")
        add.with_options(transaction=left).send(2).unwrap()
    assert [row["args"] for row in stored(connection)] == ["[2]"]


def test_an_asynchronous_connection_in_pipeline_mode_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    async def main() -> None:
        async with (
            await psycopg.AsyncConnection.connect(process_url) as transaction,
            transaction.pipeline(),
        ):
            for key in (None, "order-1"):
                sender = add.with_options(transaction=transaction, idempotency_key=key)
                sent = await sender.send_async(1)
                assert "leave the pipeline" in unusable(sent.unwrap_err())

    run_closing(app, main())
    assert stored(connection) == []


def test_a_closed_connection_is_an_error_value(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as closed:
        pass
    error = add.with_options(transaction=closed).send(1).unwrap_err()
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert error.message.startswith("This connection is closed; send while it is open")
    with create_engine(alchemy_url(process_url), poolclass=NullPool).connect() as other:
        pass
    message = unusable(add.with_options(transaction=other).send(1).unwrap_err())
    assert message.startswith("This connection is closed; send while it is open")


def test_a_session_that_was_closed_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    engine = create_engine(alchemy_url(process_url), poolclass=NullPool)
    makes: list[Callable[[], Any]] = [
        lambda: Session(engine),
        lambda: Session(psycopg2_engine(process_url)),
        scoped_session(sessionmaker(engine)),
    ]
    for make in makes:
        for statements in (0, 1):
            with make() as session:
                for _ in range(statements):
                    session.execute(text("SELECT 1"))
            message = unusable(add.with_options(transaction=session).send(1).unwrap_err())
            assert message.startswith(
                "This Session has no open transaction: it is closed, or its last"
            )
            assert not session.in_transaction()
    assert stored(connection) == []


def test_an_asynchronous_session_that_was_closed_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    async def main() -> None:
        engines = [
            create_async_engine(alchemy_url(process_url), poolclass=NullPool),
            asyncpg_engine(process_url),
        ]
        for engine in engines:
            for statements in (0, 1):
                async with AsyncSession(engine) as session:
                    for _ in range(statements):
                        await session.execute(text("SELECT 1"))
                sent = await add.with_options(transaction=session).send_async(1)
                message = unusable(sent.unwrap_err())
                assert message.startswith("This AsyncSession has no open transaction: it is closed")
                assert not session.in_transaction()
            async with engine.connect() as lent:
                pass
            sent = await add.with_options(transaction=lent).send_async(1)
            assert unusable(sent.unwrap_err()).startswith("This connection is closed")

    run_closing(app, main())
    assert stored(connection) == []


def test_a_session_whose_transaction_has_ended_is_refused_until_the_next(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with Session(create_engine(alchemy_url(process_url), poolclass=NullPool)) as session:
        add.with_options(transaction=session).send(1).unwrap()
        session.commit()
        error = add.with_options(transaction=session).send(2).unwrap_err()
        assert "no open transaction" in unusable(error)
        with session.begin():
            add.with_options(transaction=session).send(3).unwrap()
    assert len(stored(connection)) == 2


@pytest.mark.parametrize(
    "engine_of",
    [lambda url: create_engine(alchemy_url(url), poolclass=NullPool), psycopg2_engine],
    ids=["psycopg", "psycopg2"],
)
def test_a_transaction_that_cannot_go_on_is_an_error_value(
    app: Horsies,
    add: Task,
    connection: Database,
    process_url: str,
    engine_of: Callable[[str], Engine],
) -> None:
    """After a lost connection or a failed flush, SQLAlchemy wants a rollback first."""
    engine = engine_of(process_url)
    with engine.connect() as lost, Session(engine) as session:
        lost.execute(text("SELECT 1"))
        lost.invalidate()
        session.connection().invalidate()
        for transaction in (lost, session):
            error = add.with_options(transaction=transaction).send(1).unwrap_err()
            assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
            assert "rolled back" in error.message
        lost.rollback()
        session.rollback()
    with Session(engine) as session, session.begin(), session.begin_nested() as nested:
        nested.rollback()
        error = add.with_options(transaction=session).send(1).unwrap_err()
        assert "Can't operate on closed transaction" in error.message
    assert stored(connection) == []


def test_a_closed_connection_of_django_is_an_error_value(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    configure_django(process_url)
    sender = add.with_options(transaction=django_connection)
    django_connection.close()
    assert unusable(sender.send(1).unwrap_err()) == COMMITS_ALONE
    with django_transaction.atomic():
        django_connection.close()
        assert sender.send(1).unwrap_err().code is TaskSendErrorCode.ENQUEUE_FAILED
    django_connection.close()
    assert stored(connection) == []


COMMITS_ALONE = (
    "This connection commits every statement by itself, so the task would not be part of a transaction; "
    "open a transaction first, or leave transaction= out."
)


def test_a_synchronous_connection_that_only_commits_by_itself_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    configure_django(process_url)
    engine = create_engine(alchemy_url(process_url), poolclass=NullPool)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as alchemy,
        psycopg2_engine(process_url)
        .connect()
        .execution_options(isolation_level="AUTOCOMMIT") as other_driver,
        Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
    ):
        for transaction in (alchemy, other_driver, session, django_connection):
            error = add.with_options(transaction=transaction).send(1).unwrap_err()
            assert unusable(error) == COMMITS_ALONE
    django_connection.close()
    assert stored(connection) == []


def test_an_asynchronous_connection_that_only_commits_by_itself_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    async def main() -> None:
        plain = await asyncpg.connect(process_url)
        engines = [
            create_async_engine(alchemy_url(process_url), poolclass=NullPool),
            asyncpg_engine(process_url),
        ]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(plain.close)
            lent: list[Any] = [plain]
            for engine in engines:
                one = await stack.enter_async_context(engine.connect())
                lent.append(await one.execution_options(isolation_level="AUTOCOMMIT"))
            for transaction in lent:
                sent = await add.with_options(transaction=transaction).send_async(1)
                assert unusable(sent.unwrap_err()) == COMMITS_ALONE
        sent = await add.with_options(transaction=plain).send_async(1)
        assert "This connection is closed" in unusable(sent.unwrap_err())

    run_closing(app, main())
    assert stored(connection) == []


def test_a_connection_to_a_database_without_the_tables_is_named(
    app: Horsies, add: Task, database_url: str
) -> None:
    with psycopg.connect(database_url) as elsewhere:
        for sent in (
            add.with_options(transaction=elsewhere).send(1),
            add.with_options(transaction=elsewhere).send_many([add.bind(1)]),
        ):
            message = unusable(sent.unwrap_err())
            assert message.startswith(
                "The connection given as transaction= leads to another database or schema than the "
                "application's; connect it to app.database_url ("
            )
            assert "does not exist" in message


def test_a_delay_counts_from_the_send_and_not_from_the_beginning_of_the_transaction(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as caller:
        (begun_at,) = caller.execute("SELECT now(), pg_sleep(0.2)").fetchone()[:1]  # type: ignore[index]
        add.with_options(transaction=caller).schedule(10, 1).unwrap()
    (row,) = connection.execute(
        "SELECT extract(epoch FROM enqueued_at - %s)::float8 FROM horsies_tasks", (begun_at,)
    ).fetchall()
    assert row[0] > 10.2


def test_a_connection_to_another_database_system_is_refused(
    app: Horsies, add: Task, connection: Database
) -> None:
    with create_engine("sqlite://").connect() as caller:
        message = unusable(add.with_options(transaction=caller).send(1).unwrap_err())
    assert message == "This connection belongs to sqlite; tasks are stored in PostgreSQL."


@pytest.mark.parametrize("caller", CALLERS[-4:], ids=str, indirect=True)
def test_an_error_of_another_driver_quotes_neither_statement_nor_arguments(
    app: Horsies, add: Task, process_url: str, caller: Caller, no_priority_42: None
) -> None:
    async def work() -> TaskSendError:
        async with caller.open(process_url, "rollback") as (transaction, _):
            bad = add.with_options(transaction=transaction, priority=42)
            error: TaskSendError = (await caller.call(bad, "send", 987654)).unwrap_err()
            return error

    error = caller.run(app, work())
    assert error.message == (
        'new row for relation "horsies_tasks" violates check constraint "refuse"'
    )
    assert "987654" not in f"{error.exception!r} {error.exception.__cause__!r}"


TWO_PHASE = "two-phase transaction, and PostgreSQL cannot prepare"


def test_a_two_phase_transaction_is_refused_before_it_is_spoiled(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url) as caller:
        caller.tpc_begin(caller.xid(1, "global", "branch"))
        error = add.with_options(transaction=caller).send(1).unwrap_err()
        assert TWO_PHASE in error.message
        assert caller.execute("SELECT 1").fetchone() == (1,)
        caller.tpc_rollback()
        assert add.with_options(transaction=caller).send(1).is_ok()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_two_phase_transaction_of_sqlalchemy_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str, driver: str
) -> None:
    engine = create_engine(alchemy_url(process_url), poolclass=NullPool)
    if driver == "psycopg2":
        engine = psycopg2_engine(process_url)
    with engine.connect() as caller:
        transaction = caller.begin_twophase()
        error = add.with_options(transaction=caller).send(1).unwrap_err()
        transaction.rollback()
    engine.dispose()
    assert TWO_PHASE in error.message


def test_a_two_phase_transaction_of_an_event_loop_is_refused(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    async def send() -> TaskSendError:
        async with await psycopg.AsyncConnection.connect(process_url) as caller:
            await caller.tpc_begin(caller.xid(1, "global", "branch"))
            sent = await add.with_options(transaction=caller).send_async(1)
            await caller.tpc_rollback()
            return sent.unwrap_err()

    assert TWO_PHASE in run_closing(app, send()).message
