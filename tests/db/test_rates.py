"""Rates: how many tasks of a queue start in a time, dealt by the claim however many claim at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    LookAhead,
    claim_tasks,
    seconds_until_rated,
)
from tests.support.database import Database
from tests.support.rows import add_task
from tests.support.wait import wait_until

SLOW = 3600.0


def claim(
    connection: Database,
    children: int = 9,
    queues: Sequence[str] = ("api",),
    seconds: Sequence[float | None] = (SLOW,),
    bursts: Sequence[int | None] = (2,),
    **more: Any,
) -> list[ClaimedTask]:
    """Claim for so many idle children under these rates."""
    wanted = ClaimTasks(
        "worker-1",
        "host",
        list(range(1, children + 1)),
        list(queues),
        [children] * len(queues),
        rate_seconds=list(seconds),
        rate_bursts=list(bursts),
        **more,
    )
    return claim_tasks.run(connection, wanted)


def fill(connection: Database, count: int, queue: str = "api") -> None:
    for _ in range(count):
        add_task(connection, queue_name=queue)


def until_start(connection: Database, last_look: Any = None) -> float | None:
    (row,) = seconds_until_rated.run(connection, LookAhead(["api", "open"], last_look))
    return row.start_seconds


def shift_clock(connection: Database, seconds: float) -> None:
    """Let the database's clock jump, as the meters see it."""
    connection.execute(
        "UPDATE horsies_meters SET next_at = next_at - %s * interval '1 second'", (seconds,)
    )


def test_a_burst_starts_at_once_and_the_rest_waits(connection: Database) -> None:
    fill(connection, 5)
    assert len(claim(connection)) == 2
    assert claim(connection) == []
    shift_clock(connection, SLOW)
    assert len(claim(connection)) == 1
    shift_clock(connection, 10 * SLOW)
    assert len(claim(connection)) == 2


def test_a_burst_of_one_spaces_the_starts(connection: Database) -> None:
    fill(connection, 3)
    assert len(claim(connection, bursts=[1])) == 1
    shift_clock(connection, SLOW - 5)
    assert claim(connection, bursts=[1]) == []
    shift_clock(connection, 5)
    assert len(claim(connection, bursts=[1])) == 1


def test_a_rate_holds_back_its_own_queue_alone(connection: Database) -> None:
    fill(connection, 4)
    fill(connection, 4, "open")
    claimed = claim(connection, queues=["api", "open"], seconds=[SLOW, None], bursts=[2, None])
    assert [task.queue_name for task in claimed] == ["api"] * 2 + ["open"] * 4
    assert connection.execute("SELECT queue_name FROM horsies_meters").fetchall() == [("api",)]


def test_two_queues_have_their_own_meters(connection: Database) -> None:
    fill(connection, 4)
    fill(connection, 4, "mail")
    names, seconds = ["mail", "api"], [SLOW, SLOW]
    claimed = claim(connection, queues=names, seconds=seconds, bursts=[3, 1])
    assert [task.queue_name for task in claimed] == ["mail"] * 3 + ["api"]
    assert claim(connection, queues=names, seconds=seconds, bursts=[3, 1]) == []


def test_the_smaller_of_cap_and_rate_applies(connection: Database) -> None:
    fill(connection, 5)
    assert len(claim(connection, bursts=[4], queue_caps=[1])) == 1
    assert len(claim(connection, bursts=[4], queue_caps=[9])) == 3


def test_a_claim_that_rolls_back_uses_no_start(connection: Database, process_url: str) -> None:
    fill(connection, 3)
    with psycopg.connect(process_url) as other:
        assert len(claim(other)) == 2
        other.rollback()
    assert len(claim(connection)) == 2


def test_starts_that_found_no_task_are_not_used(connection: Database) -> None:
    assert claim(connection) == []
    fill(connection, 3)
    assert len(claim(connection)) == 2


def test_a_worker_learns_when_the_next_task_may_start(connection: Database) -> None:
    fill(connection, 5)
    assert until_start(connection) is None
    claim(connection)
    seconds = until_start(connection)
    assert seconds is not None
    assert SLOW - 60 < seconds <= SLOW
    shift_clock(connection, SLOW)
    assert until_start(connection) == 0
    # A start that was free at the last look already held nothing back.
    (row,) = seconds_until_rated.run(connection, LookAhead(["api"], None))
    assert until_start(connection, row.looked_at) is None


def test_an_empty_queue_wakes_no_worker(connection: Database) -> None:
    fill(connection, 2)
    claim(connection)
    assert until_start(connection) is None


def test_a_clock_that_steps_back_delays_by_no_more_than_the_step(connection: Database) -> None:
    fill(connection, 9)
    claim(connection, seconds=[1.0], bursts=[1])
    shift_clock(connection, -5)
    seconds = until_start(connection)
    assert seconds is not None
    assert seconds <= 6
    shift_clock(connection, 3600)
    assert len(claim(connection, seconds=[1.0], bursts=[1])) == 1


@pytest.mark.parametrize("burst", [1, 5])
def test_many_claimers_never_exceed_the_rate(
    connection: Database, process_url: str, burst: int
) -> None:
    """In any window of the period at most count + burst - 1 tasks start."""
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, enqueued_at) "
        "SELECT gen_random_uuid(), 'work', 'api', 's', now() FROM generate_series(1, 300)"
    )
    seconds = 0.02
    ends_at = time.monotonic() + 1.5
    asked_at: dict[str, float] = {}

    def serve() -> None:
        with psycopg.connect(process_url, autocommit=True) as own:
            while time.monotonic() < ends_at:
                now = own.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
                assert now is not None
                taken = claim(own, 3, seconds=[seconds], bursts=[burst])
                asked_at.update((task.id, now[0]) for task in taken)

    with ThreadPoolExecutor(6) as threads:
        for one in [threads.submit(serve) for _ in range(6)]:
            one.result()
    rows = connection.execute(
        "SELECT id::text, extract(epoch FROM claimed_at)::float8 FROM horsies_tasks "
        "WHERE claimed_at IS NOT NULL ORDER BY 2"
    ).fetchall()
    assert len(rows) == len(asked_at) > burst
    # A start is dealt after it was asked for, and before it is stamped.
    for place, (first, _) in enumerate(rows):
        for later in range(place + burst, len(rows)):
            allowed = (rows[later][1] - asked_at[first]) / seconds + burst
            assert later - place + 1 <= allowed + 1e-3


def test_another_rate_holds_at_once_and_keeps_the_starts_so_far(connection: Database) -> None:
    fill(connection, 9)
    assert len(claim(connection, bursts=[2])) == 2
    assert claim(connection, seconds=[60], bursts=[2]) == []
    assert 50 < (until_start(connection) or 0) <= 60, "an hour under the old rate"
    assert claim(connection, seconds=[SLOW], bursts=[2]) == []
    assert 50 * 60 < (until_start(connection) or 0) <= SLOW
    assert len(claim(connection, seconds=[SLOW], bursts=[3])) == 1, "two of three are used"
    shift_clock(connection, -SLOW)  # stepped back: more is ahead than any burst can be
    assert claim(connection, seconds=[60], bursts=[1]) == []
    assert 50 < (until_start(connection) or 0) <= 180


def test_workers_of_two_rates_do_not_lend_each_other_starts(connection: Database) -> None:
    fill(connection, 40)
    for _ in range(5):
        claim(connection, bursts=[8])
        claim(connection, seconds=[SLOW / 2], bursts=[1])
    assert connection.execute("SELECT FROM horsies_tasks WHERE status = 'RUNNING'").rowcount == 8


def test_a_turn_that_waits_for_a_meter_deals_what_is_left(
    connection: Database, process_url: str
) -> None:
    fill(connection, 5)
    claim(connection, bursts=[1])
    shift_clock(connection, SLOW)
    with psycopg.connect(process_url) as first, psycopg.connect(process_url) as second:
        assert len(claim(first, bursts=[1])) == 1
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(claim, second, bursts=[1])
            pid = second.info.backend_pid
            query = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
            wait_until(lambda: connection.execute(query, (pid,)).rowcount)
            first.commit()
            assert waiting.result() == []
