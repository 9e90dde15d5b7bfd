"""Sending: exactly one row for a good call, one clear sentence and no row for a bad one."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

import pytest

from horsies.app import SUPPRESSION_VARIABLES, Horsies
from horsies.config.app import AppConfig, CustomQueueConfig, PayloadConfig, QueueMode
from horsies.config.postgres import PostgresConfig
from horsies.retry import RetryPolicy
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.handle import TaskHandle
from horsies.tasks.request import TaskSendError, TaskSendErrorCode, TaskSendResult
from tests.support.applications import Call, Task, add_task, run_closing, store_task
from tests.support.database import Database, backends
from tests.support.rows import stored, stored_ids
from tests.support.wait import wait_until

SECRET = "open sesame"


def refused(sent: TaskSendResult[Any], code: TaskSendErrorCode) -> TaskSendError:
    """Check that the send was refused as not retryable, and return its error."""
    error = sent.unwrap_err()
    assert error.code is code
    assert not error.retryable
    assert "\n" not in error.message
    assert error.message.endswith(".")
    return error


# The stored row of a send


def test_a_send_stores_exactly_one_pending_row(
    app: Horsies, add: Task, connection: Database
) -> None:
    before = datetime.now(UTC)
    handle = add.send(1, b=2).unwrap()
    (row,) = stored(connection)
    times = {name: row.pop(name) for name in ("sent_at", "enqueued_at", "created_at", "updated_at")}
    assert times["enqueued_at"] == times["created_at"] == times["updated_at"]
    assert before <= times["sent_at"] <= datetime.now(UTC)
    assert re.fullmatch("[0-9a-f]{64}", row.pop("enqueue_sha"))
    assert str(row.pop("id")) == handle.task_id
    assert json.loads(row.pop("task_options")) == {"retry_policy": None, "good_until": None}
    filled = {name: value for name, value in row.items() if value is not None}
    assert filled == {
        "task_name": "add",
        "queue_name": "default",
        "priority": 100,
        "args": "[1]",
        "kwargs": '{"b":2}',
        "status": "PENDING",
        "claimed": False,
        "retry_count": 0,
        "max_retries": 0,
        "generation": 0,
        "held": False,
        "burst": False,
    }


def test_both_faces_of_send_store_a_task_and_return_its_handle(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = call(app, add, "send", 1, 2).unwrap()
    assert isinstance(handle, TaskHandle)
    assert stored_ids(connection) == [handle.task_id]
    assert repr(handle) == f"TaskHandle('{handle.task_id}')"


def test_a_task_without_arguments_stores_an_empty_list_and_object(
    app: Horsies, connection: Database
) -> None:
    def tick() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    app.task("tick")(tick).send().unwrap()
    (row,) = stored(connection)
    assert (row["args"], row["kwargs"]) == ("[]", "{}")


def test_the_row_carries_the_snapshot_of_policy_and_time_limit(
    app: Horsies, connection: Database
) -> None:
    policy = RetryPolicy.fixed([5, 10], auto_retry_for=["GATEWAY_DOWN"], jitter=False)
    add_task(app, retry_policy=policy, timeout_ms=1500).send(1).unwrap()
    (row,) = stored(connection)
    assert row["max_retries"] == 2
    assert row["timeout_ms"] == 1500
    assert RetryPolicy.from_json(json.loads(row["task_options"])["retry_policy"]) == policy


def test_a_task_goes_to_its_queue_with_the_priority_of_the_queue(
    process_url: str, connection: Database
) -> None:
    config = AppConfig(
        broker=PostgresConfig(database_url=process_url, pool_size=1),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[CustomQueueConfig(name="mail", priority=7)],
    )
    app = Horsies(config)
    add_task(app, queue_name="mail").send(1).unwrap()
    app.close()
    (row,) = stored(connection)
    assert (row["queue_name"], row["priority"]) == ("mail", 7)


def test_ids_of_later_sends_sort_later(app: Horsies, add: Task, connection: Database) -> None:
    sent = [add.send(n).unwrap().task_id for n in range(3)]
    assert sorted(task_id[:13] for task_id in sent) == [task_id[:13] for task_id in sent]


def test_two_equal_sends_are_two_tasks(app: Horsies, add: Task, connection: Database) -> None:
    assert add.send(1).unwrap().task_id != add.send(1).unwrap().task_id
    first, second = stored(connection)
    assert first["enqueue_sha"] != second["enqueue_sha"]


def test_postgresql_plus_psycopg_urls_work(process_url: str, connection: Database) -> None:
    url = process_url.replace("postgresql://", "postgresql+psycopg://")
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=url, pool_size=1)))
    assert add_task(app).send(1).is_ok()
    app.close()


def test_the_first_send_creates_the_tables(database_url: str) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=database_url, pool_size=1)))
    assert add_task(app).send(1).is_ok()
    app.close()


# Bad calls


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((), {}, "'a' is missing"),
        ((1, 2, 3), {}, "3 positional arguments"),
        ((1,), {"a": 1}, "'a' is given twice"),
        ((1,), {"c": 1}, "no parameter 'c'"),
        (("1",), {}, "a must be int"),
        ((1,), {"b": 2.5}, "b must be int"),
        ((True,), {}, "a must be int"),
        ((None,), {}, "a must be int"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_refused(
    app: Horsies,
    add: Task,
    connection: Database,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    named: str,
) -> None:
    sent = call(app, add, "send", *args, **kwargs)
    error = refused(sent, TaskSendErrorCode.VALIDATION_FAILED)
    assert named in error.message
    assert "'add'" in error.message
    assert stored(connection) == []


class Deaf:
    """Something JSON has no form for."""

    def __repr__(self) -> str:
        return "Deaf()"


@pytest.mark.parametrize(
    ("value", "place", "fault"),
    [
        (math.nan, "value", "NaN"),
        ([1, {"deep": -math.inf}], "value[1].deep", "infinite"),
        ("a\0b", "value", "NUL"),
        ({"key\0": 1}, "value", "NUL"),
        ("\ud800", "value", "surrogate"),
        ({"\udfff": 1}, "value", "surrogate"),
        ({1: "a", "1": "b"}, "value", "same text"),
        ({"in": {None: 1, "None": 2}}, "value.in", "same text"),
        (Deaf(), "value", "cannot be written as JSON"),
    ],
    ids=ascii,
)
def test_a_value_that_would_not_come_back_is_refused_with_its_place(
    app: Horsies, connection: Database, value: Any, place: str, fault: str
) -> None:
    error = refused(store_task(app).send(value), TaskSendErrorCode.VALIDATION_FAILED)
    assert place in error.message
    assert fault in error.message
    assert stored(connection) == []


def test_a_structure_that_contains_itself_is_refused(app: Horsies, connection: Database) -> None:
    value: list[Any] = []
    value.append(value)
    refused(store_task(app).send(value), TaskSendErrorCode.VALIDATION_FAILED)
    assert stored(connection) == []


def test_refusals_never_show_the_arguments(app: Horsies, connection: Database) -> None:
    def login(name: str, password: int) -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    sent = app.task("login")(login).send(SECRET, SECRET)  # type: ignore[arg-type]
    error = refused(sent, TaskSendErrorCode.VALIDATION_FAILED)
    assert SECRET not in f"{error.message}{error!r}{error}"


def test_every_parameter_name_can_be_sent_by_keyword(app: Horsies, connection: Database) -> None:
    def odd(self: int, args: int, options: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=self + args + options)

    task: Any = app.task("odd")(odd)
    assert task.send(self=1, args=2, options=3).is_ok()
    assert task.with_options(priority=1).send(self=1, args=2, options=3).is_ok()
    assert task.schedule(0, self=1, args=2, options=3).is_ok()
    assert task.send_many([task.bind(self=1, args=2, options=3)]).is_ok()
    assert task(self=1, args=2, options=3).ok_value == 6


# Sizes


def limited_app(url: str, **limits: Any) -> Horsies:
    config = PostgresConfig(database_url=url, pool_size=1)
    return Horsies(AppConfig(broker=config, payload=PayloadConfig(**limits)))


def test_arguments_above_the_limit_are_refused(process_url: str, connection: Database) -> None:
    app = limited_app(process_url, warn_bytes=10, reject_bytes=100)
    store = store_task(app)
    assert store.send("x" * 94).is_ok()  # with brackets, quotes and the empty object: 100 bytes
    error = refused(store.send("x" * 95), TaskSendErrorCode.PAYLOAD_TOO_LARGE)
    assert "101 bytes" in error.message
    assert "reject_bytes" in error.message
    assert len(stored(connection)) == 1
    app.close()


def test_the_limit_counts_bytes_and_not_characters(process_url: str, connection: Database) -> None:
    app = limited_app(process_url, warn_bytes=10, reject_bytes=100)
    refused(store_task(app).send("é" * 50), TaskSendErrorCode.PAYLOAD_TOO_LARGE)
    app.close()


def test_large_arguments_are_sent_with_a_warning_that_does_not_show_them(
    process_url: str, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    app = limited_app(process_url, warn_bytes=50, reject_bytes=None)
    with caplog.at_level(logging.WARNING, "horsies.send"):
        store_task(app).send(SECRET * 10).unwrap()
    assert "'store'" in caplog.text
    assert "116 bytes" in caplog.text
    assert SECRET not in caplog.text
    app.close()


# Options


class BrokenZone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        return timedelta(days=2)

    def dst(self, _: datetime | None) -> None: ...

    def tzname(self, _: datetime | None) -> None: ...

    def __repr__(self) -> str:
        return "BrokenZone()"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"good_until": datetime(2030, 1, 1)}, "no time zone"),
        ({"good_until": "2030-01-01"}, "is not a datetime"),
        ({"good_until": 5}, "is not a datetime"),
        ({"good_until": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))}, "in UTC"),
        ({"good_until": datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))}, "in UTC"),
        ({"good_until": datetime(2030, 1, 1, tzinfo=BrokenZone())}, "in UTC"),
        ({"priority": 0}, "from 1"),
        ({"priority": 101}, "from 1"),
        ({"priority": True}, "from 1"),
        ({"priority": 5.0}, "from 1"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "x" * 256}, "idempotency_key"),
        ({"idempotency_key": "a\0"}, "idempotency_key"),
        ({"idempotency_key": "\ud800"}, "idempotency_key"),
        ({"idempotency_key": 5}, "idempotency_key"),
    ],
    ids=ascii,
)
def test_a_bad_option_is_refused(
    app: Horsies, add: Task, connection: Database, options: dict[str, Any], fault: str
) -> None:
    error = refused(add.with_options(**options).send(1), TaskSendErrorCode.VALIDATION_FAILED)
    assert fault in error.message
    refused(add.with_options(**options).send_many([]), TaskSendErrorCode.VALIDATION_FAILED)
    assert stored(connection) == []


def test_a_deadline_is_stored_in_its_column_and_in_the_snapshot(
    app: Horsies, add: Task, connection: Database
) -> None:
    deadline = datetime(2999, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    add.with_options(good_until=deadline).send(1).unwrap()
    (row,) = stored(connection)
    assert row["good_until"] == deadline
    assert datetime.fromisoformat(json.loads(row["task_options"])["good_until"]) == deadline


def test_a_deadline_that_is_already_past_is_accepted(
    app: Horsies, add: Task, connection: Database
) -> None:
    assert add.with_options(good_until=datetime(2001, 1, 1, tzinfo=UTC)).send(1).is_ok()


def test_none_means_no_deadline(app: Horsies, add: Task, connection: Database) -> None:
    add.with_options(good_until=None).send(1).unwrap()
    (row,) = stored(connection)
    assert row["good_until"] is None
    assert json.loads(row["task_options"])["good_until"] is None


def test_options_belong_to_one_send_and_not_to_the_task(
    app: Horsies, add: Task, connection: Database
) -> None:
    add.with_options(priority=3).send(1).unwrap()
    add.send(2).unwrap()
    assert [row["priority"] for row in stored(connection)] == [3, 100]


# Delays


def test_a_scheduled_task_is_due_after_the_delay_on_the_clock_of_the_database(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    call(app, add, "schedule", 90, 1, b=2).unwrap()
    (row,) = stored(connection)
    assert row["enqueued_at"] - row["created_at"] == timedelta(seconds=90)
    assert (row["args"], row["kwargs"]) == ("[1]", '{"b":2}')


def test_a_delay_may_be_a_fraction_or_zero(app: Horsies, add: Task, connection: Database) -> None:
    add.schedule(0.25, 1).unwrap()
    add.with_options(priority=1).schedule(0, 1).unwrap()
    delays = [row["enqueued_at"] - row["created_at"] for row in stored(connection)]
    assert delays == [timedelta(seconds=0.25), timedelta(0)]


@pytest.mark.parametrize("delay", [-1, math.nan, math.inf, "5", True, None, 10**400, 4e9])
def test_a_bad_delay_is_refused(
    app: Horsies, add: Task, connection: Database, call: Call, delay: Any
) -> None:
    sent = call(app, add, "schedule", delay, 1)
    error = refused(sent, TaskSendErrorCode.VALIDATION_FAILED)
    assert "delay_seconds" in error.message
    assert stored(connection) == []


# Event loops


def test_a_synchronous_send_inside_a_running_loop_works(
    app: Horsies, add: Task, connection: Database
) -> None:
    async def main() -> TaskSendResult[Any]:
        return add.send(1)

    assert run_closing(app, main()).is_ok()
    assert len(stored(connection)) == 1


def test_many_first_sends_at_once_on_one_loop_all_succeed(
    app: Horsies, add: Task, connection: Database
) -> None:
    async def main() -> list[TaskSendResult[Any]]:
        return await asyncio.gather(*(add.send_async(n) for n in range(50)))

    assert all(sent.is_ok() for sent in run_closing(app, main()))
    assert len(stored(connection)) == 50


def test_loops_that_come_and_go_leave_no_connections_behind(
    app: Horsies, add: Task, connection: Database
) -> None:
    for n in range(10):
        asyncio.run(add.send_async(n)).unwrap()
    run_closing(app, add.send_async(10)).unwrap()
    assert len(stored(connection)) == 11
    wait_until(lambda: not backends(connection, "horsies:producer"))


# Suppression


@pytest.mark.parametrize(
    "method", ["send", "schedule", "send_many", "retry_send", "retry_schedule"]
)
def test_suppressed_sends_store_nothing_and_say_so(
    app: Horsies, add: Task, connection: Database, call: Call, method: str
) -> None:
    app.suppress_sends()
    arguments: dict[str, tuple[Any, ...]] = {
        "send": (1,),
        "schedule": (5, 1),
        "send_many": ([add.bind(1)],),
    }
    failed = TaskSendError(TaskSendErrorCode.ENQUEUE_FAILED, "no", retryable=True)
    sent = call(app, add, method, *arguments.get(method, (failed,)))
    error = refused(sent, TaskSendErrorCode.SEND_SUPPRESSED)
    assert (error.task_id, error.payload) == (None, None)
    assert stored(connection) == []
    app.suppress_sends(False)
    assert add.send(1).is_ok()


@pytest.mark.parametrize("variable", SUPPRESSION_VARIABLES)
def test_the_environment_can_suppress_sends(
    app: Horsies,
    add: Task,
    connection: Database,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.setenv(variable, "1")
    assert app.are_sends_suppressed()
    refused(add.send(1), TaskSendErrorCode.SEND_SUPPRESSED)
    monkeypatch.setenv(variable, "0")
    assert add.send(1).is_ok()


def test_sends_at_import_time_are_suppressed_and_allowed_again_after_a_failing_import(
    app: Horsies, add: Task, connection: Database, tmp_path: Path
) -> None:
    module = tmp_path / "sends_and_fails.py"
    module.write_text(
        "from tests.tasks import test_send\n"
        "test_send.seen.append(test_send.task_to_send[0].send(1))\n"
        "raise ValueError('broken module')\n"
    )
    seen.clear()
    task_to_send[:] = [add]
    app.discover_tasks([str(module)])
    assert len(app.check()) == 1
    refused(seen[0], TaskSendErrorCode.SEND_SUPPRESSED)
    assert not app.are_sends_suppressed()
    assert add.send(1).is_ok()


seen: list[TaskSendResult[Any]] = []
task_to_send: list[Task] = []
