"""A busy worker leaves tasks to others, an idle one costs next to nothing, and workers do not stampede."""

from __future__ import annotations

import time
from types import ModuleType

import psycopg

from tests.support.database import Database
from tests.support.tables import count, task, tasks
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal

POLL_SECONDS = 1
POLLS = 10
# Looking at the queues, showing life and looking for the dead are one transaction.
TRANSACTIONS_PER_POLL = 1


def test_a_fast_worker_takes_what_a_slow_one_cannot(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start(processes=1)
    slow = programs.sleep.send(60).unwrap()
    wait_until(lambda: journal.lines("start"))
    fleet.start(processes=1)
    short = programs.noop.send_many(programs.noop.bind() for _ in range(100)).unwrap()
    began = time.monotonic()
    wait_until(lambda: count(connection, "COMPLETED") == 100)
    print(f"100 tasks in {time.monotonic() - began:.2f} s beside a slow worker")
    assert task(connection, slow.task_id).status == "RUNNING"
    slow_worker = task(connection, slow.task_id).claimed_by_worker_id
    owners = {row.claimed_by_worker_id for row in tasks(connection, "COMPLETED")}
    assert len(owners) == 1
    assert slow_worker not in owners
    assert len(short) == 100


def last_transactions(server: Database, database: str) -> set[tuple[object, ...]]:
    """When each connection of the worker last began something; it keeps that while it rests."""
    return set(
        server.execute(
            "SELECT pid, query_start FROM pg_stat_activity "
            "WHERE datname = %s AND application_name LIKE 'horsies:%%' AND state = 'idle'",
            (database,),
        ).fetchall()
    )


def test_an_idle_worker_costs_next_to_nothing(
    fleet: Fleet, connection: Database, server_url: str
) -> None:
    config = {"resilience": {"notify_poll_interval_ms": POLL_SECONDS * 1_000}}
    fleet.start(config=config)
    database = connection.info.dbname
    seen: set[tuple[object, ...]] = set()
    with psycopg.connect(server_url, autocommit=True) as server:
        settled = time.monotonic() + 3 * POLL_SECONDS
        wait_until(lambda: time.monotonic() > settled)
        known = last_transactions(server, database)
        began = time.monotonic()
        while time.monotonic() < began + POLLS * POLL_SECONDS:
            seen |= last_transactions(server, database) - known
    per_poll = len(seen) / POLLS
    print(f"{per_poll:.1f} transactions per poll interval of an idle worker")
    assert 0 < per_poll < TRANSACTIONS_PER_POLL + 0.5


def test_one_task_starts_once_however_many_workers_wait_for_it(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    for worker in [fleet.start(processes=1, ready=False) for _ in range(3)]:
        worker.wait_until_ready()
    for _ in range(20):
        assert programs.sleep.send(0).unwrap().get(30_000).is_ok()
    assert len(journal.lines("start")) == 20
    assert {row.generation for row in tasks(connection)} == {1}
