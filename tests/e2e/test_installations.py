"""Two installations in one database, and databases whose own settings are unusual."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult
from tests.support.database import changed_defaults
from tests.support.routes import FLEETS
from tests.support.workers import HARDLY_POLLS, REPOSITORY, Fleet

SCHEMAS = ("public", "second")


@pytest.fixture
def own_fleet(
    database_url: str, tmp_path: Path, programs: ModuleType, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    """Workers on a database of the test's own."""
    fleet = Fleet(database_url, tmp_path)
    request.node.stash.setdefault(FLEETS, []).append(fleet)
    yield fleet
    fleet.destroy()


def application(config: PostgresConfig) -> tuple[Horsies, Any]:
    """An application with the name and signature of one of the workers' tasks."""
    app = Horsies(AppConfig(broker=config))

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    return app, add


def run_command(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "horsies", *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_installations_in_one_database_work_side_by_side(
    own_fleet: Fleet, database_url: str
) -> None:
    workers = {
        schema: own_fleet.start(config=HARDLY_POLLS | {"broker": {"schema": schema}})
        for schema in SCHEMAS
    }
    configs = {
        schema: PostgresConfig(database_url=database_url, schema=schema) for schema in SCHEMAS
    }
    apps = {schema: application(config) for schema, config in configs.items()}
    for schema, (_, add) in apps.items():
        handles = add.send_many(add.bind(number, 1) for number in range(20)).unwrap()
        assert [handle.get(30_000).ok_value for handle in handles] == list(range(1, 21)), schema
    for schema, (app, _) in apps.items():
        pongs = app.ping_workers(timeout_seconds=30, min_responses=1).unwrap()
        assert [pong.pid for pong in pongs] == [workers[schema].pid]
    assert workers["second"].stop() == 0
    waiting = apps["second"][1].send(1, 1).unwrap()
    assert apps["public"][1].send(1, 1).unwrap().get(30_000).is_ok()
    assert waiting.info().unwrap().status == "PENDING"
    with psycopg.connect(database_url, autocommit=True) as connection:
        for schema, expected in {"public": 21, "second": 21}.items():
            query = f"SELECT count(*) FROM {schema}.horsies_tasks"
            assert connection.execute(query.encode()).fetchone() == (expected,)
    environment = own_fleet.environment() | {"HORSIES_SCHEMA": "second"}
    shown = run_command(
        "tasks",
        "--json",
        "--status",
        "PENDING",
        "--database-url",
        database_url,
        environment=environment,
    )
    assert waiting.task_id in shown
    for app, _ in apps.values():
        app.close()


def test_workers_producers_and_commands_work_under_unusual_settings(
    own_fleet: Fleet, database_url: str
) -> None:
    with changed_defaults(database_url), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGDATESTYLE", "German")
        own_fleet.start()
        app, add = application(PostgresConfig(database_url=database_url))
        handle = add.send(1, 2).unwrap()
        assert handle.get(30_000).ok_value == 3
        assert handle.info(include_attempts=True).unwrap().completed_at is not None
        for arguments in (["status"], ["tasks"], ["workers"], ["show", handle.task_id]):
            shown = run_command(
                *arguments,
                "--json",
                "--database-url",
                database_url,
                environment=own_fleet.environment(),
            )
            assert json.loads(shown)
        app.close()


def test_a_worker_that_may_not_migrate_names_the_command_and_ends(
    own_fleet: Fleet, database_url: str
) -> None:
    worker = own_fleet.start(environment={"HORSIES_MIGRATE": "0"}, ready=False)
    assert worker.wait(30) == 1
    assert "no tables of horsies; create them with `horsies migrate`" in worker.log()
    with psycopg.connect(database_url) as connection:
        query = "SELECT count(*) FROM pg_class WHERE relname LIKE 'horsies%'"
        assert connection.execute(query).fetchone() == (0,)
