"""Debounced tasks: the newest arguments of every key are run, whichever workers die meanwhile."""

from __future__ import annotations

import signal
from collections import defaultdict
from datetime import timedelta
from types import ModuleType

from horsies import Debounce
from tests.support.database import Database
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet

KEYS, ROUNDS = 6, 60
SHORT = Debounce(quiet=timedelta(milliseconds=20), at_most=timedelta(milliseconds=80))


def starts(fleet: Fleet) -> int:
    return len(fleet.journal.lines("start"))


def test_the_newest_value_of_every_key_is_run_although_workers_are_killed(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    workers = [fleet.start(config=QUICK_RECOVERY) for _ in range(3)]
    tasks: dict[str, set[str]] = defaultdict(set)
    for number in range(0, ROUNDS, 2):
        known = starts(fleet)
        for place in range(KEYS):
            key = f"k{place}"
            sender = programs.sleep_again.with_options(idempotency_key=key, debounce=SHORT)
            # The second one comes so soon that the first one still waits, even on a busy machine.
            for value in (number, number + 1):
                handle = sender.send(0.02, label=f"{key}:{value}").unwrap()
                tasks[key].add(handle.task_id)
        if number in (ROUNDS // 3, 2 * ROUNDS // 3):
            # At least one task of this round starts after `known` was counted.
            wait_until(lambda known=known: starts(fleet) > known)  # type: ignore[misc]
            workers.pop().signal(signal.SIGKILL)
    open_tasks = "SELECT FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
    wait_until(lambda: not connection.execute(open_tasks).rowcount, 60)
    ended = {line.label for line in fleet.journal.lines("end")}
    assert {f"k{place}:{ROUNDS - 1}" for place in range(KEYS)} <= ended
    assert connection.execute("SELECT DISTINCT status FROM horsies_tasks").fetchall() == [
        ("COMPLETED",)
    ]
    # Each key ran more than once, and less often than it was sent.
    assert all(1 < len(found) < ROUNDS for found in tasks.values())
