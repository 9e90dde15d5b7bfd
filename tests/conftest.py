"""Fixtures: a real PostgreSQL, one migrated database per test process, clean tables for every test.

The server is the embedded one unless HORSIES_TEST_DATABASE_URL names another (its user must be able
to create databases). The migrated database is a copy of a template made once per server.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest

from horsies.app import Horsies
from horsies.cli import main
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import _databases
from horsies.logs import detach_handler
from horsies.tasks.waiters import _instances
from horsies.testing import database as throw_away
from tests.support import examples as examples
from tests.support.applications import Call, app_at, run_closing
from tests.support.command_line import Finished, Run
from tests.support.database import (
    Database,
    created_database,
    is_reusable,
    template_database,
)
from tests.support.private_server import prepare_shared_data
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

# With this variable, as in many containers, every interpreter that a test starts compiles the package, 0.6 s
# of processor time each, and pytest rewrites the assertions of all tests in each run, 23 s in each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# In the background (`nohup`, or `&` in a script) these signals are ignored, and so they would be in every
# program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector, which takes a sixth of that processor time.

    Modules and test items stay until the end: frozen, they are not visited by the collections of the tests,
    nor copied in the processes that tests fork.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, each group in its random order, so that none is left for the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def server_url(testrun_uid: str, worker_id: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PostgreSQL server shared by all test processes of this run."""
    if throw_away.SERVER_VARIABLE not in os.environ:
        own = tmp_path_factory.getbasetemp()
        shared = own if worker_id == "master" else own.parent
        prepare_shared_data(testrun_uid, shared / "server.lock")
    return throw_away.server_url(testrun_uid)


@pytest.fixture(scope="session")
def process_url(server_url: str) -> Iterator[str]:
    """This test process's own database, copied from the migrated template."""
    with created_database(server_url, template_database(server_url)) as url:
        yield url


@pytest.fixture
def database_url(server_url: str) -> Iterator[str]:
    """A fresh, empty database for one test."""
    with created_database(server_url) as url:
        yield url


@pytest.fixture
def migrated_url(server_url: str) -> Iterator[str]:
    """A fresh database with empty tables for one test."""
    with created_database(server_url, template_database(server_url)) as url:
        yield url


@pytest.fixture(scope="module")
def full_url(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database with the many rows that the test module's FILL inserts, known to the planner."""
    with created_database(server_url, template_database(server_url, request.module.FILL)) as url:
        yield url


@pytest.fixture
def broker_config(database_url: str) -> PostgresConfig:
    """A configuration for the fresh, empty database."""
    return PostgresConfig(database_url=database_url)


@pytest.fixture
def other_url(server_url: str) -> Iterator[str]:
    """A second database with the tables, for one test."""
    with created_database(server_url, template_database(server_url)) as url:
        yield url


@pytest.fixture(scope="session")
def kept_connections(process_url: str) -> Iterator[list[Database]]:
    """The connection that the last test left as it was opened, or none."""
    kept: list[Database] = []
    yield kept
    for connection in kept:
        connection.close()


@pytest.fixture
def connection(process_url: str, kept_connections: list[Database]) -> Iterator[Database]:
    """A connection to this process's database, whose tables are empty.

    It is that of the test before, reset, or a new one.
    """
    connection = _kept_or_new(process_url, kept_connections)
    with ExitStack() as closing:
        closing.callback(connection.close)
        throw_away.empty_tables(connection)
        yield connection
        if is_reusable(connection):
            closing.pop_all()
            kept_connections.append(connection)


def _kept_or_new(url: str, kept: list[Database]) -> Database:
    if kept:
        connection = kept.pop()
        with suppress(psycopg.OperationalError):  # a test may have ended all sessions
            connection.execute("SELECT")
            return connection
    return psycopg.connect(url, autocommit=True)


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """Close the applications that a test leaves open, and wait for its threads: the next test counts both."""
    threads = set(threading.enumerate())
    yield
    for waiters in list(_instances):
        if waiters._thread not in threads:
            waiters.close()
    for database in list(_databases):
        database.close()
    wait_until(
        lambda: not set(threading.enumerate()) - threads,
        what=lambda: f"the end of {set(threading.enumerate()) - threads}",
    )


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo the set-up of logging by a command that a test runs in this process."""
    logger = logging.getLogger("horsies")
    level = logger.level
    yield
    detach_handler()
    logger.setLevel(level)


@pytest.fixture
def app(process_url: str, connection: Database) -> Iterator[Horsies]:
    """An application on this process's database, closed after the test."""
    application = Horsies(
        AppConfig(broker=PostgresConfig(database_url=process_url, pool_size=1, max_overflow=4))
    )
    yield application
    application.close()


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Call:
    """Call a method, or its _async twin; both must behave the same."""

    def through(app: Horsies, target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            return getattr(target, method)(*args, **kwargs)
        return run_closing(app, getattr(target, f"{method}_async")(*args, **kwargs))

    return through


@pytest.fixture
def proxy(process_url: str, connection: Database) -> Iterator[Proxy]:
    """A way to this process's database that can be cut."""
    with Proxy(process_url) as proxy:
        yield proxy


@pytest.fixture
def distant_app(proxy: Proxy) -> Iterator[Horsies]:
    """An application that reaches the database through the proxy."""
    application = app_at(proxy.url)
    yield application
    application.close()


@pytest.fixture
def horsies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], process_url: str
) -> Run:
    """Run a command on this process's database, 80 columns wide, without colours."""
    for name in [name for name in os.environ if name.startswith(("HORSIES_", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("DATABASE_URL", process_url)

    def run(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["horsies", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main.main()
        written = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Finished(left.value.code, written.out, written.err)

    return run
