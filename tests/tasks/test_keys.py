"""Keys of sends: where they come from, what is stored, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from horsies import CustomQueueConfig, Debounce, PerKey, QueueMode, Rate
from horsies.app import Horsies
from horsies.db.statements.workers import register_defaults, store_lane_limits
from horsies.errors import ConfigurationError, InvalidFieldError, TaskDefinitionError
from horsies.tasks.keys import lane_of
from horsies.tasks.request import TaskSendError, TaskSendErrorCode
from horsies.worker.keyed import LimitsOfKeys
from horsies.worker.known_tasks import task_defaults
from tests.support.applications import Call, Task, app_at
from tests.support.database import Database
from tests.support.notifications import SENTINEL, Ears
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


def test_sends_with_ten_thousand_keys_notify_their_queue_once(
    sync: Task, connection: Database, process_url: str
) -> None:
    with closing(Ears(process_url, ("task_queue_default", SENTINEL))) as ears:
        sync.send_many(sync.bind(1, f"@{number}") for number in range(10_000)).unwrap()
        assert ears.heard() == [("task_queue_default", "@")]


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


@pytest.fixture
def ordered(process_url: str, connection: Database) -> Iterator[Horsies]:
    """An application with a fifo queue, as its workers register it."""
    queues = [
        CustomQueueConfig(name="orders", priority=7, per_key=PerKey(order="fifo")),
        CustomQueueConfig(name="others"),
    ]
    app = app_at(process_url, queue_mode=QueueMode.CUSTOM, custom_queues=queues)

    @app.task("sync", queue_name="orders", key="tenant")
    def sync(tenant: str) -> None: ...

    @app.task("rated", queue_name="orders", rate=Rate(count=100))
    def rated(tenant: str) -> None: ...

    @app.task("plain", queue_name="orders")
    def plain(tenant: str) -> None: ...

    register_defaults.run(connection, (task_defaults(app),))
    limits = LimitsOfKeys(app.config, app.definitions())
    assert limits.unstored is not None
    statement, values = store_lane_limits(limits.unstored, limits.queues)
    statement.run(connection, values)
    yield app
    app.close()


LATER = datetime(2035, 1, 1, tzinfo=UTC)
DEBOUNCE = Debounce(quiet=timedelta(seconds=2), at_most=timedelta(seconds=30))
# The options that choose a place, in Python and in SQL, and the one that the refusal names.
PLACES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"priority": 5}, {"priority": 5}, "priority"),
    ({"at": LATER}, {"at": LATER.isoformat()}, "at"),
    ({"delay": timedelta(seconds=2)}, {"delay": 2}, "delay"),
    (
        {"debounce": DEBOUNCE, "idempotency_key": "k"},
        {"debounce": {"quiet": 2, "at_most": 30}, "idempotency_key": "k"},
        "debounce",
    ),
    ({"delay": timedelta(seconds=2), "priority": 5}, {"delay": 2, "priority": 5}, "priority"),
]
ORDERED = "queue 'orders' runs the tasks of a key in the order of their sends; leave {} out."


def refusal_from_sql(connection: Database, *calls: dict[str, Any]) -> str | None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        connection.execute("SELECT horsies_send_many_v1(%s::jsonb)", (json.dumps(calls),))
    return caught.value.diag.message_primary


@pytest.mark.parametrize("name", ["sync", "rated"])
@pytest.mark.parametrize(("options", "given", "refused"), PLACES, ids=[one[2] for one in PLACES])
def test_a_task_with_a_key_cannot_choose_its_place_in_a_fifo_queue(
    ordered: Horsies,
    connection: Database,
    call: Call,
    name: str,
    options: dict[str, Any],
    given: dict[str, Any],
    refused: str,
) -> None:
    sentence = f"Task {name!r} was not sent: {ORDERED.format(refused)}"
    task = ordered.tasks[name].with_options(**options)
    error = call(ordered, task, "send", "acme").unwrap_err()
    assert (error.code, error.message) == (TaskSendErrorCode.VALIDATION_FAILED, sentence)
    if "debounce" not in options:
        calls = [ordered.tasks[name].bind("acme")]
        error = call(ordered, task, "send_many", calls).unwrap_err()
        assert error.message == f"Call 0 of send_many: {sentence}"
    by_sql = {"task": name, "kwargs": {"tenant": "acme"}, **given}
    assert refusal_from_sql(connection, by_sql) == sentence
    first = {"task": name, "kwargs": {"tenant": "acme"}}
    assert refusal_from_sql(connection, first, by_sql) == f"Call 1 of p_calls: {sentence}"
    assert connection.execute("SELECT FROM horsies_tasks").rowcount == 0


def test_a_task_with_a_key_cannot_be_scheduled_in_a_fifo_queue(
    ordered: Horsies, call: Call
) -> None:
    error = call(ordered, ordered.tasks["sync"], "schedule", 2, "acme").unwrap_err()
    assert error.message == f"Task 'sync' was not sent: {ORDERED.format('schedule')}"
    elsewhere = ordered.tasks["sync"].with_options(queue_name="others")
    assert call(ordered, elsewhere, "schedule", 2, "acme").is_ok()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("sync", {"key": None}, id="no key for this send"),
        pytest.param("rated", {"key": None}, id="no key for this send of a task with a rate"),
        pytest.param("plain", {}, id="no key"),
        pytest.param("sync", {"queue": "others"}, id="a queue without an order"),
    ],
)
def test_other_tasks_choose_their_place_from_python_and_from_sql(
    ordered: Horsies, connection: Database, name: str, more: dict[str, Any]
) -> None:
    options = {("queue_name" if key == "queue" else key): value for key, value in more.items()}
    sent = ordered.tasks[name].with_options(priority=5, **options).send("acme").unwrap()
    by_sql = {"task": name, "kwargs": {"tenant": "acme"}, "priority": 5, **more}
    rows = [row_of(connection, one) for one in (sent.task_id, send_sql(connection, by_sql))]
    assert [row["priority"] for row in rows] == [5, 5]
    assert rows[0]["lane_key"] == rows[1]["lane_key"]
    assert rows[0]["queue_name"] == rows[1]["queue_name"]


def test_a_key_chosen_for_one_send_keeps_the_order(ordered: Horsies, connection: Database) -> None:
    sentence = f"Task 'plain' was not sent: {ORDERED.format('priority')}"
    error = ordered.tasks["plain"].with_options(key="acme", priority=5).send("acme").unwrap_err()
    assert error.message == sentence
    by_sql = {"task": "plain", "kwargs": {"tenant": "acme"}, "key": "acme", "priority": 5}
    assert refusal_from_sql(connection, by_sql) == sentence
    assert refusal_from_sql(connection, {**by_sql, "queue": "orders"}) == sentence


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_concurrency": -1}, "max_concurrency"),
        ({"max_concurrency": True}, "max_concurrency"),
        ({"max_concurrency": 2**31}, "max_concurrency"),
        ({"max_concurrency": "2"}, "max_concurrency"),
        ({"weight": 0}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"weight": 100.5}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"order": "lifo"}, "order"),
        ({"order": "fifo", "on_failure": "stop"}, "on_failure"),
        ({"fair": True}, "fair"),
    ],
)
def test_a_limit_out_of_range_is_refused(limits: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        PerKey(**limits)


def test_only_a_fifo_queue_halts_after_a_failure() -> None:
    with pytest.raises(ConfigurationError, match='on_failure="halt" needs order="fifo"'):
        PerKey(on_failure="halt")
    assert PerKey(order="fifo", on_failure="halt").on_failure == "halt"
