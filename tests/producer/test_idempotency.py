"""Idempotency keys: the same key and request find the first task, whoever comes and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from horsies.app import Horsies
from horsies.config import PayloadConfig
from horsies.db.tasks import (
    IdempotentTask,
    SentTask,
    TaskId,
    find_idempotent_task,
    find_sent_tasks,
    insert_task,
)
from horsies.outcome import TaskError, TaskResult
from horsies.request import UNSET, SendOptions, TaskSendErrorCode, TaskSendResult, prepare
from horsies.send import insert_script
from tests.producer.conftest import Call, Task, run_closing
from tests.producer.rows import Database, finish, stored
from tests.waiting import wait_until

KEY = "order-1/é"


def mismatch(sent: TaskSendResult[Any]) -> str:
    error = sent.unwrap_err()
    assert error.code is TaskSendErrorCode.PAYLOAD_MISMATCH
    assert not error.retryable
    return error.message


def test_the_same_key_and_request_give_the_first_task(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    first = call(app, sender, "send", 1, 2).unwrap()
    second = call(app, sender, "send", 1, 2).unwrap()
    assert first.task_id == second.task_id
    (row,) = stored(connection)
    assert row["idempotency_key"] == KEY


def test_another_request_under_the_same_key_is_a_mismatch(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    first = add.with_options(idempotency_key=KEY).send(1, 2).unwrap()
    message = mismatch(call(app, add.with_options(idempotency_key=KEY), "send", 1, 3))
    assert first.task_id in message
    assert "new idempotency key" in message
    mismatch(call(app, add.with_options(idempotency_key=KEY, priority=1), "send", 1, 2))
    assert len(stored(connection)) == 1


def test_when_the_request_is_made_does_not_matter(
    app: Horsies, add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    first = sender.send(1).unwrap()
    assert sender.schedule(60, 1).unwrap().task_id == first.task_id
    later = datetime.now(UTC) + timedelta(days=1)
    again = add.with_options(idempotency_key=KEY, good_until=later).send(1)
    assert again.unwrap().task_id == first.task_id
    assert len(stored(connection)) == 1


def test_a_key_belongs_to_one_task_name(app: Horsies, add: Task, connection: Database) -> None:
    def other(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    add.with_options(idempotency_key=KEY).send(1).unwrap()
    app.task("other")(other).with_options(idempotency_key=KEY).send(1).unwrap()
    assert len(stored(connection)) == 2


def test_tasks_without_a_key_never_meet(app: Horsies, add: Task, connection: Database) -> None:
    add.send(1).unwrap()
    add.send(1).unwrap()
    assert len(stored(connection)) == 2


def test_a_finished_task_still_holds_its_key_and_gives_its_result(
    app: Horsies, add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    finish(connection, sender.send(1).unwrap().task_id, '{"ok":7}')
    assert sender.send(1).unwrap().get(timeout_ms=5_000).ok_value == 7


def test_a_key_is_free_again_when_its_task_has_been_deleted(
    app: Horsies, add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    first = sender.send(1).unwrap()
    connection.execute("DELETE FROM horsies_tasks")
    assert sender.send(1).unwrap().task_id != first.task_id


@pytest.mark.parametrize("length", [1, 255])
def test_short_and_long_keys_are_stored(
    app: Horsies, add: Task, connection: Database, length: int
) -> None:
    add.with_options(idempotency_key="k" * length).send(1).unwrap()
    assert stored(connection)[0]["idempotency_key"] == "k" * length


# Races


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run the work in that many threads that start together."""
    start = threading.Barrier(count, timeout=30)

    def run(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_of_many_threads_with_one_key_one_stores_the_task_and_all_get_it(
    app: Horsies, add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    sent = at_once(20, lambda _: sender.send(1).unwrap().task_id)
    assert len(set(sent)) == 1
    assert len(stored(connection)) == 1


def test_of_many_coroutines_with_one_key_one_stores_the_task_and_all_get_it(
    app: Horsies, add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY)

    async def main() -> list[Any]:
        return await asyncio.gather(*(sender.send_async(1) for _ in range(20)))

    assert len({sent.unwrap().task_id for sent in run_closing(app, main())}) == 1
    assert len(stored(connection)) == 1


def test_of_many_different_requests_under_one_key_exactly_one_wins(
    app: Horsies, add: Task, connection: Database
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    sent = at_once(20, lambda number: sender.send(number))
    assert sum(one.is_ok() for one in sent) == 1
    for one in sent:
        if one.is_err():
            mismatch(one)
    assert len(stored(connection)) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_a_send_waits_for_an_open_transaction_that_holds_its_key(
    app: Horsies, add: Task, connection: Database, process_url: str, commits: bool
) -> None:
    sender = add.with_options(idempotency_key=KEY)
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND datname = current_database()"
    )
    with psycopg.connect(process_url) as other, ThreadPoolExecutor(1) as thread:
        held = add.with_options(idempotency_key=KEY, transaction=other).send(1).unwrap()
        racing = thread.submit(sender.send, 1)
        wait_until(lambda: connection.execute(waiting).fetchone() == (1,))
        other.commit() if commits else other.rollback()
        found = racing.result(timeout=10).unwrap()
    assert (found.task_id == held.task_id) is commits
    assert [str(row["id"]) for row in stored(connection)] == [found.task_id]


# The conflict rules, statement by statement


def keyed_row(add: Task) -> Any:
    options = SendOptions(idempotency_key=KEY)
    return prepare(PayloadConfig(), add.definition, options, (1,), {}, UNSET).unwrap().row


def answers(script: Any, *rows: list[Any]) -> tuple[list[Any], Any]:
    """Play the database: return the statements the script ran and its answer."""
    asked = [next(script)[0]]
    for answer in rows:
        try:
            asked.append(script.send(answer)[0])
        except StopIteration as end:
            return asked, end.value
    return asked, None


def test_a_key_whose_holder_vanished_in_between_is_inserted_after_all(add: Task) -> None:
    row = keyed_row(add)
    asked, answer = answers(insert_script(row), [], [], [], [TaskId(row.id)])
    assert asked == [insert_task, find_idempotent_task, find_sent_tasks, insert_task]
    assert answer == row.id


def test_a_replay_that_finds_its_own_row_needs_no_other_look(add: Task) -> None:
    row = keyed_row(add)
    holder = IdempotentTask(row.id, row.idempotency_sha)
    asked, answer = answers(insert_script(row), [], [holder])
    assert (asked, answer) == ([insert_task, find_idempotent_task], row.id)


def test_a_replay_is_recognised_by_its_id_as_well(add: Task) -> None:
    row = keyed_row(add)
    _, answer = answers(insert_script(row), [], [], [SentTask(row.id, row.enqueue_sha)])
    assert answer == row.id
