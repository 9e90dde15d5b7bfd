"""What the statements on keys read, with very many tasks of one key: as much as they return, and hardly more.

HORSIES_TEST_OUTAGES=long takes a million tasks.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from horsies.db.statement import Step
from horsies.db.statements.keys import list_keys, read_key
from horsies.db.statements.monitor import count_waiting
from horsies.db.statements.turn import (
    ClaimTasks,
    LookAhead,
    LookAtKeys,
    claim_tasks,
    look_at_keys,
    seconds_until_due,
)
from horsies.tasks.keys import lane_of
from tests.support.database import Database
from tests.support.keys import Ring, add_keyed, add_many_keyed, limit
from tests.support.query_plans import task_reads

MANY = 1_000_000 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 100_000
QUEUES = ["default", "empty"]


@pytest.fixture(params=["analyzed", "planned on an empty table"])
def crowded(connection: Database, request: pytest.FixtureRequest) -> Database:
    """A session with generic plans, and a queue in which one key has nearly all tasks."""
    connection.execute("SET plan_cache_mode = force_generic_plan")
    is_planned = request.param != "analyzed"
    if is_planned:
        for step in steps():
            for _ in range(6):
                step[0].run(connection, step[1])
    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER USER")
    add_many_keyed(connection, "noisy", MANY)
    for number in range(20):
        add_keyed(connection, f"quiet {number}")
    connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER USER")
    if not is_planned:
        connection.execute("ANALYZE horsies_tasks")
    return connection


def steps() -> list[Step]:
    pids = list(range(1, 9))
    claim = ClaimTasks("w", "host", pids, ["default"], [8], cursors=[0])
    marked = claim._replace(
        marked_lanes=[lane_of("default", "noisy").number],
        lane_priorities=[100],
        lane_moments=["2026-01-01"],
        lane_ids=["00000000-0000-0000-0000-000000000000"],
        freed_queues=["default"],
        freed_lanes=[lane_of("default", "noisy").number],
    )
    return [
        (claim_tasks, claim),
        (claim_tasks, marked),
        (look_at_keys, LookAtKeys(QUEUES, 10)),
        (seconds_until_due, LookAhead(QUEUES, None)),
        count_waiting(100),
        list_keys("default", 50, 100),
        read_key("default", "noisy", 100),
    ]


LIMITS: list[dict[str, Any]] = [
    {},
    {"max_concurrency": 4},
    {"rate_seconds": 0.001, "rate_burst": 9},
    {"is_fifo": True},
]


def test_no_statement_reads_the_tasks_of_the_noisy_key(crowded: Database) -> None:
    for limits in LIMITS:
        with crowded.transaction(force_rollback=True):
            if limits:
                limit(crowded, **limits)
            for statement, params in steps():
                started = time.perf_counter()
                rows, scans, fetched, entries = task_reads(crowded, (statement, params))
                taken_ms = 1000 * (time.perf_counter() - started)
                found = f"{statement.name} {limits}: {fetched} rows, {entries} entries"
                print(f"{found}, {taken_ms:.1f} ms")
                assert scans == 0, found
                assert fetched + entries < 2_000, found
                assert rows, found


def test_the_task_of_another_key_is_in_the_next_claim(crowded: Database) -> None:
    ring = Ring(crowded)
    while "noisy" not in ring.claim(2):
        pass
    ring.cursor = 0
    for _ in range(40):
        ring.claim(1)
    add_keyed(crowded, "one more")
    found = [key for _ in range(2) for key in ring.claim(1)]
    assert "one more" in found, "two keys wait, and each has every second claim"
