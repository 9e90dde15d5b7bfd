"""Keys that are unique for a time: until the task is claimed, or until it has ended."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from horsies.app import Horsies
from horsies.db.statements.turn import (
    ClaimTasks,
    ReleaseUnstarted,
    RetryTasks,
    claim_tasks,
    release_unstarted,
    retry_tasks,
)
from horsies.tasks.options import Uniqueness
from horsies.tasks.request import TaskSendError, TaskSendErrorCode, prepare
from tests.support.applications import Call, Task
from tests.support.database import Database, lock_waiters
from tests.support.rows import finish, stored, stored_ids
from tests.support.wait import wait_until

KEY = "shop-7"
MODES: list[Uniqueness] = ["while_waiting", "while_open"]


def claim(connection: Database) -> Any:
    (task,) = claim_tasks.run(connection, ClaimTasks("worker", "host", [1], ["default"], [1]))
    return task


def retry(connection: Database, task: Any) -> None:
    columns = RetryTasks(
        "worker", [task.id], [task.generation], [0.0], ["FAILED"], ["X"], [None], [None]
    )
    retry_tasks.run(connection, columns)


@pytest.mark.parametrize("unique", MODES)
@pytest.mark.parametrize("end", ["COMPLETED", "FAILED", "CANCELLED", "EXPIRED"])
def test_a_key_is_held_until_the_task_has_ended(
    app: Horsies, add: Task, connection: Database, call: Call, unique: Uniqueness, end: str
) -> None:
    sender = add.with_options(idempotency_key=KEY, unique=unique)
    first = call(app, sender, "send", 1).unwrap()
    assert call(app, sender, "send", 1).unwrap().task_id == first.task_id
    other = call(app, sender, "send", 2).unwrap_err()
    assert other.code is TaskSendErrorCode.PAYLOAD_MISMATCH
    finish(connection, first.task_id, status=end)
    second = call(app, sender, "send", 2).unwrap()
    assert stored_ids(connection) == [first.task_id, second.task_id]


@pytest.mark.parametrize("unique", MODES)
def test_only_a_waiting_key_is_free_once_the_task_is_claimed(
    add: Task, connection: Database, unique: Uniqueness
) -> None:
    sender = add.with_options(idempotency_key=KEY, unique=unique)
    first = sender.send(1).unwrap()
    claim(connection)
    assert (sender.send(1).unwrap().task_id == first.task_id) is (unique == "while_open")


@pytest.mark.parametrize("unique", MODES)
@pytest.mark.parametrize("back", ["retried", "released"])
def test_a_task_back_in_its_queue_does_not_collide_with_a_later_holder(
    add: Task, connection: Database, unique: Uniqueness, back: str
) -> None:
    sender = add.with_options(idempotency_key=KEY, unique=unique)
    first = sender.send(1).unwrap()
    claimed = claim(connection)
    later = sender.send(1).unwrap()
    if back == "retried":
        retry(connection, claimed)
    else:
        release = ReleaseUnstarted("worker", [], [])
        release_unstarted.run(connection, release)
    assert {row["status"] for row in stored(connection)} == {"PENDING"}
    held_by = first if unique == "while_open" else later
    assert sender.send(1).unwrap().task_id == held_by.task_id


def test_modes_share_their_keys_but_not_those_that_are_unique_forever(add: Task) -> None:
    ids = {
        unique: add.with_options(idempotency_key=KEY, unique=unique).send(1).unwrap().task_id
        for unique in (*MODES, "forever")
    }
    assert ids["while_waiting"] == ids["while_open"] != ids["forever"]


@pytest.mark.parametrize("unique", MODES)
def test_of_many_senders_at_once_one_stores_the_task_and_all_get_it(
    add: Task, connection: Database, unique: Uniqueness
) -> None:
    sender, ready = add.with_options(idempotency_key=KEY, unique=unique), threading.Barrier(8)

    def send(_: int) -> str:
        ready.wait(30)
        return sender.send(1).unwrap().task_id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(send, range(8)))) == 1
    assert len(stored(connection)) == 1


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize(
    ("unique", "change"), [("while_open", "ends"), ("while_waiting", "is claimed")]
)
def test_a_send_waits_for_the_transaction_that_may_free_its_key(
    add: Task,
    connection: Database,
    process_url: str,
    unique: Uniqueness,
    change: str,
    commits: bool,
) -> None:
    sender = add.with_options(idempotency_key=KEY, unique=unique)
    first = sender.send(1).unwrap()
    with psycopg.connect(process_url) as other, ThreadPoolExecutor(1) as thread:
        finish(other, first.task_id) if change == "ends" else claim(other)
        racing = thread.submit(sender.send, 1)
        wait_until(lambda: lock_waiters(connection) == 1)
        other.commit() if commits else other.rollback()
        found = racing.result(timeout=30).unwrap()
    assert (found.task_id != first.task_id) is commits
    assert len(stored(connection)) == (2 if commits else 1)


@pytest.mark.parametrize("unique", MODES)
@pytest.mark.parametrize("commits", [True, False])
def test_a_key_belongs_to_the_callers_transaction_until_it_commits(
    add: Task, connection: Database, process_url: str, unique: Uniqueness, commits: bool
) -> None:
    options: Any = {"idempotency_key": KEY, "unique": unique}
    with psycopg.connect(process_url) as other, ThreadPoolExecutor(1) as thread:
        held = add.with_options(transaction=other, **options).send(1).unwrap()
        assert (
            add.with_options(transaction=other, **options).send(1).unwrap().task_id == held.task_id
        )
        racing = thread.submit(add.with_options(**options).send, 1)
        wait_until(lambda: lock_waiters(connection) == 1)
        other.commit() if commits else other.rollback()
        found = racing.result(timeout=30).unwrap()
    assert (found.task_id == held.task_id) is commits
    assert stored_ids(connection) == [found.task_id]


@pytest.mark.parametrize("unique", MODES)
def test_a_retried_send_finds_its_own_task_even_if_another_holds_the_key_now(
    app: Horsies, add: Task, connection: Database, unique: Uniqueness
) -> None:
    sender = add.with_options(idempotency_key=KEY, unique=unique)
    request = prepare(app.config, add.definition, sender._sender.options, (1,), {}).unwrap()
    code = TaskSendErrorCode.ENQUEUE_FAILED
    error = TaskSendError(code, "lost", True, request.row.id, request.payload)
    assert add.retry_send(error).unwrap().task_id == request.row.id
    finish(connection, request.row.id)
    later = sender.send(1).unwrap()
    assert add.retry_send(error).unwrap().task_id == request.row.id != later.task_id
    assert len(stored(connection)) == 2
