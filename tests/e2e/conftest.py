"""Fixtures: workers as processes, the application they run, and their logs in failed tests."""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies.db.migrate import apply_migrations
from tests.db.private_server import PrivateServer
from tests.e2e.fleet import DATABASE_VARIABLE, Fleet, Journal

FLEETS = pytest.StashKey[list[Fleet]]()


@pytest.fixture(scope="session")
def programs(process_url: str) -> Iterator[ModuleType]:
    """The application of the workers, for sending: imported once the database is known."""
    os.environ[DATABASE_VARIABLE] = process_url
    module = importlib.import_module("tests.e2e.programs")
    yield module
    module.app.close()


@pytest.fixture
def fleet(
    process_url: str,
    connection: psycopg.Connection[Any],
    programs: ModuleType,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Fleet]:
    """Workers on this process's database, whose tables are empty."""
    fleet = Fleet(process_url, tmp_path)
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
    fleet = Fleet(own_server.url, tmp_path)
    request.node.stash.setdefault(FLEETS, []).append(fleet)
    yield fleet
    fleet.destroy()


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
