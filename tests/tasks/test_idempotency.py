"""Idempotency keys: the same key and request always return the first task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import psycopg
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.statements.tasks import (
    IdempotentTask,
    SentTask,
    TaskId,
    find_idempotent_task,
    find_sent_tasks,
    insert_task,
)
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.options import SendOptions
from horsies.tasks.request import TaskSendErrorCode, TaskSendResult, prepare
from horsies.tasks.send import insert_script
from tests.support.applications import Call, Task, run_closing
from tests.support.database import Database, lock_waiters
from tests.support.orders import printed_under_hash_seeds, reordered
from tests.support.rows import finish, stored
from tests.support.wait import wait_until

KEY = "order-1/é"
CONFIG = AppConfig(broker=PostgresConfig(database_url="postgresql://nobody@127.0.0.1:1/none"))


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
    assert sender.send(1).unwrap().get(timeout_ms=30_000).ok_value == 7


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
    with psycopg.connect(process_url) as other, ThreadPoolExecutor(1) as thread:
        held = add.with_options(idempotency_key=KEY, transaction=other).send(1).unwrap()
        racing = thread.submit(sender.send, 1)
        wait_until(lambda: lock_waiters(connection) == 1)
        other.commit() if commits else other.rollback()
        found = racing.result(timeout=30).unwrap()
    assert (found.task_id == held.task_id) is commits
    assert [str(row["id"]) for row in stored(connection)] == [found.task_id]


# The conflict rules, statement by statement


def keyed_row(add: Task) -> Any:
    options = SendOptions(idempotency_key=KEY)
    return prepare(CONFIG, add.definition, options, (1,), {}).unwrap().row


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
    asked, answer = answers(insert_script(row, (str(row.idempotency_sha),)), [], [holder])
    assert (asked, answer) == ([insert_task, find_idempotent_task], row.id)


def test_a_replay_is_recognised_by_its_id_as_well(add: Task) -> None:
    row = keyed_row(add)
    _, answer = answers(insert_script(row), [], [], [SentTask(row.id, row.enqueue_sha)])
    assert answer == row.id


# The same request, written in another order


@dataclass(frozen=True)
class Label:
    tags: frozenset[str]


def keep(
    value: Any, numbers: frozenset[int] = frozenset(), **named: Label | Any
) -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


KEEP = Horsies(CONFIG).task("keep")(keep)


def digest(*args: Any, **kwargs: Any) -> str:
    options = SendOptions(idempotency_key=KEY)
    request = prepare(CONFIG, KEEP.definition, options, args, kwargs).unwrap()
    assert request.row.idempotency_sha is not None
    return request.row.idempotency_sha


words = st.text('abc"\\:{}[],é', max_size=3)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | words
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
# Multiples of eight meet in a small table, so that the order in which they come shows.
crowded = st.frozensets(st.integers(0, 50).map(lambda one: 8 * one), max_size=6)


@given(values, crowded, st.dictionaries(st.sampled_from("abcdef"), values), st.randoms())
@settings(deadline=None, database=None)
def test_a_request_written_in_another_order_has_the_same_digest(
    value: Any, numbers: frozenset[int], named: dict[str, Any], random: Random
) -> None:
    again = reordered({"numbers": numbers, **named}, random)
    assert digest(value, numbers=numbers, **named) == digest(reordered(value, random), **again)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container with the step to each leaf in it."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for step, member in list(steps):
        is_leaf = not isinstance(member, dict | list) or not member
        found += [(value, step)] if is_leaf else places(member)
    return found


@given(values.filter(lambda value: value not in ([], {})), leaves, st.data())
@settings(deadline=None, database=None)
def test_a_request_with_another_leaf_has_another_digest(value: Any, leaf: Any, data: Any) -> None:
    sent = [value]
    before = digest(sent)
    container, step = data.draw(st.sampled_from(places(sent)))
    assume(repr(container[step]) != repr(leaf))
    container[step] = leaf
    assert digest(sent) != before


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (1, "1"),
        ([1, 2], [2, 1]),
        ([[1], [2]], [[2], [1]]),
        ([{"a": 1}, {"b": 1}], [{"b": 1}, {"a": 1}]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "c": 2}),
        ({}, []),
        (None, {}),
    ],
)
def test_differences_that_matter_make_another_digest(one: Any, two: Any) -> None:
    assert digest(one) != digest(two)
    assert digest({"z": one, "a": 0}) != digest({"z": two, "a": 0})


def test_another_set_makes_another_digest() -> None:
    assert digest(1, numbers=frozenset({1, 2})) != digest(1, numbers=frozenset({1, 3}))
    assert digest(1, numbers=frozenset({1, 2})) != digest(1, numbers=frozenset({1}))


def test_only_a_request_with_a_key_is_digested_twice() -> None:
    request = prepare(CONFIG, KEEP.definition, SendOptions(), (1,), {}).unwrap()
    assert request.row.idempotency_sha is None


def test_a_repetition_written_in_another_order_gives_the_first_task(
    app: Horsies, connection: Database, call: Call
) -> None:
    sender = app.task("keep")(keep).with_options(idempotency_key=KEY)
    value, label = {"x": 1, "y": [{"a": 1, "b": 2}]}, Label(frozenset({"a", "b"}))
    first = sender.send(value, one=label, two=2).unwrap()
    value = {"y": [{"b": 2, "a": 1}], "x": 1}
    assert call(app, sender, "send", value, two=2, one=label).unwrap().task_id == first.task_id
    value = {"y": [{"b": 1, "a": 2}], "x": 1}
    mismatch(call(app, sender, "send", value, two=2, one=label))
    assert len(stored(connection)) == 1


DIGEST_SCRIPT = """
from tests.tasks.test_idempotency import Label, digest

words = {"alpha", "beta", "gamma", "delta", "epsilon"}
print(digest({name: 1 for name in words}, label=Label(frozenset(words)), **dict.fromkeys(words)))
"""


@pytest.mark.slow
def test_a_repetition_from_another_interpreter_has_the_same_digest() -> None:
    (printed,) = printed_under_hash_seeds(DIGEST_SCRIPT)
    assert len(printed.strip()) == 64
