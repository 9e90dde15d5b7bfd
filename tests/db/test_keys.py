"""The claim by keys: lanes have their turn in order, however many tasks one of them has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import (
    ClaimTasks,
    LookAhead,
    LookAtKeys,
    claim_tasks,
    look_at_keys,
    seconds_until_due,
)
from horsies.tasks.keys import lane_of
from horsies.worker.busy_lanes import LaneMarks
from horsies.worker.turn import Claimer, Positions, TurnRequest
from tests.support.database import Database
from tests.support.keys import Ring, add_keyed, add_many_keyed, key_of, limit
from tests.support.query_plans import task_reads
from tests.support.rows import add_task, ago
from tests.support.wait import wait_until

ASYNC = '{"async":true}'


def by_ring(keys: Sequence[str], queue: str = "default") -> list[str]:
    return sorted(keys, key=lambda key: lane_of(queue, key).number)


@pytest.mark.parametrize("key", ["acme", "ä\x1f\n", "x" * 255, "0", "@"])
def test_the_database_computes_the_same_lane(connection: Database, key: str) -> None:
    (row,) = connection.execute("SELECT horsies_lane_v1('api', %s)", (key,)).fetchall()
    assert row[0] == lane_of("api", key).number
    assert lane_of("api", key) != lane_of("mail", key)


def test_a_plain_claim_does_not_see_tasks_with_keys(connection: Database) -> None:
    add_keyed(connection, "acme")
    assert claim_tasks.run(connection, ClaimTasks("w", "host", [1], ["default"], [1])) == []


def test_keys_take_turns(connection: Database) -> None:
    for key, count in {"a": 8, "b": 3, "c": 8}.items():
        add_keyed(connection, key, count)
    ring = Ring(connection)
    one_by_one = [ring.claim()[0] for _ in range(9)]
    assert Counter(one_by_one) == {"a": 3, "b": 3, "c": 3}
    assert one_by_one[:3] == by_ring(["a", "b", "c"])
    assert Counter(ring.claim(6)) == {"a": 3, "c": 3}
    assert Counter(ring.claim(9)) == {"a": 2, "c": 2}
    assert ring.is_drained
    assert ring.claim(9) == []


def test_places_that_cannot_be_shared_evenly_go_round(connection: Database) -> None:
    for key in "abc":
        add_keyed(connection, key, 20)
    ring = Ring(connection)
    taken = Counter(key for _ in range(6) for key in ring.claim(5))
    assert taken == {"a": 10, "b": 10, "c": 10}


def test_a_lone_key_gets_every_child(connection: Database) -> None:
    add_keyed(connection, "a", 5)
    ring = Ring(connection)
    assert ring.claim(4) == ["a"] * 4
    assert not ring.is_drained
    assert ring.claim(4) == ["a"]
    assert ring.is_drained


@pytest.mark.parametrize("children", [1, 2, 3, 4])
def test_tasks_without_a_key_are_one_more_lane(connection: Database, children: int) -> None:
    for key in "ab":
        add_keyed(connection, key, 40)
    for _ in range(40):
        add_task(connection)
    ring = Ring(connection)
    claims = 36 // children
    taken = Counter(key for _ in range(claims) for key in ring.claim(children))
    assert taken.total() == 36
    assert all(abs(count - 12) <= 3 for count in taken.values()), taken


def test_one_task_of_another_key_is_in_the_next_claim(connection: Database) -> None:
    add_many_keyed(connection, "a", 5_000)
    ring = Ring(connection)
    assert ring.claim(4) == ["a"] * 4
    add_keyed(connection, "b")
    assert sorted(map(str, ring.claim(2))) == ["a", "b"]


def test_priorities_order_the_tasks_of_one_key(connection: Database) -> None:
    add_keyed(connection, "a", priority=50, task_name="later")
    add_keyed(connection, "a", priority=1, task_name="first")
    add_keyed(connection, "b", priority=90, task_name="other")
    ring = Ring(connection)
    assert {task.task_name for task in ring.take(2)} == {"first", "other"}
    assert [task.task_name for task in ring.take(2)] == ["later"]


def test_a_task_for_later_waits_for_its_time(connection: Database) -> None:
    add_keyed(connection, "a", enqueued_at=ago(-3600))
    add_keyed(connection, "b", enqueued_at=ago(-2))
    ring = Ring(connection)
    assert ring.claim(2) == []
    wanted = LookAtKeys(["default", "other"], 10)
    (found,) = wait_until(
        lambda: [one for one in look_at_keys.run(connection, wanted) if one.promoted]
    )
    assert (found.queues, found.promoted) == (["default"], 1)
    assert found.seconds is not None
    assert 3590 < found.seconds <= 3600
    assert ring.claim(2) == ["b"]


def test_a_poll_finds_the_queues_with_keys(connection: Database) -> None:
    add_keyed(connection, "a", queue="api")
    wanted = LookAhead(["default", "api"], None)
    (found,) = seconds_until_due.run(connection, wanted)
    assert found.keyed == ["api"]
    (again,) = seconds_until_due.run(connection, wanted._replace(last_look=found.looked_at))
    assert again.keyed is None


def test_a_paused_queue_keeps_its_keys_waiting(connection: Database) -> None:
    add_keyed(connection, "a")
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    assert Ring(connection).claim() == []


def test_two_claims_at_once_share_a_lane(connection: Database, process_url: str) -> None:
    add_keyed(connection, "a", 4)
    with psycopg.connect(process_url) as other, other.transaction():
        assert Ring(other).claim(2) == ["a", "a"]
        assert Ring(connection).claim(4) == ["a", "a"]


def test_a_lane_that_gave_its_place_to_the_plain_ones_is_met_again_in_the_same_claim(
    connection: Database, process_url: str
) -> None:
    for lane in (-50, 70, -200):
        add_task(connection, lane_key=str(lane), lane=lane, held=True)
    add_task(connection)
    ring = Ring(connection)
    ring.cursor = -100
    with psycopg.connect(process_url) as other, other.transaction():
        other.execute("SELECT FROM horsies_tasks WHERE lane = 70 FOR UPDATE")
        assert set(ring.claim(3)) == {"-50", "-200", None}


def test_the_turn_of_tasks_without_a_key_locks_no_task_of_the_next_key(
    connection: Database, process_url: str
) -> None:
    add_task(connection, lane_key="70", lane=70, held=True)
    add_task(connection)
    ring = Ring(connection)
    ring.cursor = 0
    with psycopg.connect(process_url) as other, other.transaction():
        others = Ring(other)
        others.cursor = -100
        assert others.claim(1) == [None]
        assert ring.claim(1) == ["70"]


@pytest.mark.parametrize("children", [2, 20])
def test_a_first_task_that_has_expired_hides_no_other(connection: Database, children: int) -> None:
    add_keyed(connection, "a", enqueued_at=ago(9), good_until=ago(5))
    add_keyed(connection, "a", enqueued_at=ago(3))
    add_keyed(connection, "b", enqueued_at=ago(9), good_until=ago(5))
    ring = Ring(connection)
    assert ring.claim(children) == ["a"]
    assert ring.is_drained


def test_a_lane_that_runs_empty_leaves_no_child_idle(connection: Database) -> None:
    for lane, count in {-50: 1, 10: 5, 20: 5}.items():
        for _ in range(count):
            add_task(connection, lane_key=str(lane), lane=lane, held=True)
    ring = Ring(connection)
    ring.cursor = -100
    assert Counter(ring.claim(4)) == {"-50": 1, "10": 2, "20": 1}
    assert not ring.is_drained
    assert Counter(ring.claim(9)) == {"10": 3, "20": 4}
    assert ring.is_drained


def test_windows_take_short_tasks_of_any_lane(connection: Database) -> None:
    for key in "ab":
        add_keyed(connection, key, 4, burst=True, task_name="short")
    taken = Ring(connection).take(8, idle=2, short_names=["short"])
    assert len(taken) == 8


def test_windows_leave_long_tasks_alone(connection: Database) -> None:
    add_keyed(connection, "a", 4, burst=True, task_name="short")
    add_keyed(connection, "b", 4, task_name="long")
    taken = Ring(connection).take(8, idle=1, short_names=["short"])
    assert Counter(task.task_name for task in taken[1:]) == {"short": len(taken) - 1}


def test_kinds_of_tasks_are_claimed_apart(connection: Database) -> None:
    add_keyed(connection, "a", task_name="plain")
    add_keyed(connection, "a", task_name="async", task_options=ASYNC)
    ring = Ring(connection)
    assert [task.task_name for task in ring.take(4, is_async=True)] == ["async"]
    assert [task.task_name for task in ring.take(4, is_async=False)] == ["plain"]


@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 3}, {"weight": 2.0}])
def test_async_tasks_are_found_behind_any_number_of_others_of_their_keys(
    connection: Database, limits: dict[str, Any]
) -> None:
    if limits:
        limit(connection, **limits)
    connection.execute("SET plan_cache_mode = force_generic_plan")
    for key in ("a", "b"):
        add_many_keyed(connection, key, 20_000)
        add_keyed(connection, key, 2, task_options=ASYNC)
    add_many_keyed(connection, "c", 10)
    add_keyed(connection, "a", task_options=ASYNC, priority=1, task_name="first")
    ring = Ring(connection)
    wanted = ClaimTasks("w", "host", [1, 2, 3, 4], ["default"], [4], cursors=[0], is_async=True)
    rows, _, fetched, entries = task_reads(connection, (claim_tasks, wanted))
    taken = [row for row in rows if row.id]
    shares = Counter(key_of(connection, task) for task in taken)
    left = Counter[str | None]({"a": 3, "b": 2}) - shares
    assert len(taken) == 4
    assert "weight" in limits or shares == {"a": 2, "b": 2}, "shares by weight are random"
    assert "first" in [task.task_name for task in taken]
    assert fetched + entries < 200, "the other 40,000 were not read"
    assert ring.claim(2, is_async=True) == [*left]
    assert ring.claim(2, is_async=True) == []
    assert ring.is_drained
    assert len(ring.claim(3, is_async=False)) == 3


@pytest.mark.parametrize("frees", [False, True])
def test_the_usual_claim_sends_few_parameters_and_claims_the_same(
    connection: Database, frees: bool
) -> None:
    lane = lane_of("default", "b").number
    for key in "abc":
        add_keyed(connection, key, 5)
    claimer = Claimer("w", "host", ["default"], [None])
    wanted = TurnRequest(
        pids=[1, 2, 3],
        positions=Positions(looks_everywhere=False),
        cursors=[lane],
        freed_lanes=[("default", lane)] if frees else (),
        lane_marks=LaneMarks([lane], [50], ["2026-01-01"], [str(UUID(int=1))]),
    )
    statement, params = claimer.claim_step(wanted)
    assert len(params) == 13
    claims = [(statement, params), (claim_tasks, claimer.claim(wanted))]
    found: list[list[Any]] = []
    for step in claims:
        with connection.transaction(force_rollback=True):
            rows = Pipeline(connection, prepared=False).run([step])[0]
            found.append([(row.id, row.worker_pid, row.lane) for row in rows])
    assert found[0] == found[1]
    assert len(found[0]) == 4, "three tasks and the answer"


def test_names_that_a_worker_does_not_know_are_left_out(connection: Database) -> None:
    add_keyed(connection, "a", task_name="unknown")
    add_keyed(connection, "a", task_name="known")
    taken = Ring(connection).take(4, unknown_names=["unknown"])
    assert [task.task_name for task in taken] == ["known"]
