"""What the statements on keys read, with very many tasks of one key: as much as they return, and hardly more.

HORSIES_TEST_OUTAGES=long takes a million tasks.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from horsies.db.statement import Step
from horsies.db.statements.blocked import find_due
from horsies.db.statements.dashboard import next_in_queue
from horsies.db.statements.explain import count_ahead_in_lane
from horsies.db.statements.keys import count_keys, find_paused_keys, list_keys, read_key, read_lane
from horsies.db.statements.monitor import count_waiting
from horsies.db.statements.turn import (
    ClaimBatch,
    ClaimTasks,
    ClaimUnresolvable,
    LookAhead,
    LookAtKeys,
    claim_batch,
    claim_tasks,
    claim_unresolvable,
    look_at_keys,
    seconds_until_due,
)
from horsies.tasks.keys import lane_of
from tests.support.database import Database
from tests.support.keys import Ring, add_keyed, add_many_keyed, limit
from tests.support.query_plans import task_reads

MANY = 1_000_000 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 100_000
QUEUES = ["default", "empty"]
NOISY = lane_of("default", "noisy").number
ASYNC = '{"async":true}'
FIRST_ID, LAST_ID = str(UUID(int=0)), str(UUID(int=2**128 - 1))


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
    for number in range(60):
        add_keyed(connection, f"quiet {number}")
    for key in ("noisy", "quiet 0"):
        add_keyed(connection, key, task_options=ASYNC)
    connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER USER")
    if not is_planned:
        connection.execute("ANALYZE horsies_tasks")
    return connection


def steps() -> list[Step]:
    pids = list(range(1, 9))
    claim = ClaimTasks("w", "host", pids, ["default"], [8], cursors=[0])
    marked = claim._replace(
        marked_lanes=[NOISY],
        lane_priorities=[100],
        lane_moments=["2026-01-01"],
        lane_ids=[FIRST_ID],
        freed_queues=["default"],
        freed_lanes=[NOISY],
    )
    batch = ClaimBatch(
        "w", "host", [FIRST_ID], [1], 8, "default", NOISY, "work", 8, 100, "2026-01-01"
    )
    return [
        (claim_tasks, claim),
        (claim_tasks, marked),
        (claim_tasks, claim._replace(is_async=True)),
        (claim_tasks, marked._replace(is_async=True)),
        (claim_tasks, claim._replace(is_async=False)),
        (claim_tasks, claim._replace(idle=2, short_names=["work"])),
        (look_at_keys, LookAtKeys(QUEUES, 10)),
        (seconds_until_due, LookAhead(QUEUES, None)),
        count_waiting(100),
        list_keys("default", 50, 100),
        read_key("default", "noisy", 100),
        read_lane("default", NOISY, 100),
        count_keys(100),
        next_in_queue("default", 100),
        count_ahead_in_lane("default", NOISY, 100, datetime.now(UTC), LAST_ID, limit=100),
        find_paused_keys(None, 20, 100),
        find_due(QUEUES, [], [], 100, []),
        find_due(QUEUES, [], [], 100, [], ["work"], 0.0),
        (claim_batch, batch),
        (claim_unresolvable, ClaimUnresolvable("w", "host", QUEUES, ["work"], 0.0, 10)),
    ]


# These may find nothing, because a limit or the pause of a key leaves no task to them, or no key is paused.
MAY_FIND_NONE = {"claim_batch", "claim_unresolvable", "find_paused_keys"}
LIMITS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"max_concurrency": 4}),
    (None, {"max_concurrency": 50, "weight": 3.0}),
    (None, {"rate_seconds": 0.001, "rate_burst": 9}),
    (None, {"is_fifo": True}),
    ("noisy", {"paused_at": "2026-01-01", "pause_reason": "asked for it"}),
]


def test_no_statement_reads_the_tasks_of_the_noisy_key(crowded: Database) -> None:
    for key, limits in LIMITS:
        with crowded.transaction(force_rollback=True):
            if limits:
                limit(crowded, key, **limits)
            for statement, params in steps():
                if key is not None and statement is claim_unresolvable:
                    continue  # it reads past the tasks of a paused key, only while no worker knows a name
                started = time.perf_counter()
                rows, scans, fetched, entries = task_reads(crowded, (statement, params))
                taken_ms = 1000 * (time.perf_counter() - started)
                found = f"{statement.name} {limits}: {fetched} rows, {entries} entries"
                print(f"{found}, {taken_ms:.1f} ms")
                assert scans == 0, found
                assert fetched + entries < 2_000, found
                assert rows or statement.name in MAY_FIND_NONE, found


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
