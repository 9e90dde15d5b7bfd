"""Commands as a newcomer types them: several ids, pings without workers, tracebacks, delayed tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from psycopg import sql

from horsies.ids import new_id
from tests.monitor.conftest import Run
from tests.support.database import Database
from tests.support.rows import add_task, add_worker, ago, row_of

pytestmark = pytest.mark.usefixtures("database")

# Several ids in one command


def test_retry_takes_several_ids_and_an_application(
    horsies: Run, database: Database, tmp_path: Path, process_url: str
) -> None:
    app = tmp_path / "several.py"
    app.write_text(
        "from horsies import AppConfig, Horsies, PostgresConfig\n"
        f"app = Horsies(AppConfig(broker=PostgresConfig(database_url={process_url!r})))\n"
    )
    old = [add_task(database, status="FAILED") for _ in range(2)]
    for arguments in (old, [*old, str(app)]):
        finished = horsies("retry", *arguments)
        assert (finished.code, finished.err) == (0, "")
        lines = finished.out.splitlines()
        assert [line.split()[1] for line in lines] == old
        new = [line.split()[-1].rstrip(".") for line in lines]
        assert [row_of(database, one)["retried_from_task_id"] for one in new] == old


def test_cancel_reports_each_task_and_the_worst_exit_code(horsies: Run, database: Database) -> None:
    waiting, ended, unknown = add_task(database), add_task(database, status="FAILED"), new_id()
    finished = horsies("cancel", unknown, ended, waiting)
    assert finished.code == 1
    assert finished.out == f"Task {waiting} was PENDING; it is cancelled.\n"
    assert finished.err == (
        f"error: There is no task {unknown}.\n"
        f"error: Task {ended} is FAILED and can no longer be cancelled.\n"
    )
    assert horsies("cancel", unknown, new_id()).code == 4


def test_several_changes_are_one_json_document(horsies: Run, database: Database) -> None:
    ids = [add_task(database) for _ in range(2)]
    document = json.loads(horsies("cancel", *ids, new_id(), "--json").out)
    assert document == {"tasks": [{"task_id": one, "was_status": "PENDING"} for one in ids]}


@pytest.mark.parametrize("typo", ["01a1dd42", "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8", "a-b"])
@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_an_id_that_is_not_one_is_refused_before_any_change(
    horsies: Run, database: Database, command: str, typo: str
) -> None:
    task_id = add_task(database, status="PENDING" if command == "cancel" else "FAILED")
    finished = horsies(command, task_id, typo)
    assert (finished.code, finished.out) == (4, "")
    assert finished.err == f"error: {typo!r} is not a task id; no task was changed.\n"
    assert database.execute(
        "SELECT count(*), max(cancel_requested_at) FROM horsies_tasks"
    ).fetchone() == (1, None)


# A ping without an answer


def test_a_ping_without_an_answer_ends_in_1(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.cli.queues_workers.PING_TIMEOUT_SECONDS", 0.05)
    sentence = "error: No worker responded to the ping.\n"
    finished = horsies("workers", "--ping")
    assert (finished.code, finished.out, finished.err) == (1, "No worker is running.\n", sentence)
    worker_id = add_worker(database)
    finished = horsies("workers", "--ping", "--json")
    assert (finished.code, finished.err) == (1, sentence)
    (worker,) = json.loads(finished.out)["workers"]
    assert (worker["worker_id"], worker["ping_ms"]) == (worker_id, None)
    assert horsies("workers").code == 0


# Tracebacks


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
    "result", ['{"ok":{"exception":{"traceback":"x"}}}', '{"err":{"exception":null}}', "[1]", "no"]
)
def test_other_results_are_printed_as_they_are_stored(
    horsies: Run, database: Database, result: str
) -> None:
    shown = horsies("show", add_task(database, result=result), "--payload").out
    assert result in shown
    assert "\ntraceback" not in shown


# Delayed tasks


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


# Why a task does not run


def reasons(horsies: Run, task_id: str) -> list[str]:
    document = json.loads(horsies("show", task_id, "--json").out)
    text = " ".join(horsies("show", task_id).out.split())
    assert all(reason in text for reason in document["waits_because"])
    assert ("waits because" in text) == bool(document["waits_because"])
    found: list[str] = document["waits_because"]
    return found


def test_show_names_the_obstacles_of_a_waiting_task(horsies: Run, database: Database) -> None:
    task_id = add_task(database, task_name="resize", queue_name="mail")
    assert reasons(horsies, task_id) == ["no running worker serves queue 'mail'"]
    known = '{"tasks": {"other": "1"}}'
    worker = add_worker(database, queues=["mail"], known_tasks=known)
    database.execute("INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('mail', now())")
    assert reasons(horsies, task_id) == [
        "queue 'mail' is paused",
        "no running worker of its queue knows task 'resize'",
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
    assert reasons(horsies, task_id) == ["the database refuses to claim it: 22012 division by zero"]
    database.execute("UPDATE horsies_tasks SET status = 'CANCELLED'")
    assert reasons(horsies, task_id) == []


def test_a_task_that_no_process_ran_is_shown_without_a_pid(
    horsies: Run, database: Database
) -> None:
    task_id = add_task(database, status="FAILED", worker_hostname="web-1")
    lines = horsies("show", task_id).out.splitlines()
    assert [line.split() for line in lines if line.startswith("process")] == [["process", "web-1"]]
