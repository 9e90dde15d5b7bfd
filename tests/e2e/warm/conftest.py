"""Fixtures: one worker for all tests of a module, which neither kill nor configure it.

A module may name what its worker needs in WORKER, the arguments of `Fleet.start`, and its flags in OPTIONS.
Every test starts with empty tables and sees its own lines of the journal only.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import psycopg
import pytest

from horsies.testing.database import empty_tables
from tests.support.database import Database
from tests.support.routes import FLEETS
from tests.support.tables import wait_until_empty
from tests.support.workers import Fleet, Journal, Route, RunningWorker

# Rows of attempts, nodes and signals go with the row they belong to.
EMPTIED = ("horsies_workflows", "horsies_tasks")


@pytest.fixture(scope="module")
def warm_fleet(
    process_url: str,
    route: Route,
    programs: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Fleet]:
    """The worker of this module, ready."""
    with psycopg.connect(process_url, autocommit=True) as connection:
        empty_tables(connection)
    fleet = Fleet(process_url, tmp_path_factory.mktemp("warm"), route=route)
    try:
        options = getattr(request.module, "OPTIONS", ())
        fleet.start(*options, **getattr(request.module, "WORKER", {}))
        yield fleet
    finally:
        fleet.destroy()
        # Its connection for results would be in the way of tests that count connections.
        programs.app.close()


@pytest.fixture
def worker(warm_fleet: Fleet, request: pytest.FixtureRequest) -> RunningWorker:
    """The worker of this module; its log is shown when the test fails."""
    request.node.stash.setdefault(FLEETS, []).append(warm_fleet)
    return warm_fleet.workers[0]


@pytest.fixture
def connection(process_url: str, worker: RunningWorker) -> Iterator[Database]:
    """The tables emptied row by row: TRUNCATE under a working worker can end in a deadlock."""
    with psycopg.connect(process_url, autocommit=True) as connection:
        for table in EMPTIED:
            connection.execute(f"DELETE FROM {table}".encode())
        yield connection
        wait_until_empty(connection)


@pytest.fixture
def journal(warm_fleet: Fleet, connection: Database) -> Journal:
    """The lines that this test's tasks write."""
    journal = warm_fleet.journal
    return Journal(journal.path, skipped=journal.length())
