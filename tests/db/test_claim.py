"""The claim: which tasks it takes, in which order, how many, and that no two claimers get the same
task.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from horsies import Horsies, TaskError, TaskResult
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    LookAhead,
    ReleaseUnstarted,
    RetryTasks,
    claim_tasks,
    release_unstarted,
    retry_tasks,
    seconds_until_due,
)
from tests.support.database import Database
from tests.support.rows import add_many, add_task, ago, picture, row_of

FUTURE = sql.SQL("now() + interval '1 hour'")
PAST = sql.SQL("now() - interval '1 hour'")


def claim(
    connection: Connection[Any],
    children: int = 1,
    queues: Sequence[str] = ("default",),
    limits: Sequence[int] | None = None,
    worker_id: str = "worker-1",
) -> list[ClaimedTask]:
    """Claim for so many idle children and return the tasks in the order the children got them."""
    limits = [children] * len(queues) if limits is None else limits
    wanted = ClaimTasks(worker_id, "host", list(range(1, children + 1)), list(queues), limits)
    return sorted(claim_tasks.run(connection, wanted), key=lambda task: task.worker_pid or 0)


def ids(claimed: Sequence[ClaimedTask]) -> list[str]:
    return [task.id for task in claimed]


def count(connection: Connection[Any], status: str) -> int:
    found = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE status = %s", (status,)
    ).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"held": True}, id="held"),
        pytest.param({"enqueued_at": FUTURE}, id="future"),
        pytest.param({"good_until": PAST}, id="expired"),
        pytest.param({"queue_name": "other"}, id="another queue"),
    ],
)
def test_a_claim_leaves_what_is_not_due_alone(
    connection: Connection[Any], columns: dict[str, Any]
) -> None:
    task_id = add_task(connection, **columns)
    before = picture(connection, task_id)
    assert claim(connection) == []
    assert picture(connection, task_id) == before


def test_a_claimed_task_carries_what_a_child_needs(connection: Connection[Any]) -> None:
    task_id = add_task(
        connection,
        args="[1, 2]",
        kwargs='{"a": 3}',
        retry_count=1,
        max_retries=4,
        task_options='{"x": 1}',
        timeout_ms=500,
        good_until=FUTURE,
    )
    (task,) = claim(connection)
    row = row_of(connection, task_id)
    times = connection.execute(
        "SELECT enqueued_at::text, sent_at::text, good_until::text FROM horsies_tasks"
    ).fetchone()
    assert times is not None
    enqueued_at, sent_at, good_until = times
    assert task == ClaimedTask(
        task_id,
        1,
        "work",
        "default",
        "[1, 2]",
        '{"a": 3}',
        1,
        4,
        '{"x": 1}',
        500,
        worker_pid=1,
        priority=100,
        enqueued_at=enqueued_at,
        details=f"{sent_at or ''}\n{enqueued_at}\n{good_until}\n\n\n\n\n",
    )
    assert (row["status"], row["claimed_by_worker_id"]) == ("RUNNING", "worker-1")
    assert (row["worker_hostname"], row["worker_pid"]) == ("host", 1)
    assert row["claimed_at"] is not None
    assert row["started_at"] is not None


def test_queues_come_in_the_order_given_then_priority_then_first_in_first_out(
    connection: Connection[Any],
) -> None:
    expected = [
        add_task(connection, queue_name="zebra", priority=100, enqueued_at=ago(9)),
        add_task(connection, queue_name="ant", priority=1, enqueued_at=ago(2)),
        add_task(connection, queue_name="ant", priority=50, enqueued_at=ago(8)),
        add_task(connection, queue_name="ant", priority=50, enqueued_at=ago(7)),
        add_task(connection, queue_name="ant", priority=100, enqueued_at=ago(20)),
    ]
    assert ids(claim(connection, 9, ["zebra", "ant"])) == expected


def test_tasks_due_at_the_same_moment_come_in_the_order_of_their_ids(
    connection: Connection[Any],
) -> None:
    with connection.transaction():
        expected = sorted(add_task(connection) for _ in range(5))
    assert ids(claim(connection, 5)) == expected


def test_each_child_gets_one_task(connection: Connection[Any]) -> None:
    add_many(connection, 10)
    claimed = claim(connection, 3)
    assert [task.worker_pid for task in claimed] == [1, 2, 3]
    assert len(set(ids(claimed))) == 3
    assert count(connection, "RUNNING") == 3


def test_a_queue_gives_no_more_than_its_limit(connection: Connection[Any]) -> None:
    for queue in ("first", "paused", "second"):
        add_many(connection, 5, queue)
    claimed = claim(connection, 6, ["first", "paused", "second"], limits=[2, 0, 9])
    queues = [row_of(connection, task_id)["queue_name"] for task_id in ids(claimed)]
    assert queues == ["first"] * 2 + ["second"] * 4


def test_no_idle_child_claims_nothing(connection: Connection[Any]) -> None:
    add_many(connection, 3)
    assert claim(connection, 0) == []
    assert claim(connection, 3, queues=[]) == []


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"enable_hashjoin": "off", "enable_mergejoin": "off"},
        {"enable_nestloop": "off", "enable_mergejoin": "off"},
        {"enable_nestloop": "off", "enable_hashjoin": "off"},
        {"enable_indexscan": "off", "enable_bitmapscan": "off", "enable_indexonlyscan": "off"},
    ],
    ids=["default", "nested loop", "hash join", "merge join", "no index"],
)
def test_the_limit_holds_whatever_the_plan(
    connection: Connection[Any], plan: dict[str, str]
) -> None:
    add_many(connection, 50)
    for setting, value in plan.items():
        connection.execute("SELECT set_config(%s, %s, false)", (setting, value))
    assert len(claim(connection, 2)) == 2
    assert count(connection, "RUNNING") == 2


def test_locked_tasks_are_skipped_and_replaced_by_the_next_ones(
    connection: Connection[Any], process_url: str
) -> None:
    add_many(connection, 20)
    in_order = connection.execute(
        "SELECT id::text FROM horsies_tasks ORDER BY enqueued_at, id"
    ).fetchall()
    with psycopg.connect(process_url) as other:
        other.execute("SELECT 1 FROM horsies_tasks ORDER BY enqueued_at LIMIT 8 FOR UPDATE")
        assert ids(claim(connection, 5)) == [task_id for (task_id,) in in_order[8:13]]


def test_every_claim_counts_the_generation_up(connection: Connection[Any]) -> None:
    add_task(connection)
    (first,) = claim(connection)
    release_unstarted.run(connection, ReleaseUnstarted("worker-1", [], []))
    (second,) = claim(connection)
    retry_tasks.run(
        connection,
        RetryTasks("worker-1", [second.id], [2], [0.0], ["FAILED"], ["X"], [None], [None]),
    )
    (third,) = claim(connection)
    assert [first.generation, second.generation, third.generation] == [1, 2, 3]
    assert [first.retry_count, second.retry_count, third.retry_count] == [0, 0, 1]


def test_a_claim_that_is_rolled_back_leaves_the_task_for_the_next_one(
    connection: Connection[Any], process_url: str
) -> None:
    task_id = add_task(connection)
    before = picture(connection, task_id)
    with psycopg.connect(process_url) as other:
        assert ids(claim(other)) == [task_id]
        other.rollback()
    assert picture(connection, task_id) == before
    assert [(task.id, task.generation) for task in claim(connection)] == [(task_id, 1)]


def test_four_claimers_take_two_thousand_tasks_once_each(
    connection: Connection[Any], process_url: str
) -> None:
    add_many(connection, 1000, "first")
    add_many(connection, 1000, "second")
    claimed: list[ClaimedTask] = []
    too_many: list[int] = []
    start = threading.Barrier(4)

    def claim_until_empty(worker_id: str) -> None:
        with psycopg.connect(process_url, autocommit=True) as mine:
            start.wait()
            while batch := claim(mine, 8, ["first", "second"], worker_id=worker_id):
                claimed.extend(batch)
                too_many.extend([len(batch)] * (len(batch) > 8))

    threads = [threading.Thread(target=claim_until_empty, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert too_many == []
    assert max(Counter(ids(claimed)).values()) == 1
    assert len(claimed) == count(connection, "RUNNING") == 2000
    assert {task.generation for task in claimed} == {1}


def sleep_seconds(connection: Connection[Any], *queues: str) -> float | None:
    (answer,) = seconds_until_due.run(connection, LookAhead(list(queues), None))
    (answer,) = seconds_until_due.run(connection, LookAhead(list(queues), answer.looked_at))
    return answer.seconds


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({}, id="due already"),
        pytest.param({"enqueued_at": FUTURE, "queue_name": "other"}, id="another queue"),
        pytest.param({"enqueued_at": FUTURE, "held": True}, id="held"),
        pytest.param({"enqueued_at": FUTURE, "status": "COMPLETED"}, id="finished"),
    ],
)
def test_an_idle_worker_may_sleep_on_when_nothing_will_become_due(
    connection: Connection[Any], columns: dict[str, Any]
) -> None:
    assert sleep_seconds(connection, "default") is None
    add_task(connection, **columns)
    assert sleep_seconds(connection, "default") is None


def test_an_idle_worker_sleeps_until_the_earliest_task_of_its_queues(
    connection: Connection[Any],
) -> None:
    for queue, priority, minutes in [("a", 1, 50), ("a", 9, 20), ("b", 1, 30), ("b", 2, 40)]:
        due = sql.SQL(f"now() + interval '{minutes} minutes'")
        add_task(connection, queue_name=queue, priority=priority, enqueued_at=due)
    assert sleep_seconds(connection, "b") == pytest.approx(1800, abs=30)
    assert sleep_seconds(connection, "b", "a") == pytest.approx(1200, abs=30)


@pytest.mark.parametrize(
    ("columns", "overdue"),
    [
        pytest.param({}, False, id="no deadline"),
        pytest.param({"good_until": FUTURE}, False, id="before its deadline"),
        pytest.param({"good_until": ago(1)}, True, id="past its deadline"),
        pytest.param({"good_until": ago(1), "status": "RUNNING"}, False, id="it has started"),
        pytest.param({"status": "CLAIMED", "claim_expires_at": FUTURE}, False, id="leased"),
        pytest.param({"status": "CLAIMED", "claim_expires_at": ago(1)}, True, id="lease lapsed"),
    ],
)
def test_a_look_ahead_says_whether_a_deadline_or_a_lease_has_passed(
    connection: Connection[Any], columns: dict[str, Any], overdue: bool
) -> None:
    add_task(connection, **columns)
    (answer,) = seconds_until_due.run(connection, LookAhead(["default"], None))
    assert answer.overdue is overdue


def test_what_became_due_since_the_last_look_is_due_now(connection: Connection[Any]) -> None:
    (first,) = seconds_until_due.run(connection, LookAhead(["default"], None))
    assert first.seconds is None
    add_task(connection, enqueued_at=sql.SQL("clock_timestamp()"))
    (second,) = seconds_until_due.run(connection, LookAhead(["default"], first.looked_at))
    assert second.seconds == 0
    (third,) = seconds_until_due.run(connection, LookAhead(["default"], second.looked_at))
    assert third.seconds is None
    (fresh,) = seconds_until_due.run(connection, LookAhead(["default"], None))
    assert fresh.seconds == 0


def test_a_deadline_ends_the_sleep_as_well(connection: Connection[Any]) -> None:
    add_task(connection, good_until=sql.SQL("now() + interval '10 minutes'"), held=True)
    assert sleep_seconds(connection, "default") == pytest.approx(600, abs=30)
    add_task(connection, good_until=PAST)
    assert sleep_seconds(connection, "default") == 0


@pytest.mark.parametrize("way", ["send_many", "sends of one moment"])
def test_tasks_run_in_the_order_of_their_sends(
    app: Horsies, connection: Database, way: str
) -> None:
    @app.task("step")
    def step(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    if way == "send_many":
        step.send_many(step.bind(number) for number in range(20)).unwrap()
    else:
        for number in range(20):
            step.send(number).unwrap()
        connection.execute("UPDATE horsies_tasks SET enqueued_at = now()")
    claimed = [
        claim_tasks.run(connection, ClaimTasks("worker", "host", [1], ["default"], [1]))[0].id
        for _ in range(20)
    ]
    assert [row_of(connection, task_id)["args"] for task_id in claimed] == [
        f"[{number}]" for number in range(20)
    ]
