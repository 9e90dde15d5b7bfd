"""The claim by bookmarks: it looks behind them first, everywhere else soon, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimedTask, ClaimTasks, claim_tasks
from horsies.worker.turn import (
    EVERYWHERE,
    EVERYWHERE_SECONDS,
    Bookmarks,
    Claimer,
    Positions,
    TurnRequest,
)
from tests.support.examples import examples
from tests.support.rows import add_task, ago

QUEUES = ("first", "second")


class Taker:
    """A worker's claims on a clock of the test's own, one task per idle child."""

    def __init__(
        self, connection: Connection[Any], queues: Sequence[str] = QUEUES, name: str = "taker"
    ) -> None:
        self.claimer = Claimer(name, "host", queues, [None] * len(queues))
        self.bookmarks = Bookmarks(queues)
        self.now = 1_000.0
        self._pipeline = Pipeline(connection, prepared=False)

    def take(self, children: int = 1, positions: Positions | None = None) -> list[ClaimedTask]:
        positions = self.bookmarks.positions(self.now) if positions is None else positions
        wanted = TurnRequest(pids=list(range(1, children + 1)), positions=positions)
        claimed = self._pipeline.run([self.claimer.claim_step(wanted)])[0]
        was_short = len(claimed) < children
        self.bookmarks.note_claim(
            positions, claimed, was_short=was_short, span=(self.now, self.now)
        )
        return sorted(claimed, key=lambda task: task.worker_pid or 0)

    def take_ids(self, children: int = 1) -> list[str]:
        return [task.id for task in self.take(children)]


def behind(task: ClaimedTask, *, looks_everywhere: bool = True) -> Positions:
    return Positions([task.priority], [task.enqueued_at], [task.id], looks_everywhere)


@pytest.fixture
def taker(connection: Connection[Any]) -> Taker:
    return Taker(connection)


def test_a_bookmark_comes_back_to_the_microsecond(connection: Connection[Any]) -> None:
    moment = "2026-01-02 03:04:05.678901+00"
    first, second = sorted(
        add_task(connection, queue_name="first", enqueued_at=moment) for _ in range(2)
    )
    taker = Taker(connection)
    (task,) = taker.take()
    assert task.id == first
    (following,) = taker.take(
        positions=Positions([100, None], [task.enqueued_at, None], [first, None], False)
    )
    assert following.id == second


def test_behind_a_bookmark_the_order_is_exact(connection: Connection[Any], taker: Taker) -> None:
    expected = [
        add_task(connection, queue_name="first", enqueued_at=ago(9 - number)) for number in range(6)
    ]
    taken = [taker.take_ids() for _ in range(4)]
    assert [*taken, taker.take_ids(2)] == [[one] for one in expected[:4]] + [expected[4:]]


def test_tasks_of_one_moment_are_told_apart_by_their_ids(
    connection: Connection[Any], taker: Taker
) -> None:
    with connection.transaction():
        expected = sorted(add_task(connection, queue_name="first") for _ in range(6))
    assert [taker.take_ids(2) for _ in range(3)] == [expected[:2], expected[2:4], expected[4:]]


def test_an_older_task_is_claimed_within_the_bound(
    connection: Connection[Any], taker: Taker
) -> None:
    waiting = [
        add_task(connection, queue_name="first", enqueued_at=ago(9 - number)) for number in range(5)
    ]
    assert taker.take_ids() == waiting[:1]
    older = add_task(connection, queue_name="first", enqueued_at=ago(60))
    taker.now += EVERYWHERE_SECONDS / 2
    assert taker.take_ids() == waiting[1:2]
    taker.now += EVERYWHERE_SECONDS
    assert taker.take_ids() == [older]
    assert taker.take_ids(9) == waiting[2:]


def test_an_older_task_that_was_notified_is_claimed_next(
    connection: Connection[Any], taker: Taker
) -> None:
    waiting = [add_task(connection, queue_name="first") for _ in range(2)]
    assert taker.take_ids() == waiting[:1]
    older = add_task(connection, queue_name="first", enqueued_at=ago(120))
    taker.bookmarks.note_news()
    assert taker.take_ids(2) == [older, waiting[1]]


def test_an_older_task_is_claimed_at_once_when_nothing_else_is_left(
    connection: Connection[Any], taker: Taker
) -> None:
    first, second = (add_task(connection, queue_name="first") for _ in range(2))
    assert taker.take_ids() == [first]
    older = add_task(connection, queue_name="first", enqueued_at=ago(120))
    assert taker.take_ids(3) == [second, older]


def test_a_resting_claim_leaves_what_stands_before_its_bookmark(
    connection: Connection[Any],
) -> None:
    taker = Taker(connection, ["first"])
    first = add_task(connection, queue_name="first")
    (task,) = taker.take()
    assert task.id == first
    older = add_task(connection, queue_name="first", enqueued_at=ago(120))
    assert taker.take(positions=behind(task, looks_everywhere=False)) == []
    (found,) = taker.take(positions=behind(task))
    assert found.id == older


def test_a_better_priority_is_claimed_within_the_bound(
    connection: Connection[Any], taker: Taker
) -> None:
    waiting = [
        add_task(connection, queue_name="first", priority=50, enqueued_at=ago(9 - number))
        for number in range(4)
    ]
    assert taker.take_ids() == waiting[:1]
    better = add_task(connection, queue_name="first", priority=10)
    assert taker.take_ids() == waiting[1:2]
    taker.now += EVERYWHERE_SECONDS
    assert taker.take_ids(2) == [better, waiting[2]]


def test_worse_priorities_follow_when_a_bookmarked_one_is_used_up(
    connection: Connection[Any], taker: Taker
) -> None:
    expected = [
        add_task(connection, queue_name="first", priority=priority) for priority in (1, 1, 5, 5, 9)
    ]
    assert taker.take_ids() == expected[:1]
    assert taker.take_ids(3) == expected[1:4]
    assert taker.take_ids() == expected[4:]


def test_an_earlier_queue_goes_first_behind_bookmarks_too(
    connection: Connection[Any], taker: Taker
) -> None:
    second = [
        add_task(connection, queue_name="second", enqueued_at=ago(9 - number))
        for number in range(4)
    ]
    assert taker.take_ids() == second[:1]
    first = [add_task(connection, queue_name="first") for _ in range(2)]
    assert taker.take_ids() == first[:1]
    assert taker.take_ids(2) == [first[1], second[1]]
    assert taker.take_ids(9) == second[2:]


def test_limits_hold_over_both_looks(connection: Connection[Any]) -> None:
    tasks = [add_task(connection, queue_name="first", enqueued_at=ago(9 - n)) for n in range(3)]
    older = [add_task(connection, queue_name="first", enqueued_at=ago(60)) for _ in range(3)]
    connection.execute("UPDATE horsies_tasks SET held = true WHERE id = ANY(%s::uuid[])", (older,))
    taker = Taker(connection, ["first"])
    (task,) = taker.take()
    connection.execute("UPDATE horsies_tasks SET held = false WHERE id = ANY(%s::uuid[])", (older,))
    positions = behind(task)
    wanted = ClaimTasks(
        "limited",
        "host",
        [1, 2, 3, 4, 5],
        ["first"],
        [3],
        marked_priorities=positions.priorities,
        marked_moments=positions.enqueued_at,
        marked_ids=positions.ids,
    )
    claimed = {task.id for task in claim_tasks.run(connection, wanted)}
    assert len(claimed) == 3
    assert claimed >= set(tasks[1:])


def test_caps_hold_over_both_looks(connection: Connection[Any]) -> None:
    for number in range(3):
        add_task(connection, queue_name="first", enqueued_at=ago(9 - number))
    taker = Taker(connection, ["first"])
    (task,) = taker.take()
    for _ in range(3):
        add_task(connection, queue_name="first", enqueued_at=ago(60))
    positions = behind(task)
    wanted = ClaimTasks(
        "capped",
        "host",
        [1, 2, 3, 4, 5],
        ["first"],
        [5],
        queue_caps=[4],
        marked_priorities=positions.priorities,
        marked_moments=positions.enqueued_at,
        marked_ids=positions.ids,
    )
    assert len(claim_tasks.run(connection, wanted)) == 3


def test_a_paused_queue_gives_nothing_behind_a_bookmark(
    connection: Connection[Any], taker: Taker
) -> None:
    first, second = (add_task(connection, queue_name="first") for _ in range(2))
    assert taker.take_ids() == [first]
    connection.execute("INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('first', now())")
    assert taker.take_ids() == []
    connection.execute("UPDATE horsies_queues SET paused_at = NULL")
    assert taker.take_ids() == [second]


def test_what_another_worker_had_locked_is_claimed_after_its_rollback(
    connection: Connection[Any], process_url: str
) -> None:
    tasks = [add_task(connection, queue_name="first", enqueued_at=ago(9 - n)) for n in range(4)]
    with psycopg.connect(process_url) as other:
        other.execute("SELECT 1")  # begins the transaction
        assert Taker(other, name="other").take_ids() == tasks[:1]
        taker = Taker(connection)
        assert taker.take_ids() == tasks[1:2]
        other.rollback()
    assert taker.take_ids() == tasks[2:3]
    taker.now += EVERYWHERE_SECONDS
    assert taker.take_ids(2) == [tasks[0], tasks[3]]


def test_behind_a_bookmark_dead_entries_are_not_walked_over(
    connection: Connection[Any], process_url: str
) -> None:
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, enqueued_at) "
        "SELECT gen_random_uuid(), 'work', 'first', 'sha', now() - (9000 - n) * interval '1 ms' "
        "FROM generate_series(1, 3000) AS n"
    )
    taker = Taker(connection, ["first"])
    with psycopg.connect(process_url) as snapshot:
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT 1")
        tasks = taker.take(2_000)
        mark = behind(max(tasks, key=lambda task: task.enqueued_at))
        # Twice: the first one may read the catalogue again, after an ANALYZE for instance.
        marked = min(pages_read(connection, mark) for _ in range(2))
        everywhere = min(pages_read(connection, EVERYWHERE) for _ in range(2))
    assert marked * 3 < everywhere


def pages_read(connection: Connection[Any], positions: Positions) -> int:
    """Count the pages a claim of one task looks at, without claiming it."""
    claim = ClaimTasks(
        "reader",
        "host",
        [1],
        ["first"],
        [1],
        marked_priorities=list(positions.priorities),
        marked_moments=list(positions.enqueued_at),
        marked_ids=list(positions.ids),
    )
    with connection.transaction(force_rollback=True):
        found = connection.execute(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + claim_tasks.text,
            claim_tasks.mapping(claim),
        ).fetchone()
    assert found is not None
    plan = found[0] if isinstance(found[0], list) else json.loads(found[0])
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("add"),
                st.sampled_from(QUEUES),
                st.sampled_from([1, 5, 100]),
                st.integers(0, 60),
            ),
            st.tuples(st.just("take"), st.integers(0, 1), st.integers(1, 4)),
            st.tuples(st.just("wait"), st.floats(0, EVERYWHERE_SECONDS)),
        ),
        max_size=25,
    )
)
def test_whatever_is_added_when_every_task_is_claimed_once(
    connection: Connection[Any], steps: list[tuple[Any, ...]]
) -> None:
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    takers = [Taker(connection, name="one"), Taker(connection, name="two")]
    added: list[str] = []
    taken: list[str] = []
    for step in steps:
        match step:
            case ("add", queue, priority, seconds):
                columns = {"queue_name": queue, "priority": priority, "enqueued_at": ago(seconds)}
                added.append(add_task(connection, **columns))
            case ("take", number, children):
                taken += takers[number].take_ids(children)
            case ("wait", seconds):
                for taker in takers:
                    taker.now += seconds
    for taker in takers:
        taken += taker.take_ids(len(added) + 1)
    assert sorted(taken) == sorted(added)
