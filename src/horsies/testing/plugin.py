"""The pytest plugin: fixtures for applications with tasks. Nothing is imported before a fixture is used."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from horsies.app import Horsies
    from horsies.testing.database import HorsiesDatabase
    from horsies.testing.pending import Clock
    from horsies.testing.worker import WorkerProcess

APP_OPTION = "horsies_app"
_HELP = "the application under test: package.module:app"
_MARKER = "horsies_worker(*options): options of `horsies worker` for the fixture horsies_worker"

_workers = pytest.StashKey["list[WorkerProcess]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the application."""
    parser.addini(APP_OPTION, _HELP)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that the fixture ``horsies_worker`` reads."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture(scope="session")
def horsies_app(request: pytest.FixtureRequest) -> Horsies:
    """The application named by the option ``horsies_app``; override the fixture to use another
    application.
    """
    from horsies.locate import load_app

    return load_app(_locator(request.config))


@pytest.fixture(scope="session")
def horsies_session_database(
    horsies_app: Horsies, request: pytest.FixtureRequest
) -> Iterator[HorsiesDatabase]:
    """The throw-away database of this test process; its tables are created once."""
    from horsies.testing.database import created_database, prepared_database, server_url

    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    with (
        created_database(server_url(run_id)) as url,
        prepared_database(horsies_app, url) as database,
    ):
        yield database


@pytest.fixture
def horsies_database(horsies_session_database: HorsiesDatabase) -> Iterator[HorsiesDatabase]:
    """A database with empty tables that the application uses during the test."""
    horsies_session_database.clean()
    yield horsies_session_database
    horsies_session_database.app.close()


@pytest.fixture
def horsies_clock(horsies_database: HorsiesDatabase) -> Clock:
    """The test database's clock: ``advance`` makes delayed tasks, retries and schedules due."""
    from horsies.testing.pending import clock_of

    return clock_of(horsies_database.app)


@pytest.fixture
def horsies_worker(
    horsies_database: HorsiesDatabase, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[WorkerProcess]:
    """A worker for the application in separate processes; the marker can request more than one child
    process.
    """
    from horsies.testing.worker import running_worker

    marker = request.node.get_closest_marker("horsies_worker")
    options = marker.args if marker is not None else ()
    locator = _locator(request.config)
    started = running_worker(
        locator, horsies_database.url, tmp_path, ("--processes", "1", *options)
    )
    with started as worker:
        request.node.stash.setdefault(_workers, []).append(worker)
        yield worker


# The old style of hook wrapper, the only style that pytest 7 supports.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Add the worker's log to the report of a failed test."""
    made = yield
    report: pytest.TestReport = made.get_result()
    if report.failed:
        for worker in item.stash.get(_workers, []):
            report.sections.append((f"log of horsies worker {worker.pid}", worker.log()))


def _locator(config: pytest.Config) -> str:
    named = str(config.getini(APP_OPTION))
    if not named:
        raise pytest.UsageError(
            f'name the application in the configuration of pytest: {APP_OPTION} = "package.module:app"'
        )
    return named
