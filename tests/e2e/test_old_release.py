"""A release whose schema this one does not continue, beside this one: each refuses the other's tables in one
message and changes nothing, so the workers of the other run every task once, with a key or without.

The old release is commit 40dae31c, before tasks had keys, where the git history has it, and this code under
another first migration. HORSIES_TEST_OLD_RELEASE names another commit; `pytest -s` prints the messages.
`test_previous_release.py` is for releases whose schema this one continues.
"""

from __future__ import annotations

import os
import subprocess
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
from tests.support.previous_release import has_commit, other_numbering, release_at
from tests.support.rows import add_task
from tests.support.wait import wait_until
from tests.support.workers import (
    DATABASE_VARIABLE,
    JOURNAL_VARIABLE,
    REPOSITORY,
    Fleet,
    RunningWorker,
)

COMMIT = os.environ.get("HORSIES_TEST_OLD_RELEASE", "40dae31c")
OTHER_NUMBERING = "another numbering"
RELEASES = [COMMIT, OTHER_NUMBERING] if has_commit(COMMIT) else [OTHER_NUMBERING]
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
PRODUCER = """
import sys

from shop import app, keyed, plain

first = int(sys.argv[1])
for number in range(first, first + 6):
    plain.send(number).unwrap()
    keyed.send(number).unwrap()
app.close()
"""
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
OPEN_TASKS = "SELECT count(*) FROM horsies_tasks WHERE status <> 'COMPLETED'"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=RELEASES)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The sources of the old release."""
    place = tmp_path / "old"
    is_other = request.param == OTHER_NUMBERING
    return other_numbering(place) if is_other else release_at(request.param, place)


def shop_at(database_url: str, tmp_path: Path) -> Fleet:
    """Workers of an application that both releases can import."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    (tmp_path / "producer.py").write_text(PRODUCER)
    return Fleet(database_url, tmp_path)


@pytest.fixture
def shop(migrated_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """The application on the tables of this release."""
    fleet = shop_at(migrated_url, tmp_path)
    yield fleet
    fleet.destroy()


@pytest.fixture
def old_shop(database_url: str, tmp_path: Path, old: Path) -> Iterator[Fleet]:
    """The application on the tables of the old release."""
    fleet = shop_at(database_url, tmp_path)
    settings = environment(fleet, old) | {"HORSIES_DATABASE_URL": database_url}
    subprocess.run([sys.executable, "-m", "horsies", "migrate"], env=settings, check=True)
    yield fleet
    fleet.destroy()


def add_tasks(connection: Database, first: int) -> None:
    for number in range(first, first + 6):
        add_task(connection, task_name="plain", args=f"[{number}]")
        add_keyed(connection, f"customer {number % 3}", task_name="keyed", args=f"[{number}]")


def send_tasks(shop: Fleet, sources: Path, first: int) -> None:
    """Send the same tasks with a program of a release."""
    command = [sys.executable, str(shop.directory / "producer.py"), str(first)]
    subprocess.run(command, env=environment(shop, sources), check=True, timeout=90)


def environment(shop: Fleet, sources: Path) -> dict[str, str]:
    path = os.pathsep.join([str(sources), str(shop.directory)])
    return shop.environment() | {"PYTHONPATH": path}


def everything(connection: Database) -> list[Any]:
    """All objects of the schema, and all rows as they are stored on disk."""
    query = sql.SQL("SELECT xmin::text, ctid::text, stored::text FROM {} AS stored ORDER BY ctid")
    names = [name for (name,) in connection.execute(TABLES).fetchall()]
    rows = [connection.execute(query.format(sql.Identifier(name))).fetchall() for name in names]
    return [catalogue(connection), *zip(names, rows, strict=True)]


def start(shop: Fleet, sources: Path) -> RunningWorker:
    command = [sys.executable, "-m", "horsies", "worker", "shop:app", "--processes", "2"]
    return shop.launch("worker", command, environment(shop, sources))


def refusal(shop: Fleet, sources: Path) -> str:
    """The one message with which a worker of a release gives up."""
    worker = start(shop, sources)
    wait_until(lambda: worker.process.poll() is not None, 60)
    assert worker.process.poll() != 0
    (message,) = [line for line in worker.log().splitlines() if " CRITICAL " in line]
    assert "Traceback" not in worker.log()
    print(f"\n{message}")
    return message


def assert_each_ran_once(shop: Fleet, numbers: int) -> None:
    ran = Counter((shop.directory / "journal").read_text().splitlines())
    expected = [f"{name} {number}" for name in ("plain", "keyed") for number in range(numbers)]
    assert ran == Counter(expected)


def test_an_old_release_changes_nothing_and_new_workers_run_everything_once(
    migrated_url: str, shop: Fleet, old: Path
) -> None:
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        add_tasks(connection, 0)
        before = everything(connection)
        refusal(shop, old)
        assert everything(connection) == before
        worker = start(shop, REPOSITORY / "src")
        worker.wait_until_ready()
        refusal(shop, old)
        assert catalogue(connection) == before[0]
        add_tasks(connection, 6)
        wait_until(lambda: connection.execute(OPEN_TASKS).fetchone() == (0,))
        assert worker.stop() == 0
    assert_each_ran_once(shop, 12)


def test_a_new_release_changes_nothing_and_old_workers_run_everything_once(
    old_shop: Fleet, old: Path
) -> None:
    new = REPOSITORY / "src"
    with psycopg.connect(old_shop.database_url, autocommit=True) as connection:
        send_tasks(old_shop, old, 0)
        before = everything(connection)
        assert "made by a development version of horsies" in refusal(old_shop, new)
        assert everything(connection) == before
        worker = start(old_shop, old)
        worker.wait_until_ready()
        refusal(old_shop, new)
        assert catalogue(connection) == before[0]
        send_tasks(old_shop, old, 6)
        wait_until(lambda: connection.execute(OPEN_TASKS).fetchone() == (0,))
        assert worker.stop() == 0
    assert_each_ran_once(old_shop, 12)
