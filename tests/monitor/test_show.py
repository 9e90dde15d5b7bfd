"""`horsies show` and the list of tasks: results, tracebacks, due times, and why a task waits."""

from __future__ import annotations

import json
import re

import pytest
from psycopg import sql

from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_task, add_worker, ago


def test_a_traceback_is_printed_line_by_line(horsies: Run, database: Database) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "OSError: \x1b[2J",
    ]
    exception = {"type": "OSError", "message": "x", "traceback": "\n".join(lines) + "\n"}
    result = {"err": {"error_code": "BROKE", "exception": exception}}
    task_id = add_task(database, status="FAILED", result=json.dumps(result))
    shown = horsies("show", task_id, "--payload").out.splitlines()
    start = next(index for index, line in enumerate(shown) if line.startswith("traceback"))
    column = shown[start].index("Traceback")
    assert [line[column:] for line in shown[start : start + 3]] == [
        *lines[:2],
        "OSError: \\x1b[2J",
    ]
    assert "\\n" not in "".join(shown)
    assert "".join(shown).count("Traceback") == 1
    assert "BROKE" in "".join(shown)
    assert json.loads(horsies("show", task_id, "--payload", "--json").out)["result"] == result


@pytest.mark.parametrize(
    ("code", "named"), [("WORKER_CRASHED", ["horsies docs WORKER_CRASHED"]), ("CARD_REFUSED", [])]
)
def test_a_built_in_code_names_the_command_that_prints_its_remedy(
    horsies: Run, database: Database, code: str, named: list[str]
) -> None:
    shown = horsies("show", add_task(database, status="FAILED", error_code=code)).out
    assert re.findall(r"^see +(.+)$", shown, re.MULTILINE) == named


@pytest.mark.parametrize(
    "result", ['{"ok":{"exception":{"traceback":"x"}}}', '{"err":{"exception":null}}', "[1]", "no"]
)
def test_other_results_are_printed_as_they_are_stored(
    horsies: Run, database: Database, result: str
) -> None:
    shown = horsies("show", add_task(database, result=result), "--payload").out
    assert result in shown
    assert "\ntraceback" not in shown


def test_a_delayed_task_is_due_in_the_future_not_enqueued(horsies: Run, database: Database) -> None:
    delayed = add_task(database, enqueued_at=ago(-3_599))
    listed = horsies("tasks", "--status", "pending").out
    assert re.search(r"work on default\n +due in 59m\d\ds\n", listed)
    shown = horsies("show", delayed).out
    assert re.search(r"\ndue +in 59m\d\ds, at 20\S+ \S+ UTC\n", shown)
    assert "enqueued" not in shown
    document = json.loads(horsies("show", delayed, "--json").out)
    assert "enqueued_at" in document
    assert "age_seconds" not in document


def test_a_task_that_waits_for_an_event_has_no_due_time(horsies: Run, database: Database) -> None:
    parked = add_task(database, enqueued_at=sql.SQL("horsies_never_v1()"))
    assert "due after an event" in horsies("tasks").out
    assert "after an event" in horsies("show", parked).out
    assert "9999" not in horsies("show", parked).out


@pytest.mark.parametrize(("status", "seconds"), [("PENDING", 60), ("CANCELLED", -3_600)])
def test_tasks_that_are_due_or_ended_were_enqueued(
    horsies: Run, database: Database, status: str, seconds: float
) -> None:
    task_id = add_task(database, status=status, enqueued_at=ago(seconds))
    assert "due" not in horsies("tasks").out
    shown = horsies("show", task_id).out
    assert "\nenqueued" in shown
    assert "\ndue" not in shown


def reasons(horsies: Run, task_id: str) -> list[str]:
    document = json.loads(horsies("show", task_id, "--json").out)
    text = " ".join(horsies("show", task_id).out.split())
    assert all(reason in text for reason in document["waits_because"])
    assert ("waits because" in text) == bool(document["waits_because"])
    found: list[str] = document["waits_because"]
    return found


def test_show_names_the_obstacles_of_a_waiting_task(horsies: Run, database: Database) -> None:
    task_id = add_task(database, task_name="resize", queue_name="mail")
    assert reasons(horsies, task_id) == [
        "No live worker serves queue 'mail'; no worker is running."
    ]
    known = '{"tasks": {"other": "1"}}'
    worker = add_worker(database, queues=["mail"], known_tasks=known)
    database.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('mail', now() - interval '90 min')"
    )
    assert reasons(horsies, task_id) == [
        "Queue 'mail' was paused 1 h 30 min ago.",
        "No live worker of queue 'mail' knows task 'resize'; it fails with "
        "WORKER_RESOLUTION_ERROR.",
    ]
    database.execute("UPDATE horsies_queues SET paused_at = NULL")
    database.execute("UPDATE horsies_workers SET known_tasks = NULL")
    assert reasons(horsies, task_id) == []
    database.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error, worker_id) "
        "SELECT id, 'task', status, generation, 'claim', '22012 division by zero', %s "
        "FROM horsies_tasks",
        (worker,),
    )
    assert reasons(horsies, task_id) == [
        "The database refuses to claim it: 22012 division by zero."
    ]
    database.execute("UPDATE horsies_tasks SET status = 'CANCELLED'")
    assert reasons(horsies, task_id) == []


def test_a_task_that_no_process_ran_is_shown_without_a_pid(
    horsies: Run, database: Database
) -> None:
    task_id = add_task(database, status="FAILED", worker_hostname="web-1")
    lines = horsies("show", task_id).out.splitlines()
    assert [line.split() for line in lines if line.startswith("process")] == [["process", "web-1"]]
