"""Sending many: all of them in one statement and one notification, or none of them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig, PayloadConfig
from horsies.config.postgres import PostgresConfig
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.bulk import CHUNK_CALLS
from horsies.tasks.request import TaskSendErrorCode
from horsies.tasks.send import TaskCall
from tests.support.applications import Call, Task, add_task, app_at, store_task
from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.rows import finish, stored, stored_ids

FAULTY = TaskSendErrorCode.VALIDATION_FAILED


def test_handles_come_in_the_order_of_the_calls(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    calls = [add.bind(n, b=n + 1) for n in range(100)]
    handles = call(app, add, "send_many", calls).unwrap()
    by_id = {str(row["id"]): row for row in stored(connection)}
    assert len(by_id) == 100
    for n, handle in enumerate(handles):
        row = by_id[handle.task_id]
        assert (row["args"], row["kwargs"]) == (f"[{n}]", f'{{"b":{n + 1}}}')


def test_rows_look_like_those_of_single_sends(
    app: Horsies, add: Task, connection: Database
) -> None:
    deadline = datetime(2999, 1, 1, tzinfo=UTC)
    options = add.with_options(priority=3, good_until=deadline)
    options.send(1).unwrap()
    options.send_many([add.bind(1)]).unwrap()
    single, bulk = stored(connection)
    assert single["enqueued_at"] == single["created_at"]
    assert bulk["enqueued_at"] == bulk["created_at"]
    own = ("id", "sent_at", "enqueued_at", "created_at", "updated_at", "enqueue_sha")
    for row in (single, bulk):
        for name in own:
            assert row.pop(name) is not None
    assert single == bulk


def test_texts_of_any_kind_arrive_as_they_were_sent(app: Horsies, connection: Database) -> None:
    store = store_task(app)
    texts = ["", "\n", "a\nb\r\n\x1f", "\\n", "{}", '"', ",", "NULL", "é\u2028\U0001f40e"]
    store.send_many([store.bind(text) for text in texts]).unwrap()
    store.send_many([store.bind(value=text) for text in texts]).unwrap()
    rows = stored(connection)
    found = [json.loads(row["args"]) or [json.loads(row["kwargs"])["value"]] for row in rows]
    assert sorted(found) == sorted([text] for text in [*texts, *texts])


def test_a_result_can_be_had_through_every_handle(
    app: Horsies, add: Task, connection: Database
) -> None:
    handles = add.send_many([add.bind(n) for n in range(3)]).unwrap()
    for n, handle in enumerate(handles):
        finish(connection, handle.task_id, f'{{"ok":{n}}}')
    assert [handle.get(timeout_ms=30_000).ok_value for handle in handles] == [0, 1, 2]


def test_nothing_to_send_is_no_error(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    assert call(app, add, "send_many", []).unwrap() == []
    assert stored(connection) == []


def test_any_iterable_of_calls_will_do(app: Horsies, add: Task, connection: Database) -> None:
    assert len(add.send_many(add.bind(n) for n in range(5)).unwrap()) == 5


def test_a_large_batch_is_one_transaction_with_one_notification_per_queue(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN task_queue_default")
        add.send_many(add.bind(n) for n in range(2 * CHUNK_CALLS + 1)).unwrap()
        add.send(1).unwrap()
        heard = list(listener.notifies(timeout=30, stop_after=2))
    assert [bool(note.payload) for note in heard] == [False, True]
    (transactions,) = connection.execute("SELECT count(DISTINCT xmin::text) FROM horsies_tasks")
    assert transactions[0] == 2


def test_a_stream_keeps_the_order_of_its_calls_and_its_handles(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    count = 2 * CHUNK_CALLS + 1
    handles = call(app, add, "send_many", (add.bind(n) for n in range(count))).unwrap()
    rows = connection.execute("SELECT id::text, args FROM horsies_tasks ORDER BY enqueued_at, id")
    found = rows.fetchall()
    assert [args for _, args in found] == [f"[{n}]" for n in range(count)]
    assert [handle.task_id for handle in handles] == [task_id for task_id, _ in found]
    assert handles[-1].task_id == found[-1][0]
    assert [one.task_id for one in handles[5:8]] == [task_id for task_id, _ in found[5:8]]
    with pytest.raises(IndexError):
        handles[count]


def test_a_list_of_many_calls_returns_a_list(app: Horsies, add: Task, connection: Database) -> None:
    handles = add.send_many([add.bind(n) for n in range(CHUNK_CALLS + 1)]).unwrap()
    assert isinstance(handles, list)
    assert sorted(one.task_id for one in handles) == stored_ids(connection)


def test_a_bad_call_late_in_a_stream_stores_nothing(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    count = 3 * CHUNK_CALLS
    calls = (add.bind("one" if n == count - 1 else n) for n in range(count))
    error = call(app, add, "send_many", calls).unwrap_err()
    assert error.code is FAULTY
    assert error.message.startswith(f"Call {count - 1} of send_many: ")
    assert stored(connection) == []
    add.send(1).unwrap()


def test_an_exception_late_in_a_stream_is_the_callers_and_stores_nothing(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    def calls() -> Iterator[TaskCall[int]]:
        yield from (add.bind(n) for n in range(3 * CHUNK_CALLS))
        raise LookupError("no more rows")

    with pytest.raises(LookupError, match="no more rows"):
        call(app, add, "send_many", calls())
    assert stored(connection) == []


def test_a_row_refused_late_in_a_stream_takes_all_others_with_it(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    last = 3 * CHUNK_CALLS - 1
    connection.execute(
        f"ALTER TABLE horsies_tasks ADD CONSTRAINT refuse CHECK (args <> '[{last}]')"
    )
    try:
        error = call(app, add, "send_many", (add.bind(n) for n in range(last + 1))).unwrap_err()
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refuse")
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert stored(connection) == []


def test_a_cut_in_the_middle_of_a_stream_stores_nothing(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(distant_app)

    def calls() -> Iterator[TaskCall[int]]:
        for n in range(4 * CHUNK_CALLS):
            if n == 3 * CHUNK_CALLS + 500:
                proxy.cut()
            yield add.bind(n)

    error = call(distant_app, add, "send_many", calls()).unwrap_err()
    assert error.retryable
    assert stored_ids(connection) == []
    add.send(1).unwrap()


@pytest.mark.parametrize("marker", [b"COMMIT\0", b"INSERT 0 1000\0"])
def test_a_stream_that_lost_an_answer_is_resent_without_a_second_set_of_tasks(
    proxy: Proxy, connection: Database, call: Call, monkeypatch: pytest.MonkeyPatch, marker: bytes
) -> None:
    monkeypatch.setattr("horsies.tasks.bulk.KEPT_BYTES_IN_MEMORY", 1_000)  # to a file
    app = app_at(proxy.url, resend_on_transient_err=True)
    add = add_task(app)
    add.send(0).unwrap()
    count = 3 * CHUNK_CALLS
    proxy.swallow_answer_with(marker)
    handles = call(app, add, "send_many", (add.bind(n) for n in range(count))).unwrap()
    assert proxy.swallowed.is_set()
    rows = connection.execute("SELECT id::text, args FROM horsies_tasks ORDER BY id").fetchall()
    assert [args for _, args in rows[1:]] == [f"[{n}]" for n in range(count)]
    assert [one.task_id for one in handles] == [task_id for task_id, _ in rows[1:]]
    app.close()


@pytest.mark.parametrize("way", ["pooled", "within", "at"])
def test_a_stream_is_one_transaction_on_every_way_to_the_database(
    process_url: str, connection: Database, way: str
) -> None:
    broker = PostgresConfig(
        database_url=process_url,
        session_database_url=f"{process_url}&application_name=session" if way == "pooled" else None,
        pgbouncer_transaction_mode=way == "pooled",
    )
    app = Horsies(AppConfig(broker=broker))
    add, count = add_task(app), 2 * CHUNK_CALLS + 1
    calls = (add.bind(n) for n in range(count))
    with psycopg.connect(process_url) as callers:
        if way == "pooled":
            add.send_many(calls).unwrap()
        elif way == "at":
            add.with_options(at=datetime(2999, 1, 1, tzinfo=UTC)).send_many(calls).unwrap()
        else:
            add.with_options(transaction=callers).send_many(calls).unwrap()
            assert stored(connection) == []
    rows = connection.execute("SELECT args FROM horsies_tasks ORDER BY enqueued_at, id").fetchall()
    assert [args for (args,) in rows] == [f"[{n}]" for n in range(count)]
    app.close()


def test_a_stream_needs_no_more_memory_than_two_chunks(
    app: Horsies, add: Task, connection: Database
) -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        add.send_many(add.bind(n) for n in range(count)).unwrap()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)
    few, many = peak(3 * CHUNK_CALLS), peak(9 * CHUNK_CALLS)
    assert many - few < 100 * 6 * CHUNK_CALLS  # 16 bytes are its id; its call takes 400


@pytest.mark.parametrize("position", [0, 2])
def test_one_bad_call_stores_nothing_and_is_named_by_its_position(
    app: Horsies, add: Task, connection: Database, call: Call, position: int
) -> None:
    calls = [add.bind(n) for n in range(3)]
    calls[position] = add.bind("one")
    error = call(app, add, "send_many", calls).unwrap_err()
    assert error.code is FAULTY
    assert error.message.startswith(f"Call {position} of send_many: ")
    assert "a must be int" in error.message
    assert not error.retryable
    assert stored(connection) == []


def test_a_call_of_another_task_is_refused(app: Horsies, add: Task, connection: Database) -> None:
    def other(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    strange: list[Any] = [app.task("other")(other).bind(1), (1, 2), None, 7]
    for call in strange:
        error = add.send_many([add.bind(1), call]).unwrap_err()
        assert error.code is FAULTY
        assert "Call 1" in error.message
        assert "bind" in error.message
    assert stored(connection) == []


@pytest.mark.parametrize("calls", [None, 5])
def test_what_holds_no_calls_is_refused(
    app: Horsies, add: Task, connection: Database, call: Call, calls: Any
) -> None:
    error = call(app, add, "send_many", calls).unwrap_err()
    assert error.code is FAULTY
    assert "send_many takes a list of calls made by bind(...)" in error.message
    assert stored(connection) == []


def test_a_call_that_is_too_large_is_refused(process_url: str, connection: Database) -> None:
    broker = PostgresConfig(database_url=process_url, pool_size=1)
    app = Horsies(AppConfig(broker=broker, payload=PayloadConfig(warn_bytes=50, reject_bytes=50)))
    store = store_task(app)
    error = store.send_many([store.bind("x"), store.bind("x" * 60)]).unwrap_err()
    assert error.code is TaskSendErrorCode.PAYLOAD_TOO_LARGE
    assert "Call 1" in error.message
    assert stored(connection) == []
    app.close()


def test_a_key_names_one_request_and_not_many(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    sender = add.with_options(idempotency_key="order-1")
    error = call(app, sender, "send_many", [add.bind(1)]).unwrap_err()
    assert error.code is FAULTY
    assert "idempotency_key" in error.message


def test_an_exception_of_the_callers_own_generator_is_the_callers(
    app: Horsies, add: Task, connection: Database
) -> None:
    def calls() -> Iterator[TaskCall[int]]:
        yield add.bind(1)
        raise LookupError("no more rows")

    with pytest.raises(LookupError):
        add.send_many(calls())
    assert stored(connection) == []


def test_a_row_the_database_refuses_takes_all_others_with_it(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT refuse CHECK (args <> '[2]')")
    try:
        error = call(app, add, "send_many", [add.bind(n) for n in range(5)]).unwrap_err()
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refuse")
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert not error.retryable
    assert stored(connection) == []


def test_a_server_that_is_away_is_an_error_value(call: Call) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    add = add_task(app)
    error = call(app, add, "send_many", [add.bind(1)]).unwrap_err()
    assert error.code is TaskSendErrorCode.ENQUEUE_FAILED
    assert error.retryable
    app.close()


def test_a_lost_answer_leaves_all_or_none_and_says_that_it_may_have_been_stored(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(distant_app)
    add.send(0).unwrap()
    proxy.swallow_answer_with(b"INSERT 0 3\0")
    error = call(distant_app, add, "send_many", [add.bind(n) for n in range(3)]).unwrap_err()
    assert error.retryable
    assert len(stored_ids(connection)) == 4


def test_a_lost_answer_is_resent_without_a_second_set_of_tasks_when_asked_for(
    proxy: Proxy, connection: Database, call: Call
) -> None:
    app = app_at(proxy.url, resend_on_transient_err=True)
    add = add_task(app)
    proxy.swallow_answer_with(b"INSERT 0 3\0")
    handles = call(app, add, "send_many", [add.bind(n) for n in range(3)]).unwrap()
    assert proxy.swallowed.is_set()
    assert sorted(handle.task_id for handle in handles) == stored_ids(connection)
    app.close()


def test_a_call_does_not_show_its_arguments(add: Task) -> None:
    assert repr(add.bind(123456, b=654321)) == "TaskCall('add', ...)"


def test_handles_of_generators_are_added_as_lists_are(
    app: Horsies, add: Task, connection: Database
) -> None:
    first = add.send_many(add.bind(n) for n in range(2)).unwrap()
    second = add.send_many(add.bind(n) for n in range(3)).unwrap()
    listed = add.send_many([add.bind(9)]).unwrap()
    ids = [handle.task_id for handle in (*first, *second, *listed)]
    together: Any = first
    assert [handle.task_id for handle in together + second + listed] == ids
    assert [handle.task_id for handle in listed + together] == [ids[-1], *ids[:2]]
    with pytest.raises(TypeError, match="unsupported operand"):
        together + 1
