"""Fixtures: workers as processes, the application they run, and their logs in failed tests."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies.db.migrate import apply_migrations
from tests.support.database import Database
from tests.support.hosts import Hosts, hosts_or_skip
from tests.support.private_server import PrivateServer
from tests.support.routes import FLEETS, THROUGH_PGBOUNCER, routed
from tests.support.routes import programs as programs
from tests.support.routes import route as route
from tests.support.transactions import effects_table
from tests.support.workers import Fleet, Journal, Route


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that make no sense behind a pooler, with the reason."""
    for item in items:
        marker = item.get_closest_marker("direct")
        if THROUGH_PGBOUNCER and marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"not through PgBouncer: {marker.args[0]}"))


@pytest.fixture(scope="session")
def flows(programs: ModuleType) -> ModuleType:
    """The workflows, once the database of their tasks is known."""
    return importlib.import_module("tests.support.apps.flows")


@pytest.fixture(scope="module")
def booking(programs: ModuleType) -> Iterator[ModuleType]:
    """The tasks with effects in the database of the application."""
    module = importlib.import_module("tests.support.apps.booking")
    yield module
    module.app.close()


@pytest.fixture
def effects(connection: Database) -> Iterator[Database]:
    """A connection to the database with the table of these effects."""
    with effects_table(connection):
        yield connection


@pytest.fixture
def fleet(
    process_url: str,
    route: Route,
    connection: psycopg.Connection[Any],
    programs: ModuleType,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Fleet]:
    """Workers on this process's database, whose tables are empty."""
    fleet = Fleet(process_url, tmp_path, route=route)
    request.node.stash.setdefault(FLEETS, []).append(fleet)
    yield fleet
    fleet.destroy()
    # Its connection for results would be in the way of tests that count connections.
    programs.app.close()


@pytest.fixture
def own_server() -> Iterator[PrivateServer]:
    """A server with our tables that the test may crash."""
    server = PrivateServer()
    with psycopg.connect(server.url, autocommit=True) as connection:
        apply_migrations(connection)
    yield server
    server.remove()


@pytest.fixture
def own_fleet(
    own_server: PrivateServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    """Workers on the server of their own."""
    with routed(own_server.url) as route:
        fleet = Fleet(own_server.url, tmp_path, route=route)
        request.node.stash.setdefault(FLEETS, []).append(fleet)
        yield fleet
        fleet.destroy()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """A host for the database and two for workers."""
    with hosts_or_skip() as made:
        yield made


@pytest.fixture
def journal(fleet: Fleet) -> Journal:
    """The journal that the tasks of this test's workers write."""
    return fleet.journal


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the workers' logs to a test that failed."""
    report = yield
    if report.failed:
        for fleet in item.stash.get(FLEETS, []):
            report.sections.extend(fleet.logs())
    return report


@pytest.fixture
def durable(programs: ModuleType) -> Iterator[ModuleType]:
    """The application of durable functions."""
    module = importlib.import_module("tests.support.apps.durable")
    yield module
    module.app.close()
