"""Keys of sends: where they come from, what is stored, and what is refused."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from horsies import Debounce
from horsies.app import Horsies
from horsies.errors import TaskDefinitionError
from horsies.tasks.keys import lane_of
from horsies.tasks.request import TaskSendError, TaskSendErrorCode
from tests.support.applications import Call, Task
from tests.support.database import Database
from tests.support.rows import row_of


def stored_key(connection: Database, task_id: str) -> str | None:
    """The key of a task, after a look at its other columns."""
    row = row_of(connection, task_id)
    key = row["lane_key"]
    assert row["held"] is (key is not None)
    assert row["lane"] == (None if key is None else lane_of(row["queue_name"], key).number)
    return None if key is None else str(key)


@pytest.fixture
def sync(app: Horsies) -> Task:
    @app.task("sync", key="tenant")
    def sync(number: int, tenant: str = "nobody") -> None: ...

    return sync


def test_a_parameter_carries_the_key(
    app: Horsies, sync: Task, connection: Database, call: Call
) -> None:
    assert stored_key(connection, call(app, sync, "send", 1, "acme").unwrap().task_id) == "acme"
    named = call(app, sync, "send", 1, tenant="acme").unwrap()
    assert stored_key(connection, named.task_id) == "acme"
    assert stored_key(connection, call(app, sync, "send", 1).unwrap().task_id) == "nobody"


def test_a_function_computes_the_key(app: Horsies, connection: Database) -> None:
    @app.task("mail", key=lambda number, **_: f"account {number % 2}")
    def mail(number: int, text: str = "") -> None: ...

    assert stored_key(connection, mail.send(7, text="x").unwrap().task_id) == "account 1"


def test_a_send_chooses_its_own_key_or_none(sync: Task, add: Task, connection: Database) -> None:
    sent = sync.with_options(key="other").send(1, "acme").unwrap()
    assert stored_key(connection, sent.task_id) == "other"
    assert stored_key(connection, sync.with_options(key=None).send(1).unwrap().task_id) is None
    assert stored_key(connection, add.with_options(key="a\nb").send(1).unwrap().task_id) == "a\nb"
    assert stored_key(connection, add.send(1).unwrap().task_id) is None


def test_many_sends_have_a_key_each(sync: Task, add: Task, connection: Database) -> None:
    keys = [f"tenant\n{number}" for number in range(2_500)]
    handles = sync.send_many(sync.bind(1, key) for key in keys).unwrap()
    assert stored_key(connection, handles[7].task_id) == keys[7]
    found = connection.execute(
        "SELECT count(*) FROM horsies_tasks "
        "WHERE held AND lane = horsies_lane_v1(queue_name, lane_key) AND lane_key LIKE 'tenant%'"
    ).fetchall()
    assert found == [(2_500,)]
    (one,) = add.with_options(key="shared").send_many([add.bind(1)]).unwrap()
    assert stored_key(connection, one.task_id) == "shared"


def test_a_send_by_name_has_the_key_of_its_task(
    app: Horsies, sync: Task, connection: Database
) -> None:
    sent = app.send_by_name("sync", {"number": 1, "tenant": "acme"}).unwrap()
    assert stored_key(connection, sent.task_id) == "acme"


def test_a_repeated_send_keeps_its_key(sync: Task, connection: Database) -> None:
    request = sync._sender.prepare((1, "acme"), {}).unwrap().request
    error = TaskSendError(
        TaskSendErrorCode.ENQUEUE_FAILED, "lost", True, request.row.id, request.payload
    )
    assert stored_key(connection, sync.retry_send(error).unwrap().task_id) == "acme"


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (7, "parameter 'tenant', the key, must be a text, not int"),
        ("", "parameter 'tenant', the key, must have 1 to 255 characters, not 0"),
        ("x" * 256, "parameter 'tenant', the key, must have 1 to 255 characters, not 256"),
    ],
)
def test_a_bad_key_is_refused_with_its_parameter(
    app: Horsies, connection: Database, key: Any, sentence: str
) -> None:
    @app.task("sync", key="tenant")
    def sync(tenant: Any) -> None: ...

    for error in (
        sync.send(key).unwrap_err(),
        sync.send_many([sync.bind(key)]).unwrap_err(),
    ):
        assert error.code is TaskSendErrorCode.VALIDATION_FAILED
        assert error.message.endswith(f"Task 'sync' was not sent: {sentence}.")
    assert connection.execute("SELECT FROM horsies_tasks").rowcount == 0


@pytest.mark.parametrize("key", [7, "", "x" * 256, b"acme", "a\0", "\ud800"])
def test_a_bad_option_is_refused(add: Task, key: Any) -> None:
    error = add.with_options(key=key).send(1).unwrap_err()
    assert error.message.startswith("Task 'add' was not sent: key ")


def test_the_error_of_a_key_function_is_named_without_its_value(app: Horsies) -> None:
    def fails(secret: str) -> str:
        raise ValueError(secret)

    def nothing(secret: str) -> Any: ...

    @app.task("one", key=fails)
    def one(secret: str) -> None: ...

    @app.task("two", key=nothing)
    def two(secret: str) -> None: ...

    message = "Task 'one' was not sent: its key function fails raised ValueError."
    assert one.send("hush").unwrap_err().message == message
    message = "Task 'two' was not sent: the value of its key function nothing must be a text, not NoneType."
    assert two.send("hush").unwrap_err().message == message


@pytest.mark.parametrize("key", ["missing", "workflow_ctx", 7])
def test_a_key_that_no_caller_passes_is_refused_at_definition(app: Horsies, key: Any) -> None:
    with pytest.raises(TaskDefinitionError, match=r"must be one of its parameters or a function"):

        @app.task("sync", key=key)
        def sync(tenant: str, workflow_ctx: Any = None) -> None: ...


def test_a_debounced_send_with_another_key_is_a_mismatch(add: Task, connection: Database) -> None:
    slow = Debounce(quiet=timedelta(hours=1), at_most=timedelta(hours=3))
    options: dict[str, Any] = {"idempotency_key": "document", "debounce": slow}
    sent = add.with_options(**options, key="a").send(1).unwrap()
    assert add.with_options(**options, key="a").send(2).unwrap().task_id == sent.task_id
    error = add.with_options(**options, key="b").send(3).unwrap_err()
    assert error.code is TaskSendErrorCode.PAYLOAD_MISMATCH
    assert stored_key(connection, sent.task_id) == "a"


def send_sql(connection: Database, call: dict[str, Any]) -> str:
    (row,) = connection.execute(
        "SELECT horsies_send_many_v1(%s::jsonb)::text", (json.dumps([call]),)
    ).fetchall()
    return str(row[0])


def register(connection: Database, *, parameter: str | None, computes: bool = False) -> None:
    connection.execute(
        "INSERT INTO horsies_task_defaults (task_name, queue_name, queues, max_retries, is_async, burst, "
        "reject_bytes, key_parameter, computes_key) "
        "VALUES ('sync', 'default', '{\"default\": {\"priority\": 100}}', 0, false, false, 1000000, %s, %s)",
        (parameter, computes),
    )


def test_a_send_from_sql_has_the_key_of_its_task(connection: Database) -> None:
    register(connection, parameter="tenant")
    kwargs = {"tenant": "acme"}
    assert (
        stored_key(connection, send_sql(connection, {"task": "sync", "kwargs": kwargs})) == "acme"
    )
    given = {"task": "sync", "kwargs": kwargs, "key": "other"}
    assert stored_key(connection, send_sql(connection, given)) == "other"
    assert stored_key(connection, send_sql(connection, {**given, "key": None})) is None
    debounced = {**given, "debounce": {"quiet": 1, "at_most": 2}, "idempotency_key": "k"}
    assert stored_key(connection, send_sql(connection, debounced)) == "other"


@pytest.mark.parametrize(
    ("kwargs", "options", "sentence"),
    [
        ({}, {}, "argument 'tenant', the key of the task, must be a text of 1 to 255 characters"),
        ({"tenant": 7}, {}, "argument 'tenant', the key of the task, must be a text"),
        ({"tenant": "a"}, {"key": ""}, "key must be a text of 1 to 255 characters"),
        ({"tenant": "a"}, {"key": 7}, "key must be a text of 1 to 255 characters"),
    ],
)
def test_a_bad_key_from_sql_is_refused(
    connection: Database, kwargs: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    register(connection, parameter="tenant")
    with pytest.raises(Exception, match=sentence):
        send_sql(connection, {"task": "sync", "kwargs": kwargs, **options})


def test_a_computed_key_must_be_given_from_sql(connection: Database) -> None:
    register(connection, parameter=None, computes=True)
    with pytest.raises(Exception, match="Python code computes its key; give the option key"):
        send_sql(connection, {"task": "sync", "kwargs": {}})
    sent = send_sql(connection, {"task": "sync", "kwargs": {}, "key": "acme"})
    assert stored_key(connection, sent) == "acme"
