"""A worker of an old commit on a database of this one, with plain and keyed tasks waiting.

`HORSIES_TEST_OLD_RELEASE=40dae31c pytest -s tests/e2e/test_old_release.py` prints what the old worker
prints. It is for commits whose schema this one does not continue; `test_previous_release.py` is for
the others.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.support.database import Database
from tests.support.keys import add_keyed
from tests.support.migrations import catalogue
from tests.support.previous_release import release_at
from tests.support.rows import add_task
from tests.support.wait import wait_until
from tests.support.workers import (
    DATABASE_VARIABLE,
    JOURNAL_VARIABLE,
    REPOSITORY,
    Fleet,
    RunningWorker,
)

COMMIT = os.environ.get("HORSIES_TEST_OLD_RELEASE", "")
APPLICATION = f"""
import inspect
import os

from horsies import AppConfig, Horsies, PostgresConfig

app = Horsies(AppConfig(broker=PostgresConfig(database_url=os.environ["{DATABASE_VARIABLE}"])))
has_keys = "key" in inspect.signature(Horsies.task).parameters


@app.task("plain")
def plain(number: int) -> None:
    write("plain", number)


@app.task("keyed", **({{"key": lambda number: f"customer {{number % 3}}"}} if has_keys else {{}}))
def keyed(number: int) -> None:
    write("keyed", number)


def write(name: str, number: int) -> None:
    with open(os.environ["{JOURNAL_VARIABLE}"], "a") as journal:
        journal.write(f"{{name}} {{number}}\\n")
"""
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
OPEN_TASKS = "SELECT count(*) FROM horsies_tasks WHERE status <> 'COMPLETED'"

pytestmark = pytest.mark.skipif(
    not COMMIT, reason="needs the commit of an old release in HORSIES_TEST_OLD_RELEASE"
)


@pytest.fixture
def shop(migrated_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Workers of an application that both releases can import."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    fleet = Fleet(migrated_url, tmp_path)
    yield fleet
    fleet.destroy()


def add_tasks(connection: Database, first: int) -> None:
    for number in range(first, first + 6):
        add_task(connection, task_name="plain", args=f"[{number}]")
        add_keyed(connection, f"customer {number % 3}", task_name="keyed", args=f"[{number}]")


def everything(connection: Database) -> list[Any]:
    """All objects of the schema, and all rows as they are stored on disk."""
    query = sql.SQL("SELECT xmin::text, ctid::text, stored::text FROM {} AS stored ORDER BY ctid")
    names = [name for (name,) in connection.execute(TABLES).fetchall()]
    rows = [connection.execute(query.format(sql.Identifier(name))).fetchall() for name in names]
    return [catalogue(connection), *zip(names, rows, strict=True)]


def start(shop: Fleet, sources: Path) -> RunningWorker:
    command = [sys.executable, "-m", "horsies", "worker", "shop:app", "--processes", "2"]
    path = os.pathsep.join([str(sources), str(shop.directory)])
    return shop.launch("worker", command, shop.environment() | {"PYTHONPATH": path})


def refused(shop: Fleet, sources: Path) -> str:
    """What a worker of the old release prints before it gives up."""
    worker = start(shop, sources)
    wait_until(lambda: worker.process.poll() is not None, 60)
    assert worker.process.poll() != 0
    return worker.log()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_old_release_changes_nothing_and_new_workers_run_everything_once(
    migrated_url: str, shop: Fleet, tmp_path: Path
) -> None:
    old = release_at(COMMIT, tmp_path / "old")
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        add_tasks(connection, 0)
        before = everything(connection)
        print(f"\na worker of {COMMIT}:\n{refused(shop, old)}")
        assert everything(connection) == before
        worker = start(shop, REPOSITORY / "src")
        worker.wait_until_ready()
        refused(shop, old)
        assert catalogue(connection) == before[0]
        add_tasks(connection, 6)
        wait_until(lambda: connection.execute(OPEN_TASKS).fetchone() == (0,))
        assert worker.stop() == 0
    ran = Counter((shop.directory / "journal").read_text().splitlines())
    assert ran == Counter(f"{name} {number}" for name in ("plain", "keyed") for number in range(12))
    print(f"{ran.total()} tasks, each run once by workers of this release")
