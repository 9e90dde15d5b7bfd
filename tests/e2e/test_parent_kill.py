"""A worker killed at any moment loses no task, records none twice, and leaves no process behind."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    recover_dead_workers,
    tasks,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, RunningWorker, is_gone

# `make soak` kills thirty.
KILLS = 30 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 5


def kill_at_a_random_moment(
    worker: RunningWorker, journal: Journal, dice: random.Random
) -> list[int]:
    """Kill the parent after a random number of journal lines; the children it had.

    They are those from its start: a look at the process table takes longer than a few tasks.
    """
    wanted = journal.length() + dice.randint(0, 12)
    wait_until(lambda: journal.length() >= wanted)
    for _ in range(dice.randint(0, 2_000)):
        os.getpid()  # a few hundred microseconds: not always right after a line
    worker.signal(signal.SIGKILL)
    worker.wait()
    return list(worker.seen_pids)


@pytest.mark.timeout(300)
def test_killed_parents_lose_nothing_and_repeat_nothing(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    dice = random.Random(seed)
    print(f"seed {seed}")
    sent: set[str] = set()

    def send_more() -> None:
        calls = [programs.sleep.bind(dice.random() / 10) for _ in range(10)]
        sent.update(one.task_id for one in programs.sleep.send_many(calls).unwrap())
        calls = [programs.sleep_again.bind(dice.random() / 10) for _ in range(10)]
        sent.update(one.task_id for one in programs.sleep_again.send_many(calls).unwrap())

    # "fork" starts twice as fast; what dies and how is the same.
    with witnessed(connection):
        for _ in range(KILLS):
            method = dice.choice(["fork", "fork", "forkserver"])
            worker = fleet.start("--start-method", method, processes=4)
            send_more()
            family = kill_at_a_random_moment(worker, journal, dice)
            assert len(family) >= 4
            wait_until(lambda family=family: all(map(is_gone, family)), 30, "children outlived")  # type: ignore[misc]
            recover_dead_workers(connection)
        fleet.start("--start-method", "fork", processes=4)
        wait_until_empty(connection, 60)
        check_books(connection, journal, sent)


def check_books(connection: Database, journal: Journal, sent: set[str]) -> None:
    """Compare the sent tasks, the recorded outcomes, and the journal of the tasks."""
    rows = {row.id: row for row in tasks(connection)}
    assert set(rows) == sent
    assert_each_ended_once(connection)
    starts = Counter((line.task_id, line.attempt) for line in journal.lines("start"))
    ends = Counter((line.task_id, line.attempt) for line in journal.lines("end"))
    assert set(starts.values()) == {1}
    recorded = {(one.task_id, one.attempt): one for one in attempts(connection)}
    assert set(starts) <= set(recorded)
    for key, attempt in recorded.items():
        row = rows[attempt.task_id]
        if attempt.outcome == "COMPLETED":
            assert (starts[key], ends[key], row.status) == (1, 1, "COMPLETED")
        else:
            assert attempt.outcome == "WORKER_FAILURE"
            assert starts[key] <= 1
    for row in rows.values():
        made = sorted(attempt for task_id, attempt in recorded if task_id == row.id)
        assert made == list(range(1, row.retry_count + 2))
    crashed = [one for one in recorded.values() if one.outcome == "WORKER_FAILURE"]
    print(f"{len(sent)} tasks, {len(recorded)} attempts, {len(crashed)} ended by a kill")
    assert crashed
    assert count(connection, "COMPLETED") > len(sent) / 2
