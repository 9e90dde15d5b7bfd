"""`horsies run`, and the refusals of the other commands for developers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from horsies.app import Horsies
from tests.support.applications import app_at
from tests.support.commands import horsies

APP = """
import os
from horsies import Horsies
from horsies.current_task import current_task

app = Horsies(os.environ["SHOP_URL"])
started = []


@app.on_child_process_start
def start() -> None:
    started.append(True)


@app.task("add", timeout_ms=100)
def add(a: int, b: int) -> dict[str, object]:
    total = a + b
    breakpoint()
    task = current_task()
    return {"total": total, "id": task.id, "started": started, "headers": dict(task.headers)}


@app.task("fail")
def fail() -> None:
    raise LookupError("no stock")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


@pytest.fixture
def producer(process_url: str, connection: psycopg.Connection[Any]) -> Iterator[Horsies]:
    app = app_at(process_url)
    yield app
    app.close()


def row(connection: psycopg.Connection[Any], task_id: str) -> dict[str, Any] | None:
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute("SELECT * FROM horsies_tasks WHERE id = %s", (task_id,))
        return cursor.fetchone()


def test_a_stored_task_runs_in_a_debugger_and_its_row_stays(
    project: Path, producer: Horsies, process_url: str, connection: psycopg.Connection[Any]
) -> None:
    arguments = {"a": 1, "b": 2}
    sent = producer.send_by_name("add", arguments, headers={"tenant": "7"}).unwrap()
    before = row(connection, sent.task_id)
    typed = "total = 40\nc\n"
    finished = horsies(project, "run", sent.task_id, "shop.py", typed=typed, SHOP_URL=process_url)
    assert finished.returncode == 0, finished.stderr
    _, _, printed = finished.stdout.rpartition("(Pdb) ")
    assert json.loads(printed) == {
        "ok": {"total": 40, "id": sent.task_id, "started": [True], "headers": {"tenant": "7"}}
    }
    assert "Nothing was stored" in finished.stderr
    assert row(connection, sent.task_id) == before


def test_a_failure_shows_its_traceback_and_exits_with_1(
    project: Path, producer: Horsies, process_url: str, connection: psycopg.Connection[Any]
) -> None:
    sent = producer.send_by_name("fail").unwrap()
    before = row(connection, sent.task_id)
    finished = horsies(project, "run", sent.task_id, "shop.py", SHOP_URL=process_url)
    assert finished.returncode == 1
    assert 'raise LookupError("no stock")' in finished.stderr
    assert "failed with UNHANDLED_EXCEPTION" in finished.stderr
    assert "Nothing was stored" in finished.stderr
    assert row(connection, sent.task_id) == before


def test_tasks_that_cannot_run_here_get_one_sentence(
    project: Path, producer: Horsies, process_url: str
) -> None:
    missing = horsies(project, "run", "no-id", "shop.py", SHOP_URL=process_url)
    assert missing.returncode == 4
    assert missing.stderr == "error: There is no task no-id.\n"
    sent = producer.send_by_name("elsewhere").unwrap()
    unknown = horsies(project, "run", sent.task_id, "shop.py", SHOP_URL=process_url)
    assert unknown.returncode == 1
    assert "Task 'elsewhere' is not registered in this application" in unknown.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--burst", "--reload"), "--burst and --reload exclude each other."),
        (("--debug", "--processes", "2"), "--debug and --processes exclude each other."),
        (("--reload",), "pip install '/path/to/horsies[dev]'"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    project: Path, flags: tuple[str, ...], sentence: str
) -> None:
    (project / "watchfiles.py").write_text("raise ImportError('as if it were not installed')\n")
    refused = horsies(project, "worker", "shop.py", *flags)
    assert refused.returncode == 1
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_without_a_database_url_a_project_gets_a_private_server(project: Path) -> None:
    stops_here = "import os, sys; sys.exit(os.environ['HORSIES_DATABASE_URL'])\n"
    (project / "shop.py").write_text(stops_here)
    finished = horsies(project, "dev", "shop.py")
    assert finished.returncode == 1
    assert "embedded://" in finished.stderr
