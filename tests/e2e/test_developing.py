"""Commands for developers: bursts, restarts on changes, debuggers, and a project in one terminal."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.database import Database
from tests.support.ports import free_port
from tests.support.tables import attempts, task, tasks, wait_for_status
from tests.support.terminals import CTRL_C, Terminal
from tests.support.wait import in_seconds, wait_until
from tests.support.workers import HARDLY_POLLS, REPOSITORY, Fleet

FORCED = 3
FLOWS = "tests.support.apps.flows:app"
PROJECT = """
import os
import time
from horsies import INJECTED, Horsies, TaskTransaction

app = Horsies(os.environ["SHOP_URL"])


@app.task("version")
def version() -> int:
    return 1


@app.task("count_own_tasks")
def count_own_tasks(tx: TaskTransaction = INJECTED) -> int:
    return len(tx.connection.execute("SELECT FROM horsies_tasks WHERE status = 'RUNNING'").fetchall())


@app.task("puzzle", timeout_ms=100)
def puzzle(a: int) -> int:
    b = a + 1
    breakpoint()
    b = b * 10
    return b


@app.task("rest")
def rest() -> None:
    while True:
        time.sleep(0.01)
"""

Open = Callable[..., Terminal]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "shop.py").write_text(PROJECT)
    return folder


@pytest.fixture
def terminal(project: Path, process_url: str, connection: Database) -> Iterator[Open]:
    """Opens a terminal in the project with a command of horsies, whose events go to a file."""
    opened: list[Terminal] = []
    events = events_file(project).open("ab")

    def start(*arguments: str) -> Terminal:
        environment = {"SHOP_URL": process_url, "HORSIES_DATABASE_URL": process_url}
        environment["HORSIES_EVENTS_FD"] = str(events.fileno())
        command = [sys.executable, "-m", "horsies", *arguments]
        opened.append(Terminal(command, project, environment, [events.fileno()]))
        return opened[-1]

    yield start
    for one in opened:
        one.destroy()
    events.close()


def events_file(project: Path) -> Path:
    return project.parent / "events"


def wait_for_events(project: Path, name: str, times: int = 1) -> None:
    """Wait until the workers have written this event so many times."""
    wait_until(lambda: events_file(project).read_text().count(f'"event": "{name}"') == times)


def result_of(connection: Database, task_id: str) -> Any:
    return json.loads(wait_for_status(connection, task_id, "COMPLETED", 30.0).result)


def test_a_burst_runs_all_due_tasks_and_their_followers_then_ends(
    fleet: Fleet, programs: ModuleType, flows: ModuleType, connection: Database
) -> None:
    for number in range(20):
        programs.add.send(number, 1).unwrap()
        programs.add_async.send(number, 1).unwrap()
    flows.chain(5).start().unwrap()
    later = programs.noop.schedule(3600).unwrap()
    options = ("--burst", "--async-children", "1")
    worker = fleet.start(*options, application=FLOWS, config=HARDLY_POLLS, ready=False, processes=1)
    assert worker.wait() == 0, worker.log()
    assert [one.id for one in tasks(connection) if one.status != "COMPLETED"] == [later.task_id]
    assert f"{len(attempts(connection))} attempt(s) ran" in worker.log()

    last = tasks(connection, "COMPLETED")[-1]
    finished = subprocess.run(
        [sys.executable, "-m", "horsies", "run", last.id, FLOWS],
        cwd=REPOSITORY,
        env=fleet.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == json.loads(last.result)
    assert task(connection, last.id) == last


def test_a_debugger_steps_through_a_task_beyond_its_time_limit(
    terminal: Open, programs: ModuleType, connection: Database
) -> None:
    sent = programs.app.send_by_name("puzzle", {"a": 4}, timeout_ms=100).unwrap()
    worker = terminal("worker", "shop.py", "--debug", "--reload")
    worker.wait_for("(Pdb) ")
    started = task(connection, sent.task_id).started_at
    wait_until(lambda: in_seconds(0) > started and in_seconds(-0.5) > started)
    # Since Python 3.13 the debugger stops at breakpoint() itself, before at the next line.
    for count, command in enumerate(("n", "n", "p b"), start=2):
        worker.type(f"{command}\n")
        worker.wait_for("(Pdb) ", times=count)
    worker.type("c\n")
    assert result_of(connection, sent.task_id) == {"ok": 50}
    worker.type(CTRL_C)
    assert worker.wait() == 0, worker.shown
    assert "\n50\r\n" in worker.shown
    wait_until(lambda: not worker.family())


def test_a_worker_restarts_with_changed_code_unless_it_is_broken(
    terminal: Open, project: Path, programs: ModuleType, connection: Database
) -> None:
    worker = terminal("worker", "shop.py", "--reload", "--processes", "1")
    worker.wait_for("listening on")
    (project / "shop.py").write_text(PROJECT.replace("return 1", "return ("))
    worker.wait_for("it is tried again after the next change")
    assert worker.shown.count("shop.py:") == 1, worker.shown
    sent = programs.app.send_by_name("version").unwrap()
    assert result_of(connection, sent.task_id) == {"ok": 1}
    (project / "shop.py").write_text(PROJECT.replace("return 1", "return 2"))
    worker.wait_for("listening on", times=2)
    wait_for_events(project, "worker_ready", times=2)
    sent = programs.app.send_by_name("version").unwrap()
    assert result_of(connection, sent.task_id) == {"ok": 2}
    sent = programs.app.send_by_name("rest").unwrap()
    wait_for_status(connection, sent.task_id, "RUNNING", 30.0)
    worker.type(CTRL_C)
    worker.wait_for("graceful shutdown: 1 task(s) still running")
    worker.type(CTRL_C)
    assert worker.wait() == FORCED, worker.shown
    wait_until(lambda: not worker.family())


def test_a_project_runs_in_one_terminal(
    terminal: Open, project: Path, programs: ModuleType, connection: Database
) -> None:
    port = free_port()
    dev = terminal("dev", "shop.py", "--processes", "1", "--port", str(port))
    dev.wait_for("listening on")
    dev.wait_for(f"The dashboard is at http://127.0.0.1:{port}/")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
        assert page.status == 200
    sent = programs.app.send_by_name("version").unwrap()
    assert result_of(connection, sent.task_id) == {"ok": 1}
    counting = programs.app.send_by_name("count_own_tasks").unwrap()
    assert result_of(connection, counting.task_id) == {"ok": 1}
    dev.type(CTRL_C)
    assert dev.wait() == 0, dev.shown
    wait_for_events(project, "worker_stopped")
    wait_until(lambda: not dev.family())
    assert "Traceback" not in dev.shown


def test_a_project_stops_in_order_when_its_terminal_is_closed(
    terminal: Open, project: Path, programs: ModuleType, connection: Database
) -> None:
    dev = terminal("dev", "shop.py", "--processes", "1", "--port", str(free_port()))
    dev.wait_for("listening on")
    dev.wait_for("The dashboard is at")
    dev.close()
    assert dev.wait() == 0
    wait_for_events(project, "worker_stopped")
    wait_until(lambda: not dev.family())
