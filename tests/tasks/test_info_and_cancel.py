"""Describing and cancelling tasks by handle and by id."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar, cast

import psycopg
import pytest

from horsies.app import Horsies
from horsies.db.statement import Script
from horsies.error_codes import OutcomeCode, RetrievalCode
from horsies.ids import new_id
from horsies.retry import RetryPolicy
from horsies.states import TASK_TERMINAL_STATES, TaskAttemptOutcome, TaskStatus
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.handle import (
    TaskActionErrorCode,
    TaskCancelled,
    TaskHandle,
    TaskInfo,
    info_script,
)
from tests.support.applications import Call, Task, app_at
from tests.support.database import Database
from tests.support.rows import add_task, ago, finish, stored

T = TypeVar("T")

REASON = "killed by SIGKILL"


def set_status(connection: Database, status: str) -> None:
    connection.execute(
        "UPDATE horsies_tasks SET status = %s, claimed_by_worker_id = 'w1'", (status,)
    )


# Info


@pytest.fixture
def troubled(add: Task, connection: Database) -> TaskHandle[Any]:
    """A task that failed at its second attempt."""
    handle = add.send(1).unwrap()
    connection.execute(
        "UPDATE horsies_tasks SET status = 'FAILED', retry_count = 1, max_retries = 1, "
        "started_at = now(), failed_at = now(), result = %s, failed_reason = %s, "
        "error_code = 'DECLINED', worker_pid = 42, worker_hostname = 'host', "
        "worker_process_name = 'worker-42'",
        ('{"err":{"error_code":"DECLINED","message":"no","data":null,"exception":null}}', REASON),
    )
    for attempt, outcome in ((1, "WORKER_FAILURE"), (2, "FAILED")):
        connection.execute(
            "INSERT INTO horsies_task_attempts (task_id, attempt, outcome, will_retry, "
            "finished_at, error_code, worker_id, worker_pid) "
            "VALUES (%s, %s, %s, %s, now(), 'DECLINED', 'w1', 42)",
            (handle.task_id, attempt, outcome, attempt == 1),
        )
    return handle


def test_info_of_a_task_without_a_limit_of_retries(app: Horsies, call: Call) -> None:
    @app.task("endless", retry_policy=RetryPolicy.forever(auto_retry_for=["AWAY"]))
    def endless() -> None: ...

    info: TaskInfo = call(app, endless.enqueue(), "info").unwrap()
    assert info.max_retries is None
    assert info.to_dict()["max_retries"] is None


def test_info_of_a_task_that_waits(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    info: TaskInfo = call(app, handle, "info").unwrap()
    (row,) = stored(connection)
    assert (info.task_id, info.task_name, info.status) == (
        handle.task_id,
        "add",
        TaskStatus.PENDING,
    )
    assert (info.queue_name, info.priority) == ("default", 100)
    assert (info.retry_count, info.max_retries, info.next_retry_at) == (0, 0, None)
    assert (info.sent_at, info.enqueued_at) == (row["sent_at"], row["enqueued_at"])
    assert info.claimed_at is info.started_at is info.completed_at is info.failed_at is None
    worker = (info.worker_hostname, info.worker_pid, info.worker_process_name)
    assert worker == (None, None, None)
    outcome = (info.result, info.failed_reason, info.attempts, info.error_code)
    assert outcome == (None, None, None, None)


def test_info_leaves_out_what_is_not_asked_for(
    app: Horsies, troubled: TaskHandle[Any], call: Call
) -> None:
    info = call(app, troubled, "info").unwrap()
    assert info.status is TaskStatus.FAILED
    assert (info.error_code, info.worker_pid) == ("DECLINED", 42)
    assert info.result is info.failed_reason is info.attempts is None


def test_info_includes_what_is_asked_for(
    app: Horsies, troubled: TaskHandle[Any], call: Call
) -> None:
    info = call(app, troubled, "info", include_result=True).unwrap()
    assert info.result.err_value.error_code == "DECLINED"
    assert info.failed_reason is info.attempts is None
    info = call(app, troubled, "info", include_failed_reason=True).unwrap()
    assert (info.failed_reason, info.result) == (REASON, None)
    info = call(app, troubled, "info", include_attempts=True).unwrap()
    assert [attempt.attempt for attempt in info.attempts] == [2, 1]
    assert [attempt.outcome for attempt in info.attempts] == [
        TaskAttemptOutcome.FAILED,
        TaskAttemptOutcome.WORKER_FAILURE,
    ]
    assert [attempt.will_retry for attempt in info.attempts] == [False, True]
    assert info.attempts[0].worker_pid == 42
    document = asdict(info)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["FAILED", "WORKER_FAILURE"]


def test_a_task_without_attempts_has_an_empty_list(
    app: Horsies, add: Task, connection: Database
) -> None:
    info = add.send(1).unwrap().info(include_attempts=True).unwrap()
    assert info is not None
    assert info.attempts == []


def test_info_by_id_is_the_same(app: Horsies, troubled: TaskHandle[Any], call: Call) -> None:
    parts = ("include_result", "include_failed_reason", "include_attempts")
    everything = dict.fromkeys(parts, True)
    by_id = call(app, app, "get_task_info", troubled.task_id, **everything).unwrap()
    assert by_id == call(app, troubled, "info", **everything).unwrap()


def test_there_is_no_info_about_an_unknown_task(
    app: Horsies, connection: Database, call: Call
) -> None:
    assert call(app, app, "get_task_info", new_id()).unwrap() is None


def test_an_unreadable_result_does_not_spoil_the_rest(
    app: Horsies, add: Task, connection: Database
) -> None:
    handle = add.send(1).unwrap()
    finish(connection, handle.task_id, "garbage")
    info = handle.info(include_result=True).unwrap()
    assert info is not None
    assert info.result is not None
    assert info.result.is_err()


def test_info_without_a_database_is_an_error_value(call: Call) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    error = call(app, app, "get_task_info", new_id()).unwrap_err()
    assert error.code is BrokerErrorCode.TASK_INFO_QUERY_FAILED
    assert error.retryable
    assert "No server listens" in error.message
    app.close()


def test_a_handle_without_broker_knows_nothing_and_does_nothing(call: Call) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    handle: TaskHandle[int] = TaskHandle(new_id(), None)
    assert call(app, handle, "info").unwrap_err().code is BrokerErrorCode.NO_BROKER
    error = call(app, handle, "cancel").unwrap_err()
    assert error.code is TaskActionErrorCode.DB_OPERATION_FAILED
    app.close()


# Cancel


@pytest.fixture
def cancel_listener(process_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN horsies_cancel")
        yield listener


@pytest.mark.parametrize("status", ["PENDING", "CLAIMED"])
def test_a_task_that_has_not_started_is_cancelled_at_once(
    app: Horsies, add: Task, connection: Database, call: Call, status: str
) -> None:
    handle = add.send(1).unwrap()
    set_status(connection, status)
    cancelled = call(app, handle, "cancel").unwrap()
    assert cancelled == TaskCancelled(handle.task_id, TaskStatus(status))
    (row,) = stored(connection)
    assert (row["status"], row["error_code"]) == ("CANCELLED", "TASK_CANCELLED")
    assert row["failed_at"] is not None
    result = call(app, handle, "get", timeout_ms=30_000)
    assert result.err_value.error_code is OutcomeCode.TASK_CANCELLED


def test_whoever_waits_for_a_cancelled_task_is_told(
    app: Horsies, add: Task, connection: Database
) -> None:
    app.get_broker().waiters._poll_seconds = 600.0
    handle = add.send(1).unwrap()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(handle.get, 20_000)
        app.cancel_task(handle.task_id).unwrap()
        assert waiting.result().err_value.error_code is OutcomeCode.TASK_CANCELLED


def test_a_running_task_is_asked_to_stop(
    app: Horsies,
    add: Task,
    connection: Database,
    call: Call,
    cancel_listener: psycopg.Connection[Any],
) -> None:
    handle = add.send(1).unwrap()
    set_status(connection, "RUNNING")
    assert call(app, handle, "cancel").unwrap().was_status is TaskStatus.RUNNING
    (row,) = stored(connection)
    assert row["status"] == "RUNNING"
    assert row["cancel_requested_at"] is not None
    (note,) = cancel_listener.notifies(timeout=30, stop_after=1)
    assert note.payload == handle.task_id
    look = call(app, handle, "get", timeout_ms=0)
    assert look.err_value.error_code is RetrievalCode.RESULT_NOT_READY


def test_a_running_task_is_left_alone_when_asked_for(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    set_status(connection, "RUNNING")
    error = call(app, handle, "cancel", include_running=False).unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_NOT_CANCELLABLE
    assert error.current_status is TaskStatus.RUNNING
    assert stored(connection)[0]["cancel_requested_at"] is None


@pytest.mark.parametrize("status", sorted(TASK_TERMINAL_STATES))
def test_what_has_ended_cannot_be_cancelled(
    app: Horsies, add: Task, connection: Database, call: Call, status: str
) -> None:
    handle = add.send(1).unwrap()
    finish(connection, handle.task_id, status=status)
    before = stored(connection)
    error = call(app, handle, "cancel").unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_NOT_CANCELLABLE
    assert error.current_status is TaskStatus(status)
    assert status in error.message
    assert stored(connection) == before


@pytest.mark.parametrize("task_id", ["01900000-0000-7000-8000-000000000000", "no id", None])
def test_an_unknown_task_cannot_be_cancelled(
    app: Horsies, connection: Database, call: Call, task_id: Any
) -> None:
    error = call(app, app, "cancel_task", task_id).unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_NOT_FOUND
    assert not error.retryable


def test_of_two_cancels_one_takes_effect(app: Horsies, add: Task, connection: Database) -> None:
    handle = add.send(1).unwrap()
    with ThreadPoolExecutor(5) as threads:
        done = list(threads.map(lambda _: handle.cancel(), range(5)))
    assert sum(one.is_ok() for one in done) == 1


def test_cancel_without_a_database_is_an_error_value(call: Call) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    error = call(app, app, "cancel_task", new_id()).unwrap_err()
    assert error.code is TaskActionErrorCode.DB_OPERATION_FAILED
    assert error.retryable
    app.close()


def test_progress_is_never_that_of_an_attempt_the_task_has_not_begun(connection: Database) -> None:
    task_id = add_task(connection, started_at=ago(3), retry_count=1)
    script = info_script(task_id, None, False, False, False)
    statement, params = next(script)
    waiting = statement.run(connection, params)
    connection.execute("UPDATE horsies_tasks SET status = 'RUNNING' WHERE id = %s", (task_id,))
    connection.execute(
        "INSERT INTO horsies_task_progress (task_id, attempt, done, reported_at) VALUES (%s, 2, 1, now())",
        (task_id,),
    )
    info = _go_on(script, waiting, connection)
    assert info is not None
    assert info.progress is not None
    assert (info.status, info.progress.attempt) == (TaskStatus.RUNNING, 2)


def _go_on(script: Script[T], rows: list[Any], connection: Database) -> T:
    """Run the rest of a script, whose last statement has returned these rows."""
    try:
        while True:
            statement, params = script.send(rows)
            rows = statement.run(connection, params)
    except StopIteration as ended:
        return cast(T, ended.value)
