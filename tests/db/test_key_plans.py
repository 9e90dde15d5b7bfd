"""What the statements on keys read, with very many tasks of one key: as much as they return, and hardly more.

HORSIES_TEST_OUTAGES=long takes a million tasks.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psycopg
import pytest

from horsies.db.statement import Step
from horsies.db.statements.monitor import count_waiting
from horsies.db.statements.turn import (
    ClaimTasks,
    LookAhead,
    LookAtKeys,
    claim_tasks,
    look_at_keys,
    seconds_until_due,
)
from tests.db.test_keys import Ring, add_keyed, add_many_keyed
from tests.db.test_limits_of_keys import limit
from tests.db.test_query_plans import reads
from tests.support.database import Database

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
    return [
        (claim_tasks, claim),
        (look_at_keys, LookAtKeys(QUEUES, 10)),
        (seconds_until_due, LookAhead(QUEUES, None)),
        count_waiting(100),
    ]


@pytest.mark.parametrize("is_limited", [False, True], ids=["fair", "capped"])
def test_no_statement_reads_the_tasks_of_the_noisy_key(crowded: Database, is_limited: bool) -> None:
    if is_limited:
        limit(crowded, max_concurrency=4)
    for statement, params in steps():
        with crowded.transaction():
            started = time.perf_counter()
            rows, scans, fetched, entries = reads(crowded, (statement, params))
            taken_ms = 1000 * (time.perf_counter() - started)
        print(f"{statement.name}: {fetched} rows, {entries} entries, {taken_ms:.1f} ms")
        assert scans == 0, statement.name
        assert fetched + entries < 1_000, statement.name
        assert rows


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


def test_claims_beside_an_open_transaction_stay_quick(
    connection: Database, process_url: str
) -> None:
    """The entries of claimed tasks stay in the index as long as any transaction is open."""
    add_many_keyed(connection, "noisy", 20_000)
    with psycopg.connect(process_url) as other:
        other.execute("SELECT count(*) FROM horsies_tasks")
        ring = Ring(connection)
        ring.claim(8)
        first = seconds_of(ring, 50)
        for _ in range(20):
            ring.take(200)
        last = seconds_of(ring, 50)
    print(
        f"{1000 * first / 50:.2f} ms a claim at first, {1000 * last / 50:.2f} ms after 4,000 tasks"
    )


def seconds_of(ring: Any, claims: int) -> float:
    started = time.perf_counter()
    for _ in range(claims):
        ring.take(8)
    return time.perf_counter() - started
