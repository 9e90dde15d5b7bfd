"""Notifications: one per queue and statement, with the transaction or not at all, never too long.

Silence is proved by a sentinel: notifications arrive in the order of their commits, so what has not
come before a later one never will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.config.app import AppConfig, CustomQueueConfig, QueueMode
from horsies.config.postgres import PostgresConfig
from horsies.db.statements.tasks import cancel_tasks
from horsies.db.statements.turn import (
    ClaimTasks,
    CompleteTasks,
    ExpireTasks,
    FailTasks,
    ReleaseUnstarted,
    RetryTasks,
    claim_tasks,
    complete_tasks,
    expire_tasks,
    fail_tasks,
    release_unstarted,
    retry_tasks,
)
from horsies.errors import HorsiesError
from tests.support.notifications import SENTINEL, Ears
from tests.support.rows import add_task, ago

LONGEST_QUEUE = "q" * 52
OWNER = "worker-1"


@pytest.fixture
def ears(process_url: str, connection: Connection[Any]) -> Iterator[Ears]:
    ears = Ears(process_url)
    yield ears
    ears.close()


def add_many(connection: Connection[Any], count: int, status: str = "PENDING") -> list[str]:
    """Insert tasks into the queues a and b in turn, with one statement."""
    found = connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, status, "
        "  claimed_by_worker_id, generation) "
        "SELECT gen_random_uuid(), 'work', (ARRAY['a', 'b'])[1 + n %% 2], 'sha', %s, %s, 1 "
        "FROM generate_series(1, %s) AS n RETURNING id::text",
        (status, OWNER, count),
    )
    return [task_id for (task_id,) in found]


def running(connection: Connection[Any], queue: str = "a", **columns: Any) -> str:
    return add_task(
        connection,
        queue_name=queue,
        status="RUNNING",
        claimed_by_worker_id=OWNER,
        generation=1,
        **columns,
    )


def test_a_bulk_insert_notifies_each_queue_once(connection: Connection[Any], ears: Ears) -> None:
    add_many(connection, 500)
    assert Counter(ears.heard()) == {
        ("task_queue_a", ""): 1,
        ("task_queue_b", ""): 1,
        ("task_new", ""): 1,
    }


def test_a_single_insert_names_its_task(connection: Connection[Any], ears: Ears) -> None:
    task_id = add_task(connection, queue_name="a")
    assert Counter(ears.heard()) == {("task_queue_a", task_id): 1, ("task_new", task_id): 1}


def test_an_insert_that_conflicts_or_is_not_pending_notifies_nobody(
    connection: Connection[Any], ears: Ears
) -> None:
    running(connection)
    connection.execute(
        "INSERT INTO horsies_tasks SELECT * FROM horsies_tasks ON CONFLICT DO NOTHING"
    )
    assert ears.heard() == []


def test_a_thousand_completions_arrive_in_payloads_that_fit(
    connection: Connection[Any], ears: Ears
) -> None:
    ids = add_many(connection, 1000, "RUNNING")
    complete_tasks.run(connection, CompleteTasks(OWNER, ids, [1] * 1000, ["{}"] * 1000))
    heard = ears.heard()
    assert {channel for channel, _ in heard} == {"task_done"}
    assert len(heard) == 5
    assert max(len(payload.encode()) for _, payload in heard) < 8000
    named = [task_id for _, payload in heard for task_id in payload.split(",")]
    assert sorted(named) == sorted(ids)


def end_by_failure(connection: Connection[Any]) -> str:
    task_id = running(connection)
    reports = FailTasks(
        OWNER, [task_id], [1], ["FAILED"], [None], ["FAILED"], ["X"], [None], [None]
    )
    fail_tasks.run(connection, reports)
    return task_id


def end_by_cancel(connection: Connection[Any]) -> str:
    task_id = add_many(connection, 1, "CLAIMED")[0]
    cancel_tasks.fetch(connection, [task_id], True)
    return task_id


def end_by_expiry(connection: Connection[Any]) -> str:
    late = sql.SQL("now() - interval '1 minute'")
    task_id = add_task(connection, queue_name="b", good_until=late)
    expire_tasks.run(connection, ExpireTasks("{}", 10))
    return task_id


@pytest.mark.parametrize(("kinds", "is_heard"), [("bbpb", True), ("bbbb", False), ("bb", False)])
def test_tasks_that_a_claim_locked_and_left_are_announced(
    connection: Connection[Any], ears: Ears, process_url: str, kinds: str, is_heard: bool
) -> None:
    """Behind a run of short tasks they are locked for a moment, and other claims do not see them."""
    for place, kind in enumerate(kinds):
        add_task(connection, queue_name="a", burst=kind == "b", enqueued_at=ago(100 - place))
    ears.heard()
    one = ClaimTasks("other", "host", [9], ["a"], [1])
    wanted = ClaimTasks(OWNER, "host", [1, 2, 3, 4], ["a"], [4], idle=1, short_names=["work"])
    with psycopg.connect(process_url) as slow:
        assert len(claim_tasks.run(slow, wanted)) == kinds.partition("p")[0].count("b")
        assert claim_tasks.run(connection, one) == []
    assert ears.heard() == [("task_queue_a", "")] * is_heard


@pytest.mark.parametrize("end", [end_by_failure, end_by_cancel, end_by_expiry])
def test_every_other_end_is_told_to_the_waiters_too(
    connection: Connection[Any], ears: Ears, end: Any
) -> None:
    task_id = end(connection)
    assert ("task_done", task_id) in ears.heard()


def test_a_claim_notifies_nobody(connection: Connection[Any], ears: Ears) -> None:
    add_many(connection, 10)
    ears.heard()
    claimed = claim_tasks.run(
        connection, ClaimTasks(OWNER, "host", list(range(10)), ["a", "b"], [10, 10])
    )
    assert len(claimed) == 10
    assert ears.heard() == []


def test_a_release_wakes_the_queues_of_what_it_gave_back(
    connection: Connection[Any], ears: Ears
) -> None:
    add_many(connection, 20, "RUNNING")
    release_unstarted.run(connection, ReleaseUnstarted(OWNER, [], []))
    assert Counter(ears.heard()) == {("task_queue_a", ""): 1, ("task_queue_b", ""): 1}


def test_a_retry_wakes_its_queue_to_look_at_the_new_time(
    connection: Connection[Any], ears: Ears
) -> None:
    task_id = running(connection, "b")
    reports = RetryTasks(OWNER, [task_id], [1], [60.0], ["FAILED"], ["X"], [None], [None])
    retry_tasks.run(connection, reports)
    assert ears.heard() == [("task_queue_b", "")]


def test_a_cancel_of_a_running_task_tells_its_worker_and_no_waiter(
    connection: Connection[Any], ears: Ears
) -> None:
    task_id = running(connection)
    cancel_tasks.fetch(connection, [task_id], True)
    assert ears.heard() == [("horsies_cancel", task_id)]


def test_nothing_is_heard_before_the_commit(
    connection: Connection[Any], process_url: str, ears: Ears
) -> None:
    with psycopg.connect(process_url) as sender:
        task_id = add_task(sender, queue_name="a")
        assert ears.heard() == []
        sender.commit()
    assert ("task_queue_a", task_id) in ears.heard()


def test_nothing_is_heard_of_what_was_rolled_back(
    connection: Connection[Any], process_url: str, ears: Ears
) -> None:
    ids = add_many(connection, 10, "RUNNING")
    with psycopg.connect(process_url) as sender:
        add_task(sender, queue_name="a")
        complete_tasks.run(sender, CompleteTasks(OWNER, ids, [1] * 10, ["{}"] * 10))
        sender.rollback()
    assert ears.heard() == []


def queue_config(name: str) -> AppConfig:
    return AppConfig(
        broker=PostgresConfig(database_url="postgresql://localhost/x"),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[CustomQueueConfig(name=name)],
    )


def test_the_longest_queue_name_wakes_its_listener(
    connection: Connection[Any], process_url: str
) -> None:
    (queue,) = queue_config(LONGEST_QUEUE).queues()
    ears = Ears(process_url, (f"task_queue_{queue.name}", SENTINEL))
    task_id = add_task(connection, queue_name=queue.name)
    assert ears.heard() == [(f"task_queue_{LONGEST_QUEUE}", task_id)]
    wanted = ClaimTasks(OWNER, "host", [1], [queue.name], [1])
    assert [task.id for task in claim_tasks.run(connection, wanted)] == [task_id]
    release_unstarted.run(connection, ReleaseUnstarted(OWNER, [], []))
    assert ears.heard() == [(f"task_queue_{LONGEST_QUEUE}", "")]
    ears.close()


def test_a_queue_name_whose_channel_would_not_fit_is_refused() -> None:
    with pytest.raises(HorsiesError, match="53 bytes long"):
        queue_config("q" * 53)


def test_a_trigger_that_is_switched_off_stops_no_insert(
    connection: Connection[Any], ears: Ears
) -> None:
    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER USER")
    try:
        add_task(connection, queue_name="a")
    finally:
        connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER USER")
    assert ears.heard() == []
