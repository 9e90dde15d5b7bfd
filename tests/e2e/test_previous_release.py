"""A release on the schema of the next one: its workers, producers and schedulers keep working.

While the git history has no release with an older schema, the previous one is this code, and the next one
the same with more migrations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.database import Database
from tests.support.previous_release import next_release, previous_release
from tests.support.wait import wait_until
from tests.support.workers import DATABASE_VARIABLE, Fleet, RunningWorker

APPLICATION = f"""
import os

import horsies
from horsies import (
    AppConfig, Horsies, IntervalSchedule, PostgresConfig, RetryPolicy, ScheduleConfig, TaskError,
    TaskResult, TaskSchedule, from_node,
)

app = Horsies(AppConfig(
    broker=PostgresConfig(database_url=os.environ["{DATABASE_VARIABLE}"]),
    schedule=ScheduleConfig(schedules=[
        TaskSchedule(name="often", task_name="where", pattern=IntervalSchedule(seconds=1)),
    ], check_interval_seconds=1),
))
Number = TaskResult[int, TaskError]


@app.task("where")
def where() -> TaskResult[str, TaskError]:
    return TaskResult(ok=horsies.__file__)


@app.task("add")
def add(a: int, b: int) -> Number:
    return TaskResult(ok=a + b)


@app.task("flaky", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["FLAKY"], jitter=False))
def flaky(path: str) -> Number:
    if not os.path.exists(path):
        open(path, "w").close()
        return TaskResult(err=TaskError(error_code="FLAKY", message="not yet"))
    return TaskResult(ok=2)


@app.task("double")
def double(number: Number) -> Number:
    return TaskResult(ok=2 * number.ok_value)
"""

PRODUCER = """
import json
import sys

from shop import add, app, double, flaky, from_node, where

assert app.check(live=True) == []
first = add.node()(a=1, b=2)
last = double.node()(number=from_node(first))
spec = app.workflow("doubled", [first, last], output=last, definition_key="doubled.v1")
run = spec.start().unwrap()
handles = [add.send(number, 1).unwrap() for number in range(20)]
retried = flaky.send(sys.argv[1]).unwrap()
found = {
    "where": where.send().unwrap().get(timeout_ms=30_000).ok_value,
    "added": [handle.get(timeout_ms=30_000).ok_value for handle in handles],
    "retried": retried.get(timeout_ms=30_000).ok_value,
    "doubled": run.get(timeout_ms=30_000).ok_value,
}
print(json.dumps(found))
app.close()
"""
SCHEDULED = (
    "SELECT count(*) FROM horsies_tasks WHERE schedule_name = 'often' AND status = 'COMPLETED'"
)
FUNCTIONS = "SELECT version, sha FROM horsies_migrations WHERE kind = 'function' ORDER BY version"


@pytest.fixture
def previous(database_url: str, tmp_path: Path) -> Path:
    """The sources of the previous release, which has migrated the database to its schema."""
    sources = previous_release(tmp_path / "previous")
    migrate(sources, database_url)
    return sources


@pytest.fixture
def migrated(database_url: str, previous: Path, newer: Path) -> Iterator[Database]:
    """A database that the newer release has brought from the schema of the previous one to its own."""
    migrate(newer, database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The sources of the newer release."""
    return next_release(tmp_path / "newer")


def migrate(sources: Path, database_url: str) -> str:
    """Bring the database to the schema of this code; return what the command printed."""
    command = [sys.executable, "-m", "horsies", "migrate"]
    settings = {"PYTHONPATH": str(sources), "HORSIES_DATABASE_URL": database_url}
    environment = os.environ | settings
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert "applied 00" in done.stdout
    return done.stdout


@pytest.fixture
def shop(database_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Workers of an application in a folder of its own."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    (tmp_path / "producer.py").write_text(PRODUCER)
    fleet = Fleet(database_url, tmp_path)
    yield fleet
    fleet.destroy()


def environment(shop: Fleet, sources: Path) -> dict[str, str]:
    return dict(os.environ) | {
        DATABASE_VARIABLE: shop.database_url,
        "PYTHONPATH": os.pathsep.join([str(sources), str(shop.directory)]),
    }


def start(shop: Fleet, settings: Mapping[str, str], *options: str) -> RunningWorker:
    command = [sys.executable, "-m", "horsies", "worker", "shop:app", "--processes", "2"]
    worker = shop.launch("worker", [*command, *options], settings)
    worker.wait_until_ready()
    return worker


def produce(shop: Fleet, settings: Mapping[str, str]) -> dict[str, Any]:
    """Run the producer and return what it got."""
    command = [sys.executable, str(shop.directory / "producer.py"), str(shop.directory / "mark")]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, f"{done.stderr}\n{list(shop.logs())}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_previous_release_works_on_the_schema_of_this_one(
    migrated: Database, shop: Fleet, previous: Path
) -> None:
    functions = migrated.execute(FUNCTIONS).fetchall()
    settings = environment(shop, previous)
    worker = start(shop, settings, "--with-scheduler")
    assert place_of(produce(shop, settings)).is_relative_to(previous)
    wait_until(lambda: (migrated.execute(SCHEDULED).fetchone() or (0,))[0] >= 2)
    assert worker.stop() == 0
    assert migrated.execute(FUNCTIONS).fetchall() == functions, "it replaced newer functions"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_deployment_neither_stops_a_worker_nor_loses_a_task(
    database_url: str, shop: Fleet, previous: Path, newer: Path
) -> None:
    older, next_one = environment(shop, previous), environment(shop, newer)
    workers = [start(shop, older)]
    assert place_of(produce(shop, older)).is_relative_to(previous)
    with psycopg.connect(database_url, autocommit=True) as connection:
        migrate(newer, database_url)
        # The sessions of the worker, with their plans, are from before the migration.
        assert place_of(produce(shop, older)).is_relative_to(previous)
        workers.append(start(shop, next_one))
        place = place_of(produce(shop, next_one))
        assert place.is_relative_to(previous) or place.is_relative_to(newer)
        statuses = "SELECT DISTINCT status FROM horsies_tasks"
        assert connection.execute(statuses).fetchall() == [("COMPLETED",)]
    assert [worker.stop() for worker in workers] == [0, 0]


def place_of(found: dict[str, Any]) -> Path:
    """The code of the worker that ran a task of the producer, whose other results are as expected."""
    place = Path(found.pop("where"))
    assert found == {"added": list(range(1, 21)), "retried": 2, "doubled": 6}
    return place
