"""Effects exactly once when the primary fails over to its standby: at the commit of a task, and at random."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.migrate import apply_migrations
from horsies.db.task_transaction import TaskSession, open_pool
from tests.support.replicated_server import ReplicatedServer
from tests.support.routes import FLEETS
from tests.support.tables import attempts, wait_for_status, wait_until_empty
from tests.support.transactions import (
    APPLICATION,
    EFFECTS,
    add_bookings,
    assert_books_match,
    bookings,
    close_gate,
    has_begun,
    journal_of,
    report,
    seeded_dice,
    waits_at_gate,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet

pytestmark = [pytest.mark.direct("a pooler leads to one server"), pytest.mark.timeout(300)]

FAILOVERS = 10 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 2
ASYNC = ("--async-children", "1", "--async-slots", "4")


@pytest.fixture
def servers() -> Iterator[ReplicatedServer]:
    """A primary with the tables, and its standby."""
    with ReplicatedServer() as made:
        with psycopg.connect(made.url, autocommit=True) as connection:
            apply_migrations(connection)
            connection.execute(EFFECTS)
        yield made


@pytest.fixture
def replicated_fleet(
    servers: ReplicatedServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    fleet = Fleet(servers.url, tmp_path)
    request.node.stash.setdefault(FLEETS, []).append(fleet)
    yield fleet
    fleet.destroy()


def start(fleet: Fleet, processes: int) -> None:
    fleet.start(*ASYNC, application=APPLICATION, processes=processes, config=QUICK_RECOVERY)


def test_a_session_on_a_standby_is_refused_and_replaced(servers: ReplicatedServer) -> None:
    database = Database(PostgresConfig(database_url=servers.standby.url))
    pool = open_pool(database, 1)
    lent: Any = pool.take()
    with pytest.raises(psycopg.OperationalError, match="leads to a standby"):
        TaskSession(lent.connection, "0/1").begin()
    pool.put(lent)
    with pool.connection() as another:
        assert another is not lent.connection
    pool.close()


def only_task(connection: Connection[Any]) -> str:
    (row,) = connection.execute("SELECT id::text FROM horsies_tasks").fetchall()
    return str(row[0])


@pytest.mark.parametrize("number", [0, 1], ids=["sync", "async"])
def test_a_failover_between_the_recorded_outcome_and_the_commit_leaves_nothing(
    servers: ReplicatedServer, replicated_fleet: Fleet, booking: ModuleType, number: int
) -> None:
    with psycopg.connect(servers.url, autocommit=True) as connection:
        add_bookings(connection, booking, [number], seeded_dice())
        task_id = only_task(connection)
        close_gate(connection)
        start(replicated_fleet, processes=1)
        wait_until(lambda: waits_at_gate(connection))
        servers.fail_over("immediate")
    with psycopg.connect(servers.url, autocommit=True) as connection:
        wait_for_status(connection, task_id, "COMPLETED")
        codes = [one.error_code for one in attempts(connection, task_id)]
        assert codes == ["TRANSACTION_LOST", None]
        assert connection.execute("SELECT number, attempt FROM bookings").fetchall() == [
            (number, 2)
        ]
        wait_until_empty(connection)


def test_effects_are_the_completed_tasks_when_the_primary_fails_over(
    servers: ReplicatedServer, replicated_fleet: Fleet, booking: ModuleType
) -> None:
    dice, kills = seeded_dice(), Counter[str]()

    def add_sixty(number: int) -> None:
        with psycopg.connect(servers.url, autocommit=True) as connection:
            add_bookings(connection, booking, range(60 * number, 60 * (number + 1)), dice)

    start(replicated_fleet, processes=2)
    for number in range(FAILOVERS):
        # All earlier tasks may have ended, so only new tasks are sure to begin.
        wanted = journal_of(replicated_fleet).total() + dice.randint(1, 20)
        add_sixty(number)
        wait_until(partial(has_begun, replicated_fleet, wanted))
        servers.fail_over(dice.choice(("immediate", "fast")))
        kills["failover"] += 1
    add_sixty(FAILOVERS)
    with psycopg.connect(servers.url, autocommit=True) as connection:
        wait_until_empty(connection, 120)
        report(connection, kills)
        assert_books_match(connection, replicated_fleet, "book", "book_async")
        assert len(bookings(connection)) == 60 * (FAILOVERS + 1)
