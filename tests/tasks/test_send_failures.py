"""Sending when the database is away, answers get lost, or a failed send is sent again."""

from __future__ import annotations

import asyncio
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

import horsies as horsies_package
from horsies import TaskError, TaskResult, WorkflowSpec
from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.statements.tasks import TaskId
from horsies.ids import new_id
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, PostgresBroker
from horsies.tasks.request import TaskSendError, TaskSendErrorCode
from tests.support.applications import UNREACHABLE, Call, Task, add_task, app_at, run_closing
from tests.support.database import Database, backends, database_on, terminate
from tests.support.proxy import Proxy, RefusingServer
from tests.support.rows import stored, stored_ids
from tests.support.wait import wait_until

PASSWORD = "hunter2"
LOST = BrokerOperationError(BrokerErrorCode.ENQUEUE_FAILED, "The server is away.", retryable=True)


def enqueue_failure(sent: Any, *, retryable: bool) -> TaskSendError:
    """Check that nothing was stored for a reason outside the call, and that the message names it."""
    error: TaskSendError = sent.unwrap_err()
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert error.retryable is retryable
    assert "\n" not in error.message
    assert PASSWORD not in f"{error.message}{error!r}{error.exception!r}"
    return error


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


# A database that cannot be reached


def test_a_server_that_refuses_the_connection(call: Call, closed_port: int) -> None:
    app = app_at(f"postgresql://app:{PASSWORD}@127.0.0.1:{closed_port}/shop")
    error = enqueue_failure(call(app, add_task(app), "send", 1), retryable=True)
    assert error.message.startswith("No server listens at this address")
    assert error.task_id is not None
    assert error.payload is not None
    assert (error.payload.args_json, error.payload.kwargs_json) == ("[1]", "{}")
    app.close()


def test_a_socket_directory_without_a_server(call: Call) -> None:
    app = app_at(f"postgresql://app:{PASSWORD}@/shop?host=/nowhere")
    error = enqueue_failure(call(app, add_task(app), "send", 1), retryable=True)
    assert "start PostgreSQL" in error.message
    app.close()


def test_a_host_name_nobody_knows(call: Call) -> None:
    app = app_at(f"postgresql://app:{PASSWORD}@nowhere.invalid/shop")
    error = enqueue_failure(call(app, add_task(app), "send", 1), retryable=True)
    assert "host name is unknown" in error.message
    app.close()


def test_a_database_that_does_not_exist(call: Call, server_url: str) -> None:
    app = app_at(database_on(server_url, "no_such_database"))
    sent = call(app, add_task(app), "send", 1)
    error = enqueue_failure(sent, retryable=sent.unwrap_err().retryable)
    assert "does not exist; create it or correct database_url" in error.message
    app.close()


def test_a_wrong_password(call: Call) -> None:
    with RefusingServer() as server:
        app = app_at(f"postgresql://app:{PASSWORD}@127.0.0.1:{server.port}/shop")
        sent = call(app, add_task(app), "send", 1)
        error = enqueue_failure(sent, retryable=sent.unwrap_err().retryable)
        assert "refused the user name or password; correct database_url" in error.message
        app.close()


UNREADABLE_URLS = {
    "percent": "postgresql://app:S3cr%zzet@localhost:1/shop",
    "space": "postgresql://app:S3cr ETzzet@localhost:1/shop",
    "at": "postgresql://app:S3cr@zzet@localhost:1/shop",
}


@pytest.mark.parametrize("url", UNREADABLE_URLS.values(), ids=UNREADABLE_URLS)
def test_a_password_that_is_not_encoded_is_shown_nowhere(call: Call, url: str) -> None:
    app = app_at(url)
    sent = call(app, add_task(app), "send", 1).unwrap_err()
    pinged = call(app, app, "ping_database").unwrap_err()
    got = call(app, app.handle(new_id()), "get", timeout_ms=30_000).err_value
    shown = [repr(sent), repr(pinged), repr(got), got.model_dump_json()]
    for error in (sent.exception, pinged.exception, got.exception):
        assert isinstance(error, psycopg.Error)
        shown += traceback.format_exception(error)
    assert not [text for text in shown if "S3cr" in text or "zzet" in text]
    app.close()


def test_a_schema_that_is_newer_than_the_code(call: Call, database_url: str) -> None:
    first = app_at(database_url)
    add_task(first).send(1).unwrap()
    with first.get_broker().database.connection() as connection:
        connection.execute(
            "INSERT INTO public.horsies_migrations (version, name) VALUES (9999, 'x')"
        )
    first.close()
    app = app_at(database_url)
    error = enqueue_failure(call(app, add_task(app), "send", 1), retryable=False)
    assert "upgrade horsies" in error.message
    app.close()


def test_a_broker_that_cannot_be_built_is_an_error_value(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    working = app.get_broker()
    monkeypatch.setattr(app, "_broker", None)

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    add = add_task(app)
    for method, args in (("send", (1,)), ("send_many", ([add.bind(1)],))):
        with monkeypatch.context() as patch:
            patch.setattr("horsies.tasks.broker.PostgresBroker", broken)
            patch.setattr(app, "close_async", working.close_async)
            error = enqueue_failure(call(app, add, method, *args), retryable=False)
            assert "disk full" in error.message


def test_all_threads_share_one_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")

    class Overtaken(PostgresBroker):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            with monkeypatch.context() as patch:
                patch.setattr("horsies.tasks.broker.PostgresBroker", PostgresBroker)
                overtaker.append(app.get_broker())

    overtaker: list[PostgresBroker] = []
    with monkeypatch.context() as patch:
        patch.setattr("horsies.tasks.broker.PostgresBroker", Overtaken)
        assert app.get_broker() is overtaker[0]


def test_a_server_that_goes_away_and_comes_back(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(distant_app)
    call(distant_app, add, "send", 1).unwrap()
    proxy.stop()
    error = enqueue_failure(call(distant_app, add, "send", 2), retryable=True)
    assert "No server listens" in error.message
    assert len(stored(connection)) == 1
    proxy.start()
    assert call(distant_app, add, "send", 3).is_ok()
    assert call(distant_app, add, "retry_send", error).unwrap().task_id == error.task_id
    assert len(stored(connection)) == 3


def test_a_whole_pool_the_server_has_closed_costs_no_send(
    process_url: str, connection: Database
) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=process_url, pool_size=5)))
    add = add_task(app)
    with ExitStack() as borrowed:
        for _ in range(5):
            borrowed.enter_context(app.get_broker().database.connection())
    # Those of earlier tests may take a moment to leave.
    wait_until(lambda: len(backends(connection, "horsies:producer")) == 5)
    terminate(connection, "horsies:producer")
    started = time.monotonic()
    add.send(2).unwrap()
    assert time.monotonic() - started < 20
    app.close()


def test_connections_of_an_event_loop_that_the_server_closed_cost_no_send(
    app: Horsies, add: Task, connection: Database
) -> None:
    async def main() -> None:
        await asyncio.gather(*(add.send_async(n) for n in range(5)))
        terminate(connection, "horsies:producer")
        (await add.send_async(6)).unwrap()

    run_closing(app, main())
    assert len(stored(connection)) == 6


def test_a_send_that_finds_all_connections_busy_says_so(
    process_url: str, connection: Database, call: Call
) -> None:
    broker = PostgresConfig(database_url=process_url, pool_size=1, max_overflow=0, pool_timeout=0.2)
    app = Horsies(AppConfig(broker=broker))
    add = add_task(app)
    add.send(1).unwrap()

    async def main() -> Any:
        database = app.get_broker().database
        with database.connection():
            async with database.connection_async():
                return add.send(2), await add.send_async(2)

    for sent in run_closing(app, main()):
        assert "raise pool_size or max_overflow" in enqueue_failure(sent, retryable=True).message
    assert call(app, add, "send", 2).is_ok()
    app.close()


def test_a_failing_insert_is_no_reason_to_try_again(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT refuse CHECK (priority <> 42)")
    try:
        error = enqueue_failure(
            call(app, add.with_options(priority=42), "send", 1), retryable=False
        )
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refuse")
    assert "refuse" in error.message
    assert add.send(1).is_ok()


def test_database_messages_never_show_the_arguments(
    app: Horsies, add: Task, connection: Database
) -> None:
    connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT refuse CHECK (args <> '[987123]')")
    try:
        error = enqueue_failure(add.send(987123), retryable=False)
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refuse")
    assert "987123" not in f"{error.message}{error!r}"


# An answer that was lost


def test_a_send_whose_answer_was_lost_can_be_replayed_without_a_second_task(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(distant_app)
    add.send(1).unwrap()
    proxy.swallow_answer_with(b"INSERT 0 1")
    error = enqueue_failure(call(distant_app, add, "send", 2), retryable=True)
    assert proxy.swallowed.is_set()
    assert error.task_id in stored_ids(connection)
    handle = call(distant_app, add, "retry_send", error).unwrap()
    assert handle.task_id == error.task_id
    assert len(stored(connection)) == 2


def test_a_schedule_whose_answer_was_lost_keeps_its_first_due_time(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(distant_app)
    proxy.swallow_answer_with(b"INSERT 0 1")
    error = enqueue_failure(call(distant_app, add, "schedule", 60, 2), retryable=True)
    (before,) = stored(connection)
    assert call(distant_app, add, "retry_schedule", error).is_ok()
    assert stored(connection) == [before]


def test_a_lost_answer_is_resent_by_itself_when_the_application_asks_for_it(
    proxy: Proxy, connection: Database, call: Call
) -> None:
    app = app_at(proxy.url, resend_on_transient_err=True)
    add = add_task(app)
    add.send(1).unwrap()
    proxy.swallow_answer_with(b"INSERT 0 1")
    handle = call(app, add, "send", 2).unwrap()
    assert proxy.swallowed.is_set()
    assert len(stored(connection)) == 2
    assert handle.task_id in stored_ids(connection)
    app.close()


def test_a_lost_answer_to_a_keyed_send_is_found_by_its_key(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(distant_app)
    proxy.swallow_answer_with(b"INSERT 0 1")
    keyed = add.with_options(idempotency_key="order-1")
    error = enqueue_failure(call(distant_app, keyed, "send", 2), retryable=True)
    assert call(distant_app, add, "retry_send", error).unwrap().task_id == error.task_id
    assert call(distant_app, keyed, "send", 2).unwrap().task_id == error.task_id
    assert len(stored(connection)) == 1


# Sending a failed send again


def failed_send(add: Task, *, delay: float | None = None) -> TaskSendError:
    """Return the error of a send that did not reach the database."""
    app = app_at("postgresql://127.0.0.1:1/shop")
    twin = app.task("add")(add.definition.function)
    sent = twin.send(1) if delay is None else twin.schedule(delay, 1)
    app.close()
    error: TaskSendError = sent.unwrap_err()
    return error


def test_a_failed_send_is_stored_once_however_often_it_is_retried(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    error = failed_send(add)
    assert error.payload is not None
    handles = [call(app, add, "retry_send", error).unwrap() for _ in range(3)]
    assert {handle.task_id for handle in handles} == {error.task_id}
    (row,) = stored(connection)
    assert row["enqueue_sha"] == error.payload.enqueue_sha
    assert row["sent_at"] == error.payload.sent_at


def test_a_failed_schedule_counts_its_delay_from_the_retry(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    error = failed_send(add, delay=30)
    call(app, add, "retry_schedule", error).unwrap()
    (row,) = stored(connection)
    assert row["enqueued_at"] - row["created_at"] == timedelta(seconds=30)


def test_retrying_a_task_that_ran_and_was_deleted_is_no_error_but_warns(
    app: Horsies, add: Task, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    error = failed_send(add)
    broker = app.get_broker()
    broker.ensure_schema_initialized()
    # An insert that meets a row which is gone a moment later: a trigger that stores nothing.
    connection.execute(
        "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    connection.execute(
        "CREATE TRIGGER vanish BEFORE INSERT ON horsies_tasks "
        "FOR EACH ROW EXECUTE FUNCTION vanish()"
    )
    try:
        assert add.retry_send(error).unwrap().task_id == error.task_id
    finally:
        connection.execute("DROP FUNCTION vanish CASCADE")
    assert "deleted since" in caplog.text


def test_another_request_under_the_same_id_is_a_mismatch(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    error = failed_send(add)
    assert error.payload is not None
    add.retry_send(error).unwrap()
    payload = replace(error.payload, args_json="[2]", enqueue_sha="0" * 64)
    sent = call(app, add, "retry_send", replace(error, payload=payload))
    mismatch = sent.unwrap_err()
    assert mismatch.code is TaskSendErrorCode.PAYLOAD_MISMATCH
    assert not mismatch.retryable
    assert mismatch.task_id == error.task_id
    assert mismatch.payload == payload
    (row,) = stored(connection)
    assert row["args"] == "[1]"


def other_task(app: Horsies) -> Task:
    def other(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    return app.task("other")(other)


def test_errors_that_cannot_be_retried_are_refused(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    now, later = failed_send(add), failed_send(add, delay=5)
    attempts: list[tuple[Task, str, Any, str]] = [
        (add, "retry_send", later, "use retry_schedule"),
        (add, "retry_schedule", now, "use retry_send"),
        (add, "retry_send", replace(now, payload=None), "no payload"),
        (add, "retry_schedule", replace(later, task_id=None), "no payload"),
        (other_task(app), "retry_send", now, "belongs to task 'add'"),
        (add, "retry_send", None, "TaskSendError"),
        (add, "retry_schedule", Ok(1), "TaskSendError"),
    ]
    for code in TaskSendErrorCode:
        if code is not TaskSendErrorCode.ENQUEUE_FAILED:
            attempts.append((add, "retry_send", replace(now, code=code), code.value))
    for task, method, error, fault in attempts:
        refusal = call(app, task, method, error).unwrap_err()
        assert refusal.code is TaskSendErrorCode.VALIDATION_FAILED
        assert fault in refusal.message
        assert not refusal.retryable
    assert stored(connection) == []


# Resending by itself


class Unreliable:
    """A broker whose first answers are failures; counts calls and remembers what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: Horsies, *failures: Any) -> None:
        self.failures = list(failures)
        self.sleeps: list[float] = []
        self.rows: list[Any] = []
        monkeypatch.setattr(app.get_broker(), "perform", self.perform)
        monkeypatch.setattr(app.get_broker(), "perform_async", self.perform_async)
        monkeypatch.setattr(app.get_broker(), "insert", self.insert)
        monkeypatch.setattr(app.get_broker(), "insert_async", self.insert_async)
        monkeypatch.setattr("horsies.tasks.broker.time", SimpleNamespace(sleep=self.sleeps.append))
        monkeypatch.setattr("horsies.tasks.broker.asyncio.sleep", self.sleep_async)

    def perform(
        self, _code: object, script: Any, _transaction: object = None, *, atomic: bool = False
    ) -> Any:
        assert not atomic
        _, row = next(script)
        self.rows.append(row)
        if self.failures:
            return Err(self.failures.pop(0))
        with pytest.raises(StopIteration) as finished:
            script.send([TaskId(row.id)])
        return Ok(finished.value.value)

    async def perform_async(
        self, code: object, script: Any, transaction: object = None, *, atomic: bool = False
    ) -> Any:
        return self.perform(code, script, transaction, atomic=atomic)

    def insert(self, _statement: object, row: Any) -> Any:
        self.rows.append(row)
        return Err(self.failures.pop(0)) if self.failures else Ok(row.id)

    async def insert_async(self, statement: object, row: Any) -> Any:
        return self.insert(statement, row)

    async def sleep_async(self, seconds: float) -> None:
        self.sleeps.append(seconds)


@pytest.fixture
def eager_app() -> Iterator[Horsies]:
    app = app_at("postgresql://127.0.0.1:1/shop", resend_on_transient_err=True)
    yield app
    app.close()


def test_a_passing_failure_is_tried_four_times_with_growing_pauses(
    eager_app: Horsies, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Unreliable(monkeypatch, eager_app, LOST, LOST, LOST, LOST, LOST)
    error = call(eager_app, add_task(eager_app), "send", 1).unwrap_err()
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert error.retryable
    assert broker.sleeps == [0.2, 0.4, 0.8]
    assert len(broker.rows) == 4
    assert all(row == broker.rows[0] for row in broker.rows)


def test_the_first_success_ends_the_tries(
    eager_app: Horsies, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Unreliable(monkeypatch, eager_app, LOST)
    handle = call(eager_app, add_task(eager_app), "schedule", 5, 1).unwrap()
    assert handle.task_id == broker.rows[0].id
    assert broker.sleeps == [0.2]


def test_a_lasting_failure_is_not_tried_again(
    eager_app: Horsies, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting = replace(LOST, retryable=False)
    broker = Unreliable(monkeypatch, eager_app, lasting)
    assert call(eager_app, add_task(eager_app), "send", 1).is_err()
    assert (len(broker.rows), broker.sleeps) == (1, [])


def test_nothing_is_resent_unless_asked_for(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    broker = Unreliable(monkeypatch, app, LOST)
    assert call(app, add_task(app), "send", 1).is_err()
    assert (len(broker.rows), broker.sleeps) == (1, [])
    app.close()


def test_a_retry_by_hand_is_resent_as_well(
    eager_app: Horsies, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = add_task(eager_app)
    error = failed_send(add)
    broker = Unreliable(monkeypatch, eager_app, LOST, LOST)
    assert call(eager_app, add, "retry_send", error).unwrap().task_id == error.task_id
    assert broker.sleeps == [0.2, 0.4]


def test_inside_a_transaction_nothing_is_resent(
    eager_app: Horsies, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Unreliable(monkeypatch, eager_app, LOST)
    sender = add_task(eager_app).with_options(transaction=object())
    error = call(eager_app, sender, "send", 1).unwrap_err()
    assert (len(broker.rows), broker.sleeps) == (1, [])
    assert error.payload is None


def send_failures(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [one for one in caplog.records if one.name == "horsies.send"]
    return [(one.levelname, one.getMessage()) for one in records]


@pytest.mark.parametrize(
    ("secret", "transaction", "suppressed", "level", "code"),
    [
        ("s3cret", None, False, "WARNING", "ENQUEUE_FAILED"),
        (b"s3cret", None, False, "WARNING", "VALIDATION_FAILED"),
        ("s3cret", None, True, "WARNING", "SEND_SUPPRESSED"),
        ("s3cret", object(), False, "ERROR", None),
    ],
    ids=["unreachable", "refused", "suppressed", "transaction"],
)
def test_a_failed_send_is_logged_once_without_arguments(
    call: Call,
    caplog: pytest.LogCaptureFixture,
    secret: object,
    transaction: object,
    suppressed: bool,
    level: str,
    code: str | None,
) -> None:
    app = app_at(UNREACHABLE)
    app.suppress_sends(suppressed)

    @app.task("greet")
    def greet(name: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=name)

    sender = greet.with_options(transaction=transaction)
    for method, argument in (("send", secret), ("send_many", [greet.bind(cast("Any", secret))])):
        caplog.clear()
        error = call(app, sender, method, argument).unwrap_err()
        assert code in (None, error.code.value)
        sentence = f"a send of task 'greet' failed with {error.code.value}"
        assert send_failures(caplog) == [(level, sentence)]
        assert "s3cret" not in caplog.text
    app.close()


@pytest.mark.parametrize(
    ("transaction", "suppressed", "is_adopted", "level"),
    [
        (None, False, True, "WARNING"),
        (None, True, True, "WARNING"),
        (None, False, False, "WARNING"),
        (object(), False, True, "ERROR"),
    ],
    ids=["unreachable", "suppressed", "without an application", "transaction"],
)
def test_a_failed_start_of_a_workflow_is_logged_once_without_arguments(
    call: Call,
    caplog: pytest.LogCaptureFixture,
    transaction: object,
    suppressed: bool,
    is_adopted: bool,
    level: str,
) -> None:
    app = app_at(UNREACHABLE)
    app.suppress_sends(suppressed)

    @app.task("greet")
    def greet(name: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=name)

    nodes = [greet.node()(name="s3cret")]
    make: Any = app.workflow if is_adopted else WorkflowSpec
    spec = make("welcome", nodes, definition_key="first_hour.welcome")
    for target, method, argument in (
        (spec, "start", None),
        (horsies_package, "start_many", [spec]),
    ):
        caplog.clear()
        error = call(app, target, method, argument, transaction=transaction).unwrap_err()
        sentence = f"a start of workflow 'welcome' failed with {error.code.value}"
        assert send_failures(caplog) == [(level, sentence)]
        assert "s3cret" not in caplog.text
    app.close()
