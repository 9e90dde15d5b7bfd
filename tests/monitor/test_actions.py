"""Pausing and resuming queues, and sending a finished request again."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from horsies import BrokerErrorCode, Horsies, TaskActionErrorCode, TaskStatus
from horsies.config.app import AppConfig, CustomQueueConfig, QueueMode
from horsies.config.postgres import PostgresConfig
from horsies.ids import new_id
from tests.support.applications import Call
from tests.support.database import Database
from tests.support.rows import UNKNOWN_ID, add_task, ago, picture, row_of

# The same in every test process, or they would not agree on the names of the tests.

UNREACHABLE = "postgresql://app:hunter2@127.0.0.1:1/shop"


@pytest.fixture
def shop(process_url: str, connection: Database) -> Horsies:
    """An application with its own queues."""
    queues = [CustomQueueConfig(name="mail"), CustomQueueConfig(name="reports")]
    broker = PostgresConfig(database_url=process_url, pool_size=1, max_overflow=4)
    return Horsies(AppConfig(broker=broker, queue_mode=QueueMode.CUSTOM, custom_queues=queues))


def paused(connection: Database) -> dict[str, bool]:
    found = connection.execute("SELECT queue_name, paused_at IS NOT NULL FROM horsies_queues")
    return dict(found.fetchall())


def test_a_queue_is_paused_and_resumed_in_the_database(
    shop: Horsies, connection: Database, call: Call
) -> None:
    first = call(shop, shop, "pause_queue", "mail").unwrap()
    assert (first.name, first.is_paused) == ("mail", True)
    again = call(shop, shop, "pause_queue", "mail").unwrap()
    assert again.paused_at == first.paused_at
    assert paused(connection) == {"mail": True}
    resumed = call(shop, shop, "resume_queue", "mail").unwrap()
    assert (resumed.name, resumed.paused_at) == ("mail", None)
    call(shop, shop, "resume_queue", "reports").unwrap()
    assert paused(connection) == {"mail": False, "reports": False}
    shop.close()


def test_resuming_wakes_the_workers_of_that_queue(
    shop: Horsies, process_url: str, call: Call
) -> None:
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute('LISTEN "task_queue_mail"')
        listener.execute('LISTEN "task_queue_reports"')
        call(shop, shop, "pause_queue", "mail").unwrap()
        call(shop, shop, "resume_queue", "mail").unwrap()
        heard = [note.channel for note in listener.notifies(timeout=30, stop_after=1)]
    shop.close()
    assert heard == ["task_queue_mail"]


@pytest.mark.parametrize("method", ["pause_queue", "resume_queue"])
@pytest.mark.parametrize("name", ["mial", "", "Mail", "x" * 200, "mail\0"])
def test_a_queue_the_application_does_not_have_is_refused(
    shop: Horsies, connection: Database, call: Call, method: str, name: str
) -> None:
    error = call(shop, shop, method, name).unwrap_err()
    assert error.code is BrokerErrorCode.UNKNOWN_QUEUE
    assert "mail, reports" in error.message
    assert paused(connection) == {}
    shop.close()


def test_the_one_queue_of_default_mode_can_be_paused(app: Horsies, connection: Database) -> None:
    app.pause_queue("default").unwrap()
    assert paused(connection) == {"default": True}


ENDED = [TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.EXPIRED]
COPIED = ("task_name", "queue_name", "priority", "args", "kwargs", "max_retries", "task_options")


@pytest.mark.parametrize("status", ENDED)
def test_a_finished_request_is_sent_again_as_a_new_task(
    app: Horsies, connection: Database, call: Call, status: TaskStatus
) -> None:
    old = add_task(
        connection,
        status=status.value,
        task_name="charge",
        queue_name="payments",
        priority=7,
        args='[{"card": 1}]',
        kwargs='{"a": 2}',
        max_retries=3,
        retry_count=3,
        generation=4,
        timeout_ms=5000,
        task_options='{"retry_policy":null,"good_until":null}',
        idempotency_key="order-1",
        idempotency_sha="sha",
        error_code="GATEWAY_DOWN",
        failed_reason="no",
        result='{"err": 1}',
        worker_pid=7,
        claimed_by_worker_id="w",
        started_at=ago(50),
    )
    before = picture(connection, old)
    retried = call(app, app, "retry_task", old).unwrap()
    assert picture(connection, old) == before
    assert (retried.retried_from_task_id, retried.was_status) == (old, status)
    first, second = row_of(connection, old), row_of(connection, retried.task_id)
    assert {name: second[name] for name in COPIED} == {name: first[name] for name in COPIED}
    assert (second["status"], second["retried_from_task_id"]) == ("PENDING", old)
    assert (second["generation"], second["retry_count"], second["timeout_ms"]) == (0, 0, 5000)
    assert second["enqueued_at"] > first["enqueued_at"]
    assert second["sent_at"] is not None
    for name in ("idempotency_key", "error_code", "failed_reason", "result", "worker_pid"):
        assert second[name] is None
    for name in ("claimed_by_worker_id", "started_at", "cancel_requested_at"):
        assert second[name] is None


@pytest.mark.parametrize(("seconds", "kept"), [(60, False), (-600, True)])
def test_a_deadline_is_kept_only_while_it_lies_ahead(
    app: Horsies, connection: Database, seconds: int, kept: bool
) -> None:
    old = add_task(connection, status="FAILED", good_until=ago(seconds))
    new = app.retry_task(old).unwrap().task_id
    deadline = row_of(connection, new)["good_until"]
    assert deadline == (row_of(connection, old)["good_until"] if kept else None)


def test_a_retried_task_can_be_retried_and_remembers_its_own_origin(
    app: Horsies, connection: Database
) -> None:
    first = add_task(connection, status="FAILED")
    second = app.retry_task(first).unwrap().task_id
    connection.execute("UPDATE horsies_tasks SET status = 'FAILED' WHERE id = %s", (second,))
    third = app.retry_task(second).unwrap().task_id
    assert row_of(connection, third)["retried_from_task_id"] == second


def test_workers_hear_of_a_retry_as_of_any_new_task(
    app: Horsies, connection: Database, process_url: str
) -> None:
    old = add_task(connection, status="FAILED", queue_name="mail")
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute('LISTEN "task_queue_mail"')
        app.retry_task(old).unwrap()
        assert [note.channel for note in listener.notifies(timeout=30, stop_after=1)]


@pytest.mark.parametrize("status", ["PENDING", "CLAIMED", "RUNNING"])
def test_a_task_that_may_still_run_is_not_sent_again(
    app: Horsies, connection: Database, call: Call, status: str
) -> None:
    task_id = add_task(connection, status=status)
    error = call(app, app, "retry_task", task_id).unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_NOT_RETRYABLE
    assert error.current_status is TaskStatus(status)
    assert count(connection) == 1


def test_a_task_of_a_workflow_is_not_sent_again(
    app: Horsies, connection: Database, call: Call
) -> None:
    task_id = add_task(connection, status="FAILED", workflow_id=new_id())
    error = call(app, app, "retry_task", task_id).unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_IS_WORKFLOW_TASK
    assert count(connection) == 1


@pytest.mark.parametrize("task_id", [UNKNOWN_ID, "nonsense", "", "1; DROP TABLE horsies_tasks"])
def test_a_task_that_does_not_exist_cannot_be_sent_again(
    app: Horsies, call: Call, task_id: str
) -> None:
    error = call(app, app, "retry_task", task_id).unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_NOT_FOUND
    assert task_id in error.message


def test_suppressed_sends_suppress_retries(app: Horsies, connection: Database, call: Call) -> None:
    task_id = add_task(connection, status="FAILED")
    app.suppress_sends()
    error = call(app, app, "retry_task", task_id).unwrap_err()
    assert error.code is TaskActionErrorCode.SEND_SUPPRESSED
    assert count(connection) == 1


def test_a_lost_answer_names_the_task_that_may_have_been_stored(call: Call) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=UNREACHABLE)))
    error = call(app, app, "retry_task", new_id()).unwrap_err()
    assert error.retryable
    assert "check before you try again" in error.message
    assert "hunter2" not in error.message


def count(connection: Database) -> Any:
    found = connection.execute("SELECT count(*) FROM horsies_tasks").fetchone()
    assert found is not None
    return found[0]


def test_options_are_copied_as_they_are_even_when_they_cannot_be_read(
    app: Horsies, connection: Database
) -> None:
    old = add_task(connection, status="FAILED", task_options="{broken")
    assert row_of(connection, app.retry_task(old).unwrap().task_id)["task_options"] == "{broken"
