"""Fixtures: workers as processes, the application they run, and their logs in failed tests."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies.db.migrate import apply_migrations
from tests.support.hosts import Hosts, hosts_or_skip
from tests.support.pooled_workers import pooled
from tests.support.private_server import PrivateServer
from tests.support.workers import CONFIG_VARIABLE, DATABASE_VARIABLE, Fleet, Journal, Route

FLEETS = pytest.StashKey[list[Fleet]]()
THROUGH_PGBOUNCER = os.environ.get("HORSIES_TEST_POOLER") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what a pooler makes meaningless, and say why."""
    for item in items:
        marker = item.get_closest_marker("direct")
        if THROUGH_PGBOUNCER and marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"not through PgBouncer: {marker.args[0]}"))


def routed(database_url: str) -> AbstractContextManager[Route]:
    """The way this run's producers and workers take: straight, or through a transaction pooler."""
    return pooled_route(database_url) if THROUGH_PGBOUNCER else nullcontext(Route(database_url))


@contextmanager
def pooled_route(database_url: str) -> Iterator[Route]:
    """Through a PgBouncer of our own; notifications come straight from the server."""
    with pooled(database_url) as (pooled_url, broker):
        # A pooler may hand a send to a server connection that has just died.
        yield Route(pooled_url, broker, {"resend_on_transient_err": True})


@pytest.fixture(scope="session")
def route(process_url: str) -> Iterator[Route]:
    """The way to this process's database."""
    with routed(process_url) as route:
        yield route


@pytest.fixture(scope="session")
def programs(route: Route) -> Iterator[ModuleType]:
    """The application of the workers, for sending: imported once the database is known."""
    os.environ[DATABASE_VARIABLE] = route.url
    os.environ[CONFIG_VARIABLE] = json.dumps({"broker": route.broker, **route.producer})
    module = importlib.import_module("tests.support.apps.programs")
    yield module
    module.app.close()


@pytest.fixture(scope="session")
def flows(programs: ModuleType) -> ModuleType:
    """The workflows, once the database of their tasks is known."""
    return importlib.import_module("tests.support.apps.flows")


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
    """What the tasks of this test's workers wrote down."""
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
