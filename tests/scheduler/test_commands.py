"""`horsies schedules` and `horsies scheduler` on the command line: text, JSON, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from horsies.tasks.handle import TaskHandle
from horsies.timetable.patterns import DailySchedule
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.scheduling import (
    LONG_AGO,
    MakeApp,
    enter,
    make_due,
    schedule,
    state,
    tasks,
    tick,
)

APP = """
import os
from horsies.app import Horsies
from horsies.config.app import AppConfig; from horsies.config.postgres import PostgresConfig
from horsies.task_result import TaskError, TaskResult
from horsies.timetable.patterns import IntervalSchedule
from horsies.config.schedules import ScheduleConfig, TaskSchedule

app = Horsies(AppConfig(
    broker=PostgresConfig(database_url=os.environ["SHOP_URL"]),
    schedule=ScheduleConfig(schedules=[
        TaskSchedule(name="report", task_name=os.environ.get("SHOP_TASK", "note"), kwargs={"text": "hunter2"},
                     pattern=IntervalSchedule(hours=1)),
    ]) if os.environ.get("SHOP_SCHEDULES", "on") == "on" else None,
))

@app.task("note")
def note(text: str) -> TaskResult[str, TaskError]:
    return TaskResult(ok=text)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_url: str) -> str:
    """The locator of an application in a directory of its own."""
    (tmp_path / f"shop_{tmp_path.name}.py").write_text(APP)
    monkeypatch.setenv("SHOP_URL", process_url)
    monkeypatch.chdir(tmp_path)
    return f"shop_{tmp_path.name}:app"


def read(finished: Any) -> Any:
    assert (finished.code, finished.err) == (0, "")
    return json.loads(finished.out)


def test_schedules_are_listed_with_their_next_slot_and_their_newest_task(
    horsies: Run, connection: Database, make_app: MakeApp
) -> None:
    pattern = DailySchedule(time="08:00")  # type: ignore[arg-type]
    app = make_app(schedule(), schedule("paused", pattern=pattern))
    enter(connection, app)
    app.schedules.run("report").unwrap()
    app.schedules.pause("paused").unwrap()
    make_due(connection, LONG_AGO)
    connection.execute("UPDATE horsies_schedule_state SET last_run_at = next_run_at")
    finished = horsies("schedules")
    assert (finished.code, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert lines[0].split() == ["SCHEDULE", "NEXT", "(UTC)", "LAST", "(UTC)", "STATUS", "RUNS"]
    assert [line.split() for line in lines[1:]] == [
        ["paused", "2026-06-01", "12:00:00", "2026-06-01", "12:00:00", "-", "0"],
        ["note"],
        ["paused"],
        ["report", "2026-06-01", "12:00:00", "2026-06-01", "12:00:00", "PENDING", "1"],
        ["note"],
    ]
    assert max(map(len, lines)) <= 80
    paused, report = read(horsies("schedules", "list", "--json"))["schedules"]
    assert (paused["name"], paused["paused"]) == ("paused", True)
    assert paused["timing"]["pattern"] == {"type": "daily", "time": "08:00:00"}
    assert (report["next_run_at"], report["run_count"]) == ("2026-06-01T12:00:00Z", 1)


def test_an_empty_list_is_an_answer(horsies: Run, connection: Database) -> None:
    assert horsies("schedules").out == "No schedule is on record.\n"
    assert read(horsies("schedules", "--json")) == {"schedules": []}


def test_the_next_slots_are_printed(horsies: Run, connection: Database, make_app: MakeApp) -> None:
    enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    finished = horsies("schedules", "next", "report", "--count", "2")
    assert finished.out == "2026-06-01 12:00:00.000 UTC\n2026-06-01 13:00:00.000 UTC\n"
    assert read(horsies("schedules", "next", "report", "--count", "1", "--json")) == {
        "name": "report",
        "slots": ["2026-06-01T12:00:00Z"],
    }
    connection.execute("UPDATE horsies_schedule_state SET next_run_at = NULL")
    ended = horsies("schedules", "next", "report")
    assert ended.out == "Schedule report has ended: there are no more slots.\n"


def test_pausing_and_resuming_from_the_command_line(
    horsies: Run, connection: Database, make_app: MakeApp
) -> None:
    enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    paused = horsies("schedules", "pause", "report")
    assert (paused.code, paused.out[:32]) == (0, "Schedule report is paused since ")
    assert state(connection)["paused_at"] is not None
    resumed = horsies("schedules", "resume", "report")
    assert resumed.out == (
        "Schedule report is not paused; its slots since 2026-06-01 12:00:00.000 UTC have passed: the "
        "next tick of a scheduler fires or drops them.\n"
    )
    make_due(connection, datetime(2999, 1, 1, tzinfo=UTC))
    ahead = "Schedule report is not paused; its next slot: 2999-01-01 00:00:00.000 UTC.\n"
    assert horsies("schedules", "resume", "report").out == ahead
    assert read(horsies("schedules", "pause", "report", "--json"))["paused"] is True


def test_a_schedule_is_run_through_its_application(
    horsies: Run, connection: Database, project: str
) -> None:
    finished = horsies("schedules", "run", "report", project)
    (task,) = tasks(connection)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out == f"Schedule report was sent as task {task['id']}.\n"
    again = read(horsies("schedules", "run", "report", "-m", project, "--json"))
    assert again["name"] == "report"
    assert len(tasks(connection)) == 2


def test_the_runs_of_a_schedule_are_printed(
    horsies: Run, connection: Database, make_app: MakeApp
) -> None:
    app = make_app(schedule())
    enter(connection, app)
    assert horsies("schedules", "runs", "report").out == "No run is on record.\n"
    handle = app.schedules.run("report").unwrap()
    assert isinstance(handle, TaskHandle)
    lines = horsies("schedules", "runs", "report").out.splitlines()
    assert lines[0].split() == ["ID", "STATUS", "SLOT", "(UTC)", "ERROR"]
    assert lines[1].split() == [handle.task_id, "PENDING", "by", "hand"]
    (run,) = read(horsies("schedules", "runs", "report", "--json"))["runs"]
    assert (run["task_id"], run["scheduled_for"]) == (handle.task_id, None)


def test_a_task_says_which_schedule_and_slot_it_is_for(
    horsies: Run, connection: Database, make_app: MakeApp
) -> None:
    registry = enter(connection, make_app(schedule()))
    make_due(connection, LONG_AGO)
    tick(connection, registry)
    (task,) = tasks(connection)
    lines = horsies("show", task["id"]).out.splitlines()
    assert ["schedule", "report"] in [line.split() for line in lines]
    shown = read(horsies("show", task["id"], "--json"))
    assert shown["schedule_name"] == "report"
    assert datetime.fromisoformat(shown["scheduled_for"]) == task["scheduled_for"]


@pytest.mark.parametrize("action", ["next", "runs", "pause", "resume"])
def test_an_unknown_schedule_is_not_found(horsies: Run, connection: Database, action: str) -> None:
    finished = horsies("schedules", action, "nothing")
    assert (finished.code, finished.out) == (4, "")
    fix = "run `horsies schedules` to see all of them"
    assert finished.err == f"error: There is no schedule 'nothing'; {fix}.\n"
    row = "INSERT INTO horsies_schedule_state (schedule_name, config_hash) VALUES (%s, 'h')"
    for number in range(12):
        connection.execute(row, (f"s{number:02d}",))
    known = ", ".join(f"s{number:02d}" for number in range(10))
    finished = horsies("schedules", action, "nothing")
    assert f"schedule 'nothing'; the known ones are {known}, and 2 more; run" in finished.err


def test_running_an_unknown_schedule_is_not_found(
    horsies: Run, connection: Database, project: str
) -> None:
    finished = horsies("schedules", "run", "nothing", "-m", project)
    assert finished.code == 4


@pytest.mark.parametrize("action", ["next", "run", "pause"])
def test_an_action_needs_a_name(horsies: Run, action: str) -> None:
    finished = horsies("schedules", action)
    assert finished.code == 1
    assert f"horsies schedules {action} needs the name of a schedule." in finished.err


def test_running_needs_the_application(horsies: Run) -> None:
    finished = horsies("schedules", "run", "report")
    assert finished.code == 1
    assert "horsies schedules run needs an application." in finished.err


def test_a_database_without_tables_is_told_apart(horsies: Run, database_url: str) -> None:
    finished = horsies("schedules", "--database-url", database_url)
    assert finished.code == 1
    assert "create them with `horsies migrate`" in finished.err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SHOP_SCHEDULES": "off"}, "This application has no schedules."),
        ({"SHOP_TASK": "nothing"}, "Schedule 'report': there is no task 'nothing'."),
    ],
)
def test_a_scheduler_refuses_an_application_it_cannot_serve(
    horsies: Run,
    project: str,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for command in (["scheduler", project], ["worker", project, "--with-scheduler"]):
        finished = horsies(*command)
        assert finished.code == 1
        assert message in finished.err
        assert "hunter2" not in finished.err
        assert "children ready" not in finished.err


def test_check_reports_schedules(
    horsies: Run, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TASK", "nothing")
    finished = horsies("check", project)
    assert finished.code == 1
    assert "error[HRS-300]: Schedule 'report': there is no task 'nothing'." in finished.err


def test_a_scheduler_refuses_a_database_that_is_newer_than_itself(
    database_url: str, project: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE horsies_migrations (kind text, version integer, name text, sha text)"
        )
        connection.execute("INSERT INTO horsies_migrations VALUES ('migration', 9999, 'later', '')")
    done = subprocess.run(
        [sys.executable, "-m", "horsies", "scheduler", project],
        env=dict(os.environ) | {"SHOP_URL": database_url},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "upgrade horsies on this machine" in done.stderr
    assert "Traceback" not in done.stderr
