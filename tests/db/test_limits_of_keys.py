"""Limits of keys: caps, rates, order and weights, kept by every claim."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

from horsies import RecoveryConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import (
    ClaimTasks,
    ClaimUnresolvable,
    CompleteTasks,
    ExpireTasks,
    LookAtKeys,
    ReleaseLapsed,
    ReleaseUnstarted,
    StartTasks,
    claim_tasks,
    claim_unresolvable,
    complete_tasks,
    expire_tasks,
    look_at_keys,
    release_lapsed,
    release_unstarted,
    start_tasks,
)
from horsies.db.statements.workers import store_lane_limits
from horsies.tasks.keys import lane_of
from horsies.worker.keyed import KeyRings
from horsies.worker.reaper import sweep
from tests.support.database import Database
from tests.support.keys import (
    FIRST,
    OFFER,
    Ring,
    add_keyed,
    add_many_keyed,
    end,
    fail,
    key_of,
    limit,
    retry,
)
from tests.support.notifications import SENTINEL, Ears
from tests.support.rows import add_task, ago
from tests.support.wait import wait_until


def test_a_cap_holds_for_each_key(connection: Database) -> None:
    limit(connection, max_concurrency=2)
    for key in "ab":
        add_keyed(connection, key, 5)
    ring = Ring(connection)
    taken = ring.take(8)
    assert len(taken) == 4
    assert ring.is_drained
    assert ring.claim(8) == []
    end(connection, taken[0])
    assert len(ring.claim(8)) == 1


def test_the_limit_of_one_key_wins(connection: Database) -> None:
    limit(connection, max_concurrency=1)
    limit(connection, "big", max_concurrency=3)
    for key in ("big", "small"):
        add_keyed(connection, key, 5)
    assert Counter(Ring(connection).claim(8)) == {"big": 3, "small": 1}


def test_two_keys_with_the_same_number_share_a_lane_and_keep_their_names(
    connection: Database,
) -> None:
    """The numbers of two keys are equal once in 2^64 pairs."""
    limit(connection, max_concurrency=1)
    for key in ("acme", "zeta"):
        add_task(connection, lane_key=key, lane=7, held=True)
    ring = Ring(connection)
    (first,) = ring.take(8)
    assert ring.claim(8) == []
    end(connection, first)
    (second,) = ring.take(8)
    assert [key_of(connection, task) for task in (first, second)] == ["acme", "zeta"]


def test_a_cap_of_zero_pauses_all_keys_and_nothing_else(
    connection: Database, process_url: str
) -> None:
    limit(connection, max_concurrency=0)
    add_keyed(connection, "a", 2)
    ring = Ring(connection)
    with psycopg.connect(process_url) as other, other.transaction():
        assert Ring(other).claim(8) == []
        assert ring.claim(8) == []
    assert ring.wait_seconds == 0, "no claim locks a full key, so none has to look again"


def test_a_paused_key_waits_and_others_run(connection: Database) -> None:
    connection.execute("SELECT now()")
    limit(connection, "a", paused_at="2026-01-01T00:00:00Z", pause_reason="unpaid")
    for key in "ab":
        add_keyed(connection, key, 2)
    ring = Ring(connection)
    assert ring.claim(8) == ["b", "b"]
    connection.execute("UPDATE horsies_lanes SET paused_at = NULL")
    assert ring.claim(8) == ["a", "a"]


def test_a_claim_that_cannot_count_a_lane_looks_again_soon(
    connection: Database, process_url: str
) -> None:
    limit(connection, max_concurrency=2)
    for key in "ab":
        add_keyed(connection, key, 5)
    with psycopg.connect(process_url) as other, other.transaction():
        assert len(Ring(other).take(1)) == 1
        ring = Ring(connection)
        assert len(ring.take(8)) == 2, "the lane that is being counted is passed over"
        assert 0 < ring.wait_seconds < 0.01


def test_keys_that_are_full_do_not_hide_others(connection: Database) -> None:
    limit(connection, max_concurrency=1)
    for number in range(300):
        add_keyed(connection, f"full {number}", 2)
    ring = Ring(connection)
    taken = 0
    while taken < 300:
        taken += len(ring.take(50))
    add_keyed(connection, "late")
    found = [key for _ in range(3) for key in ring.claim(8)]
    assert found == ["late"]


def add_blocked_keys(connection: Database, count: int) -> None:
    """More keys than one claim looks at, none of which may run."""
    limit(connection, max_concurrency=0)
    connection.execute(
        "INSERT INTO horsies_tasks "
        "(id, task_name, queue_name, enqueue_sha, lane_key, lane, held, enqueued_at) SELECT "
        " gen_random_uuid(), 'work', 'default', 'sha', 'key ' || number, "
        " horsies_lane_v1('default', 'key ' || number), true, now() - interval '1 minute' "
        "FROM generate_series(1, %s) AS number",
        (count,),
    )


def test_blocked_keys_do_not_keep_a_claim_with_windows_from_ending(connection: Database) -> None:
    add_blocked_keys(connection, 300)
    add_task(connection, queue_name="mail", burst=True, task_name="short")
    wanted = ClaimTasks(
        "w",
        "host",
        [1, 2, 3, 4],
        ["default", "mail"],
        [4, 4],
        cursors=[FIRST, None],
        idle=1,
        short_names=["short"],
    )
    connection.execute("SET statement_timeout = '5s'")
    taken = [row.queue_name for row in claim_tasks.run(connection, wanted) if row.id]
    connection.execute("RESET statement_timeout")
    assert taken == ["mail"]


def claims_until_drained(connection: Database, rings: KeyRings, most: int = 8) -> int:
    """How often a worker with one idle child claims at once, one claim after the other."""
    for number in range(most):
        wanted = ClaimTasks(
            "w",
            "host",
            [1],
            ["default"],
            [1],
            cursors=rings.cursors(),
            unknown_names=["unknown"],
        )
        rows = claim_tasks.run(connection, wanted)
        served = {row.queue_name for row in rows if row.id}
        if not rings.note_claim([row for row in rows if not row.id], served, 0.0).has_more:
            return number + 1
    return most + 1


def test_a_worker_rests_when_no_key_on_the_ring_has_a_task_for_it(connection: Database) -> None:
    add_blocked_keys(connection, 700)
    rings = KeyRings(["default"])
    rings.note_keyed(["default"])
    assert claims_until_drained(connection, rings) <= 4
    connection.execute(
        "DELETE FROM horsies_lanes; UPDATE horsies_tasks SET task_name = 'unknown' WHERE lane_key <> 'key 1'"
    )
    rings.note_news()
    claims_until_drained(connection, rings)
    found = connection.execute("SELECT lane_key FROM horsies_tasks WHERE status = 'RUNNING'")
    assert found.fetchall() == [("key 1",)], "it looks at every lane before it rests"


def test_a_worker_rests_when_it_may_not_take_the_tasks_without_a_key(connection: Database) -> None:
    limit(connection, max_concurrency=0)
    add_keyed(connection, "a")
    add_task(connection, task_name="unknown")
    rings = KeyRings(["default"])
    rings.note_keyed(["default"])
    assert claims_until_drained(connection, rings) <= 4


def pass_time(connection: Database, seconds: float) -> None:
    """Let time pass for the rates."""
    connection.execute(
        "UPDATE horsies_meters SET next_at = next_at - %s * interval '1 second'", (seconds,)
    )


def test_rates_of_keys(connection: Database) -> None:
    limit(connection, rate_seconds=3600.0, rate_burst=2)
    limit(connection, "fast", rate_seconds=60.0, rate_burst=1)
    for key in ("a", "b", "fast"):
        add_keyed(connection, key, 9)
    ring = Ring(connection)
    assert Counter(ring.claim(20)) == {"a": 2, "b": 2, "fast": 1}
    assert ring.claim(20) == []
    assert 0 < ring.wait_seconds <= 60
    pass_time(connection, 60)
    assert ring.claim(20) == ["fast"]


def test_the_claim_that_uses_up_a_rate_says_when_to_look_again(connection: Database) -> None:
    limit(connection, rate_seconds=60.0, rate_burst=2)
    add_keyed(connection, "a", 3)
    ring = Ring(connection)
    assert ring.claim(8) == ["a", "a"]
    assert ring.is_drained
    assert 0 < ring.wait_seconds <= 60
    pass_time(connection, 60)
    assert ring.claim(8) == ["a"]
    assert ring.wait_seconds == 0, "no task is left to wait for"


def test_a_higher_rate_of_a_key_holds_at_once(connection: Database) -> None:
    limit(connection, rate_seconds=3600.0, rate_burst=2)
    limit(connection, "acme", rate_seconds=3600.0, rate_burst=2)
    add_keyed(connection, "acme", 9)
    ring = Ring(connection)
    assert ring.claim(9) == ["acme", "acme"]
    raise_rate = "UPDATE horsies_lanes SET rate_seconds = 0.5 WHERE lane_key = 'acme'"
    connection.execute(raise_rate)
    ring.claim(9)
    assert ring.wait_seconds <= 1, "an hour under the old rate"
    wait_until(lambda: ring.claim(9) == ["acme"])


def test_keys_with_a_rate_leave_no_meters_behind(connection: Database) -> None:
    limit(connection, rate_seconds=1.0, rate_burst=1)
    for key in ("old", "new"):
        add_keyed(connection, key)
    assert len(Ring(connection).claim(2)) == 2
    connection.execute(
        "UPDATE horsies_meters SET next_at = next_at - interval '61 minutes' WHERE lane = %s",
        (lane_of("default", "old").number,),
    )
    sweep(Pipeline(connection, prepared=False), RecoveryConfig())
    left = connection.execute("SELECT lane FROM horsies_meters").fetchall()
    assert left == [(lane_of("default", "new").number,)]
    add_keyed(connection, "old", 2)
    assert Ring(connection).claim(4) == ["old"], "the rate holds without the meter"


def test_a_rolled_back_claim_has_used_no_start(connection: Database, process_url: str) -> None:
    limit(connection, rate_seconds=3600.0, rate_burst=1)
    add_keyed(connection, "a", 3)
    with psycopg.connect(process_url) as other:
        assert Ring(other).claim(4) == ["a"]
        other.rollback()
    assert Ring(connection).claim(4) == ["a"]


@pytest.mark.parametrize(
    ("limits", "freed", "children", "waiting", "expected"),
    [
        pytest.param({"max_concurrency": 2}, 2, 1, 3, [OFFER], id="one of two taken again"),
        pytest.param({"max_concurrency": 2}, 1, 1, 3, [], id="one of one taken again"),
        pytest.param({"max_concurrency": 2}, 2, 2, 3, [], id="two of two taken again"),
        pytest.param({"max_concurrency": 2}, 2, 1, 1, [], id="no task is left"),
        pytest.param({"is_fifo": True}, 1, 0, 1, [OFFER], id="in order"),
        pytest.param({"is_fifo": True}, 1, 1, 2, [], id="in order, taken again"),
        pytest.param(
            {"rate_seconds": 1e-6, "rate_burst": 9}, 2, 1, 3, [], id="an end frees no start"
        ),
    ],
)
def test_places_of_a_key_that_are_not_all_taken_again_are_offered_to_others(
    connection: Database,
    process_url: str,
    limits: dict[str, Any],
    freed: int,
    children: int,
    waiting: int,
    expected: list[tuple[str, str]],
) -> None:
    limit(connection, **limits)
    add_keyed(connection, "a", freed)
    ended = Ring(connection).take(freed)
    add_keyed(connection, "a", waiting)
    end(connection, *ended)
    wanted = ClaimTasks(
        "w",
        "host",
        list(range(1, children + 1)),
        ["default"],
        [children],
        cursors=[FIRST],
        freed_queues=[task.queue_name for task in ended],
        freed_lanes=[task.lane for task in ended if task.lane is not None],
    )
    with closing(Ears(process_url, ("task_queue_default", SENTINEL))) as ears:
        taken = [row for row in claim_tasks.run(connection, wanted) if row.id]
        assert (len(ended), len(taken)) == (freed, children)
        assert ears.heard() == expected


def test_fifo_runs_one_after_the_other_in_order(connection: Database) -> None:
    limit(connection, is_fifo=True)
    for number in range(3):
        add_keyed(connection, "a", task_name=f"task {number}")
    add_keyed(connection, "b")
    ring = Ring(connection)
    assert len(ring.take(8)) == 2
    order = []
    for number in range(3):
        (task,) = connection.execute(
            "SELECT id::text, generation, task_name FROM horsies_tasks "
            "WHERE status = 'RUNNING' AND lane_key = 'a'"
        ).fetchall()
        order.append(task[2])
        assert ring.claim(8) == []
        end(connection, Owned(*task[:2]))
        assert len(ring.take(8)) == (number < 2)
    assert order == ["task 0", "task 1", "task 2"]


class Owned:
    def __init__(self, task_id: str, generation: int) -> None:
        self.id, self.generation = task_id, generation


def test_a_retry_keeps_its_place_in_a_fifo_lane(connection: Database) -> None:
    limit(connection, is_fifo=True)
    add_keyed(connection, "a", task_name="first")
    add_keyed(connection, "a", task_name="second")
    ring = Ring(connection)
    (task,) = ring.take(8)
    retry(connection, task, 2.0)
    assert ring.take(8) == [], "the first one holds the lane while it waits"
    (found,) = look_at_keys.run(connection, LookAtKeys(["default"], 10))
    assert found.seconds is not None
    assert found.seconds <= 2.0
    wait_until(lambda: look_at_keys.run(connection, LookAtKeys(["default"], 10))[0].promoted == 1)
    (again,) = ring.take(8)
    assert again.id == task.id
    end(connection, again)
    assert [one.task_name for one in ring.take(8)] == ["second"]


def test_a_retry_waits_for_its_time_when_its_lane_is_no_longer_fifo(connection: Database) -> None:
    limit(connection, is_fifo=True)
    for name in ("first", "second", "third"):
        add_keyed(connection, "a", task_name=name)
    ring = Ring(connection)
    (task,) = ring.take(1)
    retry(connection, task, 3600)
    connection.execute("UPDATE horsies_lanes SET is_fifo = false")
    assert [one.task_name for one in ring.take(1)] == ["second"]
    assert [one.task_name for one in ring.take(8)] == ["third"]
    connection.execute("UPDATE horsies_tasks SET next_retry_at = now() WHERE status = 'PENDING'")
    (found,) = look_at_keys.run(connection, LookAtKeys(["default"], 10))
    assert found.promoted == 1
    assert [one.task_name for one in ring.take(8)] == ["first"]


def test_a_locked_head_does_not_let_the_second_pass(connection: Database, process_url: str) -> None:
    limit(connection, is_fifo=True)
    add_keyed(connection, "a", 2)
    with psycopg.connect(process_url) as other, other.transaction():
        other.execute(
            "SELECT FROM horsies_tasks WHERE id = "
            "(SELECT id FROM horsies_tasks ORDER BY enqueued_at, id LIMIT 1) FOR UPDATE"
        )
        ring = Ring(connection)
        assert ring.claim(8) == []
    assert ring.claim(8) == ["a"]


@pytest.mark.parametrize("halts", [True, False])
def test_a_failure_halts_a_fifo_lane_if_it_is_told_to(connection: Database, halts: bool) -> None:
    limit(connection, is_fifo=True, halts=halts)
    add_keyed(connection, "a", 2)
    ring = Ring(connection)
    (task,) = ring.take(8)
    fail(connection, task)
    assert ring.claim(8) == ([] if halts else ["a"])
    found = connection.execute(
        "SELECT lane_key, pause_reason FROM horsies_lanes WHERE paused_at IS NOT NULL"
    ).fetchall()
    assert found == ([("a", f"task {task.id} failed: DOWN")] if halts else [])


def test_a_failure_halts_a_lane_whose_limits_a_claim_has_read(connection: Database) -> None:
    limit(connection, is_fifo=True, halts=True)
    add_keyed(connection, "a", 2)
    (task,) = Ring(connection).take(8)
    lane = lane_of("default", "a").number
    ((limits,),) = connection.execute(
        "SELECT horsies_lane_limits('default', %s, shared)::text FROM horsies_lanes AS shared",
        (lane,),
    ).fetchall()
    fail(connection, task)
    found = connection.execute(
        "SELECT room FROM horsies_lane_room('default', %s, %s::text::horsies_lanes)", (lane, limits)
    ).fetchall()
    assert found == [(0,)]


def test_a_lapsed_claim_holds_a_fifo_lane_until_it_is_released(connection: Database) -> None:
    limit(connection, is_fifo=True)
    add_keyed(connection, "a", task_name="first")
    add_keyed(connection, "a", task_name="second")
    ring = Ring(connection)
    (first,) = ring.take(0, prefetch=1, queue_limits=[1])
    assert first.worker_pid is None
    connection.execute("UPDATE horsies_tasks SET claim_expires_at = now() WHERE claimed")
    assert ring.take(8) == [], "the second task may not pass the first"
    connection.execute(
        "UPDATE horsies_tasks SET status = 'PENDING', claimed = false, claim_expires_at = NULL, "
        "claimed_by_worker_id = NULL, claimed_at = NULL WHERE claimed"
    )
    assert [task.task_name for task in ring.take(8)] == ["first"]


@pytest.mark.parametrize("way", ["retried", "released", "lapsed"])
def test_a_task_of_a_fifo_lane_keeps_its_place_when_the_clock_has_stepped_back(
    connection: Database, way: str
) -> None:
    limit(connection, is_fifo=True)
    for name in ("first", "second"):  # sent before the step
        add_keyed(connection, "a", task_name=name, enqueued_at=ago(-30), updated_at=ago(-30))
    ring = Ring(connection)
    is_ahead = way == "lapsed"
    (first,) = ring.take(int(not is_ahead), prefetch=int(is_ahead), lease_ms=1, queue_limits=[1])
    if way == "retried":
        retry(connection, first, 0)
    elif way == "released":
        assert release_unstarted.run(connection, ReleaseUnstarted("w", [], []))
    else:
        wait_until(lambda: release_lapsed.run(connection, ReleaseLapsed(1)))
    assert first.task_name == "first"
    assert [task.task_name for task in ring.take(1)] == ["first"]


def test_the_head_of_a_fifo_lane_that_expires_is_passed_once_it_has_ended(
    connection: Database, process_url: str
) -> None:
    limit(connection, is_fifo=True)
    add_keyed(connection, "a", task_name="first", good_until=ago(1))
    add_keyed(connection, "a", task_name="second")
    ring = Ring(connection)
    assert ring.take(8) == [], "the first one has not ended"
    with closing(Ears(process_url, ("task_queue_default", SENTINEL))) as ears:
        expire_tasks.run(connection, ExpireTasks('{"err":"late"}', 10))
        assert ears.heard() == [OFFER]
    assert [task.task_name for task in ring.take(8)] == ["second"]


def test_a_task_claimed_ahead_that_starts_while_its_lease_ends_keeps_its_place(
    connection: Database, process_url: str
) -> None:
    limit(connection, max_concurrency=1)
    add_keyed(connection, "a", 2)
    lapsed = "SELECT FROM horsies_tasks WHERE claim_expires_at <= clock_timestamp()"
    with psycopg.connect(process_url) as other:
        (ahead,) = Ring(connection).take(0, prefetch=1, lease_ms=1_000, queue_limits=[1])
        start = StartTasks("w", [ahead.id], [ahead.generation], [7])
        assert start_tasks.run(other, start)
        wait_until(lambda: connection.execute(lapsed).rowcount)
        assert Ring(connection).claim(2) == [], (
            "it has started, and its worker will soon commit that"
        )
        other.commit()
    assert Ring(connection).claim(2) == []


def test_tasks_with_keys_that_no_worker_knows_are_claimed_to_fail(connection: Database) -> None:
    limit(connection, "ordered", is_fifo=True)
    limit(connection, "paused", paused_at="2026-01-01T00:00:00Z")
    add_keyed(connection, "ordered", task_name="known", enqueued_at=ago(7200))
    for key in ("ordered", "paused", "plain"):
        add_keyed(connection, key, task_name="unknown", enqueued_at=ago(3600))
    claim = ClaimUnresolvable("me", "host", ["default"], ["unknown"], 60.0, 10)
    found = claim_unresolvable.run(connection, claim)
    assert [key_of(connection, task) for task in found] == ["plain"]
    end(connection, *Ring(connection).take(8, unknown_names=["unknown"]))
    found = claim_unresolvable.run(connection, claim)
    assert [key_of(connection, task) for task in found] == ["ordered"]


def test_weights_share_the_places(connection: Database) -> None:
    limit(connection, weight=1.0)
    limit(connection, "heavy", weight=3.0)
    limit(connection, "light", weight=0.5)
    for key in ("heavy", "light", "normal"):
        add_many_keyed(connection, key, 1_000)
    ring = Ring(connection)
    taken = Counter(key for _ in range(300) for key in ring.claim(2))
    assert 2.2 < taken["heavy"] / taken["normal"] < 4.0
    assert 0.3 < taken["light"] / taken["normal"] < 0.8


def test_windows_never_hold_tasks_of_limited_keys(connection: Database) -> None:
    limit(connection, max_concurrency=50)
    add_keyed(connection, "a", 8, burst=True, task_name="short")
    assert len(Ring(connection).take(8, idle=2, short_names=["short"])) == 2


def test_workers_store_the_limits_of_their_configuration(connection: Database) -> None:
    limits = {
        "queue_name": "api",
        "max_concurrency": 2,
        "weight": 1.0,
        "is_fifo": False,
        "halts": False,
    }
    step = store_lane_limits(json.dumps([limits]), ["api", "mail"])
    step[0].run(connection, step[1])
    limit(connection, "acme", "api", max_concurrency=9)
    query = (
        "SELECT queue_name, lane_key, max_concurrency FROM horsies_lanes ORDER BY max_concurrency"
    )
    assert connection.execute(query).fetchall() == [("api", None, 2), ("api", "acme", 9)]
    step = store_lane_limits("[]", ["api", "mail"])
    step[0].run(connection, step[1])
    assert connection.execute(query).fetchall() == [("api", "acme", 9)]


@pytest.fixture
def claimers(process_url: str) -> Iterator[list[psycopg.Connection[Any]]]:
    connections = [psycopg.connect(process_url, autocommit=True) for _ in range(6)]
    yield connections
    for one in connections:
        one.close()


def test_caps_hold_at_every_instant_however_many_claim(
    connection: Database, claimers: list[psycopg.Connection[Any]]
) -> None:
    limit(connection, max_concurrency=2)
    for key in "abcde":
        add_many_keyed(connection, key, 60)
    most: Counter[str] = Counter()
    running: Counter[str] = Counter()
    guard = threading.Lock()
    left = [300]

    def serve(one: psycopg.Connection[Any], number: int) -> None:
        ring = Ring(one)
        while left[0] > 0:
            taken = ring.take(3, worker_id=f"w{number}")
            keys = [str(task.lane) for task in taken]
            with guard:  # the claim has committed, the end has not begun
                for key in keys:
                    running[key] += 1
                    most[key] = max(most[key], running[key])
            with guard:
                for key in keys:
                    running[key] -= 1
                left[0] -= len(taken)
            if taken:
                ids = [task.id for task in taken]
                complete_tasks.run(
                    one,
                    CompleteTasks(
                        f"w{number}",
                        ids,
                        [task.generation for task in taken],
                        ["{}"] * len(ids),
                        [None] * len(ids),
                    ),
                )

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(serve, claimers, range(6)))
    assert left == [0]
    assert len(most) == 5
    assert max(most.values()) == 2
    query = """SELECT max(overlap) FROM (
        SELECT (SELECT count(*) FROM horsies_tasks AS other
                WHERE other.lane = task.lane AND other.claimed_at <= task.claimed_at
                  AND other.completed_at > task.claimed_at) AS overlap
        FROM horsies_tasks AS task) AS found"""
    assert connection.execute(query).fetchall() == [(2,)]
