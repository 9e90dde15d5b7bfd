"""Debounced sends: one run after the last send, with the newest arguments."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from horsies import Debounce
from horsies.app import Horsies
from horsies.db.statements.turn import (
    ClaimTasks,
    CompleteTasks,
    RetryTasks,
    claim_tasks,
    complete_tasks,
    retry_tasks,
)
from horsies.tasks.options import SendOptions
from horsies.tasks.request import TaskSendError, TaskSendErrorCode, prepare
from horsies.testing import capture_sends
from tests.support.applications import Call, Task
from tests.support.database import Database, lock_waiters
from tests.support.rows import row_of, stored_ids
from tests.support.wait import wait_until

KEY = "document-7"
SLOW = Debounce(quiet=timedelta(hours=1), at_most=timedelta(hours=3))
QUICK = Debounce(quiet=timedelta(milliseconds=1), at_most=timedelta(milliseconds=20))


def claim(connection: Database, count: int = 1) -> list[Any]:
    pids = list(range(1, count + 1))
    return claim_tasks.run(connection, ClaimTasks("w", "host", pids, ["default"], [count]))


def due_in(connection: Database, task_id: str) -> timedelta:
    """How long after its first send the task is due."""
    query = "SELECT enqueued_at - created_at FROM horsies_tasks WHERE id = %s"
    (row,) = connection.execute(query, (task_id,)).fetchall()
    assert isinstance(row[0], timedelta)
    return row[0]


def age(connection: Database, by: str) -> None:
    """Let time pass for the waiting task."""
    query = f"UPDATE horsies_tasks SET created_at = created_at - interval '{by}'"
    connection.execute(query.encode())


def test_the_newest_send_replaces_the_waiting_task(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    sender = add.with_options(idempotency_key=KEY, debounce=SLOW)
    first = call(app, sender, "send", 1).unwrap()
    assert due_in(connection, first.task_id) == timedelta(hours=1)
    newest = add.with_options(
        idempotency_key=KEY, debounce=SLOW, headers={"by": "anna"}, priority=3, timeout_ms=5_000
    )
    assert call(app, newest, "send", 2, b=3).unwrap().task_id == first.task_id
    row = row_of(connection, first.task_id)
    assert (row["args"], row["kwargs"], row["priority"]) == ("[2]", '{"b":3}', 3)
    assert row["timeout_ms"] == 5_000
    assert json.loads(row["task_options"])["headers"] == {"by": "anna"}
    assert stored_ids(connection) == [first.task_id]


def test_each_send_moves_the_time_and_the_longest_wait_ends_it(
    add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY, debounce=SLOW)
    task_id = sender.send(1).unwrap().task_id
    age(connection, "30 minutes")
    sender.send(2).unwrap()
    assert timedelta(minutes=90) <= due_in(connection, task_id) < timedelta(minutes=91)
    age(connection, "100 minutes")
    sender.send(3).unwrap()
    assert due_in(connection, task_id) == timedelta(hours=3)


def test_a_claimed_task_is_left_alone_and_the_next_send_makes_another(
    add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY, debounce=SLOW)
    first = sender.send(1).unwrap().task_id
    connection.execute("UPDATE horsies_tasks SET enqueued_at = now()")
    (claimed,) = claim(connection)
    second = sender.send(2).unwrap().task_id
    assert second != first
    retry = RetryTasks(
        "w", [claimed.id], [claimed.generation], [0.0], ["FAILED"], ["X"], [None], [None]
    )
    retry_tasks.run(connection, retry)
    assert sender.send(3).unwrap().task_id == second
    assert [row_of(connection, one)["args"] for one in (first, second)] == ["[1]", "[3]"]


def test_a_send_that_meets_a_claim_waits_for_it(
    add: Task, connection: Database, process_url: str
) -> None:
    sender = add.with_options(idempotency_key=KEY, debounce=QUICK)
    first = sender.send(1).unwrap().task_id
    wait_until(
        lambda: connection.execute("SELECT FROM horsies_tasks WHERE enqueued_at < now()").rowcount
    )
    with psycopg.connect(process_url) as claimer, ThreadPoolExecutor(1) as threads:
        assert [task.id for task in claim(claimer)] == [first]
        waiting = threads.submit(sender.send, 2)
        wait_until(lambda: lock_waiters(connection) == 1)
        claimer.commit()
        assert waiting.result().unwrap().task_id != first


@pytest.mark.parametrize("other", ["queue", "while_waiting", "while_open"])
def test_a_key_of_another_kind_of_send_is_refused(
    add: Task, connection: Database, call: Call, app: Horsies, other: Any
) -> None:
    sender = add.with_options(idempotency_key=KEY, debounce=SLOW)
    if other == "queue":
        first = app.send_by_name(
            "add", {"a": 1}, queue_name="x", idempotency_key=KEY, debounce=SLOW
        )
    else:
        first = add.with_options(idempotency_key=KEY, unique=other).send(1)
    task_id = first.unwrap().task_id
    if other == "while_waiting":
        # A key while waiting is the same lock; a debounced send takes the task over.
        assert call(app, sender, "send", 2).unwrap().task_id == task_id
        return
    error = call(app, sender, "send", 2).unwrap_err()
    assert error.code is TaskSendErrorCode.PAYLOAD_MISMATCH
    assert "use a new idempotency key" in error.message
    assert stored_ids(connection) == [task_id]


def test_a_repeated_send_whose_answer_was_lost_changes_nothing(
    app: Horsies, add: Task, connection: Database
) -> None:
    options = SendOptions(idempotency_key=KEY, debounce=QUICK)
    request = prepare(app.config, add.definition, options, (1,), {}).unwrap()
    error = TaskSendError(
        TaskSendErrorCode.ENQUEUE_FAILED,
        "the answer was lost",
        retryable=True,
        task_id=request.row.id,
        payload=request.payload,
    )
    for _ in range(2):
        assert add.retry_send(error).unwrap().task_id == request.row.id
    wait_until(lambda: claim(connection))
    assert add.retry_send(error).unwrap().task_id == request.row.id
    assert stored_ids(connection) == [request.row.id]


def test_a_send_in_a_transaction_commits_with_it(
    add: Task, connection: Database, process_url: str
) -> None:
    task_id = add.with_options(idempotency_key=KEY, debounce=SLOW).send(1).unwrap().task_id
    with psycopg.connect(process_url) as own:
        within = add.with_options(idempotency_key=KEY, debounce=SLOW, transaction=own)
        assert within.send(2).unwrap().task_id == task_id
        own.rollback()
    assert row_of(connection, task_id)["args"] == "[1]"


def test_sql_and_python_debounce_the_same_task(add: Task, connection: Database) -> None:
    task_id = add.with_options(idempotency_key=KEY, debounce=SLOW).send(1).unwrap().task_id
    query = """SELECT horsies_send_v1('add', '{"a": 2}', p_queue => 'default', p_idempotency_key => %s,
        p_options => '{"debounce": {"quiet": "2 hours", "at_most": 36000}}')::text"""
    assert connection.execute(query, (KEY,)).fetchall() == [(task_id,)]
    row = row_of(connection, task_id)
    assert (row["args"], row["kwargs"]) == ("[]", '{"a":2}')
    assert due_in(connection, task_id) > timedelta(hours=2)


@pytest.mark.parametrize(
    ("debounce", "sentence"),
    [
        ("[]", "debounce must be a JSON object with quiet and at_most"),
        ('{"quiet": 1, "most": 2}', "debounce must be a JSON object with quiet and at_most"),
        ('{"quiet": 0, "at_most": 2}', "quiet of debounce must be an interval or a number"),
        ('{"quiet": 3, "at_most": 2}', "at_most of debounce must be an interval or a number"),
    ],
)
def test_sql_refuses_a_bad_debounce(connection: Database, debounce: str, sentence: str) -> None:
    call = json.dumps([{"task": "add", "queue": "q", "idempotency_key": KEY}])
    query = "SELECT horsies_send_many_v1(jsonb_set(%s::jsonb, '{0,debounce}', %s::jsonb))"
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=sentence):
        connection.execute(query, (call, debounce))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="needs an idempotency_key"):
        connection.execute(
            "SELECT horsies_send_v1('add', p_queue => 'q', "
            """p_options => '{"debounce": {"quiet": 1, "at_most": 2}}')"""
        )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"debounce": 5}, "debounce must be a Debounce, not int"),
    ({"debounce": Debounce(timedelta(0), timedelta(1))}, "quiet of debounce must be a timedelta"),
    ({"debounce": Debounce(timedelta(2), timedelta(1))}, "at_most of debounce must be a timedelta"),
    ({"debounce": Debounce(2, 3)}, "quiet of debounce must be a timedelta"),  # type: ignore[arg-type]
    ({"debounce": SLOW, "idempotency_key": None}, "debounce needs an idempotency_key"),
    ({"debounce": SLOW, "unique": "while_open"}, "debounce implies unique='while_waiting'"),
    ({"debounce": SLOW, "delay": timedelta(1)}, "debounce sets the time of the task"),
    ({"debounce": SLOW, "at": datetime(2030, 1, 1, tzinfo=UTC)}, "debounce sets the time"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_a_bad_debounce_is_refused(
    add: Task, connection: Database, options: dict[str, Any], sentence: str
) -> None:
    error = add.with_options(**{"idempotency_key": KEY, **options}).send(1).unwrap_err()
    assert error.code is TaskSendErrorCode.VALIDATION_FAILED
    assert sentence in error.message
    assert stored_ids(connection) == []


def test_a_schedule_is_not_debounced(add: Task) -> None:
    error = add.with_options(idempotency_key=KEY, debounce=SLOW).schedule(5, 1).unwrap_err()
    assert "leave at, delay and schedule out" in error.message


def test_captured_sends_show_every_debounced_send(app: Horsies, add: Task) -> None:
    with capture_sends(app) as sent:
        for number in (1, 2):
            add.with_options(idempotency_key=KEY, debounce=SLOW).send(number).unwrap()
    assert [one.args for one in sent] == [(1,), (2,)]
    assert sent[0].idempotency_key == KEY


class Runs:
    """Claims due tasks until it is told to stop; a fifth of them fail once and are retried."""

    def __init__(self, url: str) -> None:
        self.args: list[str] = []
        self.stops = threading.Event()
        self._url = url
        self._random = random.Random(3)

    def serve(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while True:
                is_last = self.stops.is_set()
                tasks = claim(connection, 8)
                for task in tasks:
                    self.args.append(task.args)
                    self._end(connection, task)
                if is_last and not tasks and not self._waiting(connection):
                    return

    def _waiting(self, connection: Database) -> int:
        return connection.execute("SELECT FROM horsies_tasks WHERE status = 'PENDING'").rowcount

    def _end(self, connection: Database, task: Any) -> None:
        ids, generations = [task.id], [task.generation]
        if task.retry_count == 0 and self._random.random() < 0.2:
            columns = RetryTasks("w", ids, generations, [0.002], ["FAILED"], ["X"], [None], [None])
            retry_tasks.run(connection, columns)
        else:
            complete_tasks.run(connection, CompleteTasks("w", ids, generations, ['{"ok":null}']))


def test_the_last_of_many_concurrent_sends_is_run(
    add: Task, connection: Database, process_url: str
) -> None:
    runs = Runs(process_url)

    def send(value: int, place: int) -> str:
        sender = add.with_options(idempotency_key=f"k{place}", debounce=QUICK)
        return sender.send(value, place).unwrap().task_id

    def produce(producer: int) -> dict[str, int]:
        """Return the last value that went to each task."""
        return {send(producer * 1_000 + one, one % 5): producer * 1_000 + one for one in range(125)}

    with ThreadPoolExecutor(9) as threads:
        server = threads.submit(runs.serve)
        sent = list(threads.map(produce, range(8)))
        # Each sender has stopped: one more send for each key is the last one for certain.
        sent.append({send(100_000 + place, place): 100_000 + place for place in range(5)})
        runs.stops.set()
        server.result()
    for place in range(5):
        of_key = [json.loads(args)[0] for args in runs.args if json.loads(args)[1] == place]
        assert 100_000 + place in of_key
    statuses = connection.execute("SELECT DISTINCT status FROM horsies_tasks").fetchall()
    assert statuses == [("COMPLETED",)]
    stored = connection.execute("SELECT id::text, args FROM horsies_tasks").fetchall()
    assert len(stored) < 1_005
    assert {task_id for task_id, _ in stored} == set().union(*sent)
    # Whichever send was the last one of a task, it was the last one of its producer for this task.
    for task_id, args in stored:
        assert json.loads(args)[0] in {values.get(task_id) for values in sent}
