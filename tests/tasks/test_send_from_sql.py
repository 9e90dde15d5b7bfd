"""horsies_send_v1 and horsies_send_many_v1: the same rows and refusals as sends in Python."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from horsies import RetryPolicy, TaskResult
from horsies.app import Horsies
from horsies.config.app import AppConfig, CustomQueueConfig, PayloadConfig, QueueMode
from horsies.config.postgres import PostgresConfig
from horsies.db.statements.workers import register_defaults
from horsies.task_result import TaskError
from horsies.worker.known_tasks import task_defaults
from tests.support.applications import add_task, app_at
from tests.support.database import Database, lock_waiters
from tests.support.notifications import SENTINEL, Ears
from tests.support.rows import finish, row_of, stored_ids
from tests.support.wait import wait_until

# Columns that differ between any two sends.
OF_ONE_SEND = {"id", "sent_at", "created_at", "updated_at", "enqueued_at", "enqueue_sha"}
CALL = {"a": 1, "b": 2}


def register(connection: Database, app: Horsies) -> None:
    """Store the defaults of the application's tasks, as its workers do."""
    register_defaults.run(connection, (task_defaults(app),))


def send(connection: Database, task: str, kwargs: Any = None, **parameters: Any) -> str:
    """Call horsies_send_v1 with these parameters by name."""
    given = {"task": task, "kwargs": json.dumps(kwargs or {}), **parameters}
    types = {"kwargs": "::jsonb", "options": "::jsonb"}
    named = ", ".join(f"p_{name} => %({name})s{types.get(name, '')}" for name in given)
    query = f"SELECT horsies_send_v1({named})::text"
    row = connection.execute(query.encode(), given).fetchone()
    assert row is not None
    return str(row[0])


def send_many(connection: Database, calls: object) -> list[str]:
    query = "SELECT horsies_send_many_v1(%s::jsonb)::text"
    return [task_id for (task_id,) in connection.execute(query, (json.dumps(calls),))]


@pytest.fixture
def two_queues(process_url: str, connection: Database) -> Any:
    """An application with two queues, one of which keeps its tasks for a day."""
    app = app_at(
        process_url,
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="mail", priority=7),
            CustomQueueConfig(name="slow", priority=40),
        ],
        recovery={"queue_retention": {"slow": timedelta(days=1)}},
        payload=PayloadConfig(warn_bytes=500, reject_bytes=1_000),
    )
    yield app
    app.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timeout_ms": 5_000},
        {"burst": True},
        {"retry_policy": RetryPolicy.fixed([1, 5], auto_retry_for=["WORKER_CRASHED"])},
        {"retry_policy": RetryPolicy.exponential(2, max_retries=4, auto_retry_for=[OSError])},
    ],
)
def test_a_row_has_the_values_of_a_send_in_python(
    app: Horsies, connection: Database, options: dict[str, Any]
) -> None:
    task = add_task(app, **options)
    register(connection, app)
    deadline = datetime(2035, 5, 1, 12, 30, tzinfo=UTC)
    by_python = task.with_options(
        good_until=deadline,
        priority=3,
        headers={"tenant": "blåbær"},
        retention=timedelta(hours=1),
    ).send(**CALL)
    by_sql = send(
        connection,
        "add",
        CALL,
        priority=3,
        options=json.dumps(
            {
                "good_until": deadline.isoformat(),
                "headers": {"tenant": "blåbær"},
                "retention": "1 hour",
            }
        ),
    )
    expected, found = row_of(connection, by_python.unwrap().task_id), row_of(connection, by_sql)
    for one in (expected, found):
        one["task_options"] = json.loads(one["task_options"])
        deadline_text = one["task_options"]["good_until"]
        one["task_options"]["good_until"] = datetime.fromisoformat(deadline_text)
    assert {name: found[name] for name in found if name not in OF_ONE_SEND} == {
        name: expected[name] for name in expected if name not in OF_ONE_SEND
    }
    assert found["enqueued_at"] == found["sent_at"] == found["created_at"]


def test_the_queue_brings_its_priority_and_retention(
    two_queues: Horsies, connection: Database
) -> None:
    add_task(two_queues, queue_name="mail")
    register(connection, two_queues)
    own, other = send(connection, "add"), send(connection, "add", queue="slow")
    assert row_of(connection, own)["queue_name"] == "mail"
    assert row_of(connection, own)["priority"] == 7
    assert row_of(connection, own)["retention"] is None
    assert row_of(connection, other)["priority"] == 40
    assert row_of(connection, other)["retention"] == "24:00:00"


def test_an_async_task_is_marked_for_async_children(app: Horsies, connection: Database) -> None:
    @app.task("fetch")
    async def fetch() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    register(connection, app)
    options = row_of(connection, send(connection, "fetch"))["task_options"]
    assert options.startswith('{"async":true')


def test_a_task_that_no_worker_has_registered_needs_a_queue(connection: Database) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="no worker has registered it"):
        send(connection, "later")
    row = row_of(connection, send(connection, "later", queue="elsewhere"))
    assert (row["queue_name"], row["priority"], row["max_retries"]) == ("elsewhere", 100, 0)


def test_a_later_registration_replaces_the_defaults(app: Horsies, connection: Database) -> None:
    add_task(app, timeout_ms=1_000)
    register(connection, app)
    (first,) = connection.execute("SELECT xmin FROM horsies_task_defaults").fetchall()
    register(connection, app)
    assert [first] == connection.execute("SELECT xmin FROM horsies_task_defaults").fetchall()
    second = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://x/y")))
    add_task(second, timeout_ms=2_000)
    register(connection, second)
    assert row_of(connection, send(connection, "add"))["timeout_ms"] == 2_000


def test_a_delay_counts_from_the_send_on_the_clock_of_the_database(
    app: Horsies, connection: Database
) -> None:
    add_task(app)
    register(connection, app)
    send(connection, "add", delay=timedelta(minutes=5))
    send_many(connection, [{"task": "add", "delay": 300}, {"task": "add", "delay": "5 minutes"}])
    delays = connection.execute("SELECT enqueued_at - sent_at FROM horsies_tasks").fetchall()
    assert delays == [(timedelta(minutes=5),)] * 3
    later = datetime(2040, 1, 1, tzinfo=UTC)
    task_id = send(connection, "add", options=json.dumps({"at": later.isoformat()}))
    assert datetime.fromisoformat(row_of(connection, task_id)["enqueued_at"]) == later


def test_a_key_finds_the_same_request_from_either_language(
    app: Horsies, connection: Database
) -> None:
    add_task(app)
    register(connection, app)
    call = {"b": 2, "a": 1, "c": {"z": [1, 'ü\n"', None, True], "y": 0.5}, "é": 1}
    by_sql = send(connection, "add", call, idempotency_key="k")
    by_python = app.send_by_name("add", dict(reversed(call.items())), idempotency_key="k")
    assert by_python.unwrap().task_id == by_sql
    assert send(connection, "add", call, idempotency_key="k") == by_sql
    with pytest.raises(psycopg.errors.UniqueViolation, match=f"Task {by_sql} already exists with"):
        send(connection, "add", CALL, idempotency_key="k")


def test_a_unique_key_is_free_when_its_task_has_ended(app: Horsies, connection: Database) -> None:
    add_task(app)
    register(connection, app)
    options = '{"unique": "while_open"}'
    first = send(connection, "add", CALL, idempotency_key="k", options=options)
    assert send(connection, "add", CALL, idempotency_key="k", options=options) == first
    finish(connection, first)
    assert send(connection, "add", CALL, idempotency_key="k", options=options) != first


def test_a_send_waits_for_another_transaction_with_its_key(
    app: Horsies, connection: Database, process_url: str
) -> None:
    add_task(app)
    register(connection, app)
    answers: list[str] = []

    def second() -> None:
        with psycopg.connect(process_url, autocommit=True) as other:
            answers.append(send(other, "add", CALL, idempotency_key="k"))

    thread = threading.Thread(target=second)
    with connection.transaction(force_rollback=True):
        first = send(connection, "add", CALL, idempotency_key="k")
        thread.start()
        with psycopg.connect(process_url, autocommit=True) as observer:
            wait_until(lambda: lock_waiters(observer) == 1)
    thread.join()
    assert stored_ids(connection) == answers
    assert answers != [first]


def test_a_rollback_sends_nothing(app: Horsies, connection: Database) -> None:
    add_task(app)
    register(connection, app)
    with connection.transaction(force_rollback=True):
        send(connection, "add", CALL)
    assert stored_ids(connection) == []


def test_many_calls_are_stored_in_their_order_with_one_notification(
    app: Horsies, connection: Database, process_url: str
) -> None:
    add_task(app)
    register(connection, app)
    with closing(Ears(process_url, ("task_queue_default", SENTINEL))) as ears:
        calls = [{"task": "add", "kwargs": {"a": place}} for place in range(50)]
        calls.append({"task": "add", "kwargs": {"a": 50}, "idempotency_key": "k"})
        calls.append({"task": "add", "kwargs": {"a": 50}, "idempotency_key": "k"})
        ids = send_many(connection, calls)
        assert len(ears.heard()) == 1
    assert ids[-1] == ids[-2]
    assert stored_ids(connection) == sorted(ids[:-1]) == ids[:-1]
    kwargs = [json.loads(row_of(connection, task_id)["kwargs"]) for task_id in ids]
    assert [one["a"] for one in kwargs] == [*range(50), 50, 50]
    assert send_many(connection, []) == []


def test_no_calls_send_nothing(connection: Database) -> None:
    """jsonb_agg of no rows is NULL, as in a trigger of a statement that changed no row."""
    assert connection.execute("SELECT horsies_send_many_v1(NULL)").fetchall() == []
    assert send_many(connection, []) == []


@pytest.mark.parametrize(
    "options", ["{}", '{"unique": "while_open"}', '{"debounce": {"quiet": 60, "at_most": 60}}']
)
def test_the_holder_of_a_key_is_found_by_an_index_although_the_plan_was_made_on_an_empty_table(
    connection: Database, options: str
) -> None:
    def send_again() -> str:
        return send(connection, "a", queue="q", idempotency_key="k", options=options)

    first = send_again()
    assert {send_again() for _ in range(8)} == {first}
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha) "
        "SELECT gen_random_uuid(), 'other', 'q', 's' FROM generate_series(1, 2000)"
    )
    query = "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'horsies_tasks'"
    with connection.transaction():
        # The counts of earlier transactions are among them until the server flushes them, within a second.
        before = connection.execute(query).fetchall()
        assert send_again() == first
        assert connection.execute(query).fetchall() == before


PYTHON_SAYS_THE_SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"priority": 0}, {"priority": 0}),
    ({"priority": 101}, {"priority": 101}),
    ({"idempotency_key": ""}, {"idempotency_key": ""}),
    ({"idempotency_key": "x" * 256}, {"idempotency_key": "x" * 256}),
    ({"unique": "once", "idempotency_key": "a"}, {"unique": "once", "idempotency_key": "a"}),
    ({"unique": "while_open"}, {"unique": "while_open"}),
    ({"timeout_ms": 5}, {"timeout_ms": 5}),
    ({"headers": {"": "x"}}, {"headers": {"": "x"}}),
    ({"headers": {"a": "x" * 9_000}}, {"headers": {"a": "x" * 9_000}}),
    (
        {"at": "2030-01-01T00:00:00Z", "delay": "1 day"},
        {"at": datetime(2030, 1, 1, tzinfo=UTC), "delay": timedelta(1)},
    ),
]


@pytest.mark.parametrize(("options", "keywords"), PYTHON_SAYS_THE_SAME)
def test_a_bad_option_is_refused_with_the_sentence_of_python(
    app: Horsies, connection: Database, options: dict[str, Any], keywords: dict[str, Any]
) -> None:
    add_task(app)
    register(connection, app)
    expected = app.send_by_name("add", CALL, **keywords).unwrap_err().message
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        send_many(connection, [{"task": "add", "kwargs": CALL, **options}])
    assert caught.value.diag.message_primary == expected
    assert stored_ids(connection) == []


REFUSED: list[tuple[Any, str]] = [
    ({"task": "add"}, "p_calls must be a JSON array of calls, not object."),
    (["add"], "a call is a JSON object, not string."),
    ([{}], "a task name is a text of 1 to 255 characters."),
    ([{"task": " "}], "a task name is a text of 1 to 255 characters."),
    ([{"task": "horsies.sleep"}], "names that begin with 'horsies.' belong to horsies itself."),
    ([{"task": "add", "kwargs": [1]}], "kwargs must be a JSON object, not array."),
    ([{"task": "add", "kwargs": None}], "kwargs must be a JSON object, not null."),
    ([{"task": "add", "eta": 1}], "a send has no option 'eta'; the options are task, kwargs"),
    ([{"task": "add", "priority": 1.5}], "priority must be a whole number"),
    ([{"task": "add", "delay": -1}], "delay must be an interval or a number of seconds"),
    ([{"task": "add", "delay": "soon"}], "delay must be an interval or a number of seconds"),
    ([{"task": "add", "at": "2030-01-01 00:00"}], "at must be a time with its offset from UTC"),
    ([{"task": "add", "at": "2030-01-01"}], "at must be a time with its offset from UTC"),
    ([{"task": "add", "good_until": "Z"}], "good_until must be a time with its offset"),
    ([{"task": "add", "timeout_ms": 99999999999}], "timeout_ms must be a whole number"),
    ([{"task": "add", "headers": {"a": 1}}], "header 'a' must be a text, not number."),
    ([{"task": "add", "headers": []}], "headers must be a JSON object of texts, not array."),
    ([{"task": "add", "retention": 0}], "retention must be an interval or a number of seconds"),
    ([{"task": "add", "queue": 7}], "queue must be a text, not number."),
    ([{"task": "add", "queue": "x"}], "its application has no queue 'x'; choose one of mail, slow"),
    ([{"task": "other", "queue": "a b"}], "the queue name 'a b' must consist of 1 to 52 letters"),
    ([{"task": "add", "kwargs": {"a": "x" * 1_000}}], "more than payload.reject_bytes (1,000)"),
    (
        [{"task": "add"}, {"task": "add", "priority": 0}],
        "Call 1 of p_calls: Task 'add'",
    ),
]


@pytest.mark.parametrize(("calls", "sentence"), REFUSED)
def test_a_bad_call_is_refused_in_one_sentence_and_nothing_is_stored(
    two_queues: Horsies, connection: Database, calls: Any, sentence: str
) -> None:
    add_task(two_queues, queue_name="mail")
    register(connection, two_queues)
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        send_many(connection, calls)
    message = caught.value.diag.message_primary
    assert message is not None
    assert sentence in message
    assert "\n" not in message
    assert stored_ids(connection) == []


@pytest.mark.parametrize("options", ["[]", "null", None])
def test_options_are_a_json_object(connection: Database, options: str | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="p_options must be a JSON obj"):
        send(connection, "add", options=options)


def test_the_caller_cannot_redirect_operators_by_its_search_path(
    app: Horsies, connection: Database
) -> None:
    add_task(app)
    register(connection, app)
    connection.execute("SET search_path = pg_temp")
    try:
        (row,) = connection.execute("SELECT public.horsies_send_v1('add', '{}')::text").fetchall()
    finally:
        connection.execute("RESET search_path")
    assert stored_ids(connection) == [row[0]]
