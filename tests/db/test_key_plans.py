"""What the statements on keys read, with very many tasks of one key: as much as they return, and hardly more.

HORSIES_TEST_OUTAGES=long takes a million tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from horsies.db.statement import Statement, Step, drive
from horsies.db.statements.blocked import find_due
from horsies.db.statements.dashboard import next_in_queue
from horsies.db.statements.explain import count_ahead_in_lane, explain_task
from horsies.db.statements.keys import (
    count_keys,
    count_paused_due,
    find_paused_keys,
    list_held_queues,
    list_keys,
    read_key,
    read_lane,
)
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
    seconds_until_rated,
)
from horsies.monitor.diagnose.explain import explain_task_script
from horsies.monitor.diagnose.queues import COUNT_MAX
from horsies.tasks.keys import lane_of
from tests.support.database import Database
from tests.support.keys import Ring, add_keyed, add_many_keyed, limit
from tests.support.query_plans import task_reads
from tests.support.rows import add_snapshot, add_task, add_worker, ago

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
        (seconds_until_rated, LookAhead(QUEUES, None)),
        count_waiting(100),
        list_keys("default", 50, 100),
        read_key("default", "noisy", 100),
        read_lane("default", NOISY, 100),
        count_keys(100),
        next_in_queue("default", 100),
        count_ahead_in_lane("default", NOISY, 100, datetime.now(UTC), LAST_ID, limit=100),
        explain_task(FIRST_ID),
        find_paused_keys(None, 20, 100),
        list_held_queues(QUEUES, 100),
        count_paused_due(QUEUES, 100),
        find_due(QUEUES, [], [], 100, []),
        find_due(QUEUES, [], [], 100, [], ["work"], 0.0),
        (claim_batch, batch),
        (claim_unresolvable, ClaimUnresolvable("w", "host", QUEUES, ["work"], 0.0, 10)),
    ]


# These may find nothing: a limit or the pause of a key leaves no task to them, no key is paused, or no task
# has the id; the explanations below read tasks that exist.
MAY_FIND_NONE = {"claim_batch", "claim_unresolvable", "find_paused_keys", "explain_task"}
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
    explain_each(crowded)


def claim_each(connection: Database) -> None:
    assert "noisy" in Ring(connection).claim(100), "each key has its turn"


def cap_the_queue(connection: Database) -> None:
    claim_each(connection)
    caps = '{"default": 1}'
    workers = connection.execute("SELECT worker_id FROM horsies_workers").fetchall()
    add_snapshot(connection, workers[0][0], queue_max_concurrency=caps)


def halt(connection: Database) -> None:
    limit(connection, is_fifo=True, halts=True)
    limit(connection, "noisy", paused_at="2026-01-01", pause_reason=f"task {FIRST_ID} failed: X")


def rate(connection: Database) -> None:
    limit(connection, "noisy", rate_seconds=600, rate_burst=1)
    claim_each(connection)


# What holds the newest task of the noisy key back, and how a test brings that about.
REASONS: dict[str, Callable[[Database], Any]] = {
    "KEY_CAP": partial(limit, key="noisy", max_concurrency=0),
    "KEY_RATE": rate,
    "KEY_PAUSED": partial(limit, key="noisy", paused_at="2026-01-01", pause_reason="asked for it"),
    "KEY_HALTED": halt,
    "KEY_ORDER": partial(limit, is_fifo=True),
    "BEHIND": lambda _: None,
    "QUEUE_PAUSED": lambda connection: connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    ),
    "QUEUE_CAP": cap_the_queue,
    "SENT_FOR_LATER": lambda _: None,
    "QUEUE_UNSERVED": lambda connection: connection.execute("DELETE FROM horsies_workers"),
}


def explain_each(crowded: Database) -> None:
    add_worker(crowded)
    for code, bring_about in REASONS.items():
        with crowded.transaction(force_rollback=True):
            due_at = ago(-600) if code == "SENT_FOR_LATER" else ago(1)
            columns = {"lane": NOISY, "lane_key": "noisy", "held": True, "enqueued_at": due_at}
            task_id = add_task(crowded, **columns)
            bring_about(crowded)
            codes, cost = explained(crowded, task_id)
            print(f"{code}: {codes}, {cost} rows and index entries")
            assert code in codes
            # The tasks before it are counted up to a limit, and so are those of the key.
            assert cost < 5 * COUNT_MAX < MANY, code


def explained(connection: Database, task_id: str) -> tuple[list[str], int]:
    """The codes of a task's reasons, and how many rows and index entries of tasks were read for them."""
    costs: list[int] = []

    def execute(statement: Statement[Any, Any], params: Any) -> list[Any]:
        rows, scans, fetched, entries = task_reads(connection, (statement, params))
        assert scans == 0, statement.name
        costs.append(fetched + entries)
        return list(rows)

    explanation = drive(execute, explain_task_script(task_id))
    return [one.code for one in explanation.reasons], sum(costs)


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
