"""The record of changes made by people: one row for each, in the transaction of the change."""

from __future__ import annotations

import getpass
import logging
import socket
from typing import Any

import pytest

from horsies import Horsies
from horsies.config.app import RecoveryConfig
from horsies.db.pipeline import Pipeline
from horsies.monitoring import acting_as
from horsies.worker.reaper import sweep
from tests.support.applications import Call
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import UNKNOWN_ID, add_run, add_task, ago

PROCESS = f"{getpass.getuser()}@{socket.gethostname()}"


def recorded(connection: Database) -> list[tuple[Any, ...]]:
    """Return actor, source, verb, subject, outcome and detail of every row, oldest first."""
    return connection.execute(
        "SELECT actor, source, verb, subject, outcome, detail FROM horsies_actions ORDER BY id"
    ).fetchall()


def test_a_pause_names_its_author_and_reason_and_a_repeated_one_changes_nothing(
    app: Horsies, connection: Database, call: Call
) -> None:
    with acting_as("anna"):
        call(app, app, "pause_queue", "default", reason="the provider is down").unwrap()
    call(app, app, "pause_queue", "default").unwrap()
    call(app, app, "resume_queue", "default").unwrap()
    call(app, app, "pause_queue", "mial").unwrap_err()
    subject = "queue default"
    assert recorded(connection) == [
        ("anna", "program", "pause_queue", subject, "done", "the provider is down"),
        (PROCESS, "program", "pause_queue", subject, "unchanged", None),
        (PROCESS, "program", "resume_queue", subject, "done", None),
        (
            *(PROCESS, "program", "pause_queue", "queue mial", "refused"),
            "There is no queue 'mial'; the known ones are: default.",
        ),
    ]


def test_changes_of_tasks_are_recorded_and_so_are_refusals(
    app: Horsies, connection: Database, call: Call
) -> None:
    waiting, failed = add_task(connection), add_task(connection, status="FAILED")
    call(app, app, "cancel_task", waiting).unwrap()
    call(app, app, "cancel_task", failed.upper()).unwrap_err()
    call(app, app, "retry_task", failed).unwrap()
    call(app, app, "retry_task", UNKNOWN_ID).unwrap_err()
    call(app, app, "cancel_task", "no id\0" + "x" * 300).unwrap_err()
    rows = [row[2:] for row in recorded(connection)]
    assert rows[:4] == [
        ("cancel_task", f"task {waiting}", "done", None),
        (
            *("cancel_task", f"task {failed}", "refused"),
            f"Task {failed.upper()} is FAILED and can no longer be cancelled.",
        ),
        ("retry_task", f"task {failed}", "done", None),
        ("retry_task", f"task {UNKNOWN_ID}", "refused", f"There is no task {UNKNOWN_ID}."),
    ]
    assert rows[4][1] == ("task no id\\x00" + "x" * 300)[:255]


def test_changes_of_runs_are_recorded(app: Horsies, connection: Database, horsies: Run) -> None:
    run = add_run(connection, status="RUNNING", started_at=ago(5))
    for words in (
        ("pause", run, "--reason", "an invoice is wrong"),
        ("pause", run),
        ("resume", run),
        ("retry", run),
        ("cancel", run, "--reason", "a duplicate"),
        ("cancel", run),
        ("signal", run, "paid"),
    ):
        horsies("workflow", *words)
    assert [row[1:] for row in recorded(connection)] == [
        ("cli", "pause_run", f"run {run}", "done", "an invoice is wrong"),
        ("cli", "pause_run", f"run {run}", "unchanged", None),
        ("cli", "resume_run", f"run {run}", "done", None),
        ("cli", "retry_run", f"run {run}", "refused", f"No node of workflow {run} has failed."),
        ("cli", "cancel_run", f"run {run}", "done", "a duplicate"),
        ("cli", "cancel_run", f"run {run}", "unchanged", None),
        (
            *("cli", "signal_run", f"run {run}", "refused"),
            f"Workflow {run} is CANCELLED; it takes no more signals.",
        ),
    ]


def test_changes_of_schedules_are_recorded(connection: Database, horsies: Run) -> None:
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, config_hash) VALUES ('nightly', 'h')"
    )
    horsies("schedules", "pause", "nightly", "--reason", "the holidays")
    horsies("schedules", "pause", "nightly")
    horsies("schedules", "resume", "nightly")
    horsies("schedules", "resume", "hourly")
    assert recorded(connection) == [
        (PROCESS, "cli", "pause_schedule", "schedule nightly", "done", "the holidays"),
        (PROCESS, "cli", "pause_schedule", "schedule nightly", "unchanged", None),
        (PROCESS, "cli", "resume_schedule", "schedule nightly", "done", None),
        (
            *(PROCESS, "cli", "resume_schedule", "schedule hourly", "refused"),
            "There is no schedule 'hourly'; the known ones are nightly; run `horsies schedules` to see "
            "all of them.",
        ),
    ]


def test_a_change_whose_record_fails_does_not_happen(
    app: Horsies, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "horsies.audit")
    connection.execute("ALTER TABLE horsies_actions ADD CONSTRAINT no_more CHECK (false)")
    try:
        assert app.pause_queue("default").is_err()
    finally:
        connection.execute("ALTER TABLE horsies_actions DROP CONSTRAINT no_more")
    assert connection.execute("SELECT count(*) FROM horsies_queues").fetchone() == (0,)
    (line,) = caplog.messages
    assert line.startswith(f"{PROCESS} (program): pause_queue queue default: failed, ")


def test_a_hostile_reason_is_stored_and_is_one_line_of_the_log(
    app: Horsies, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "horsies.audit")
    reason = "x\0\ud800<script>'; DROP TABLE horsies_tasks; --\nanna (web): resumed\x1b[2J"
    app.pause_queue("default", reason=reason + "y" * 3_000).unwrap()
    ((*_, detail),) = recorded(connection)
    assert detail.startswith("x\\x00\\ud800<script>'; DROP TABLE horsies_tasks; --\nanna (web)")
    assert len(detail) == 2_000
    (line,) = caplog.messages
    assert "\n" not in line
    assert "--\\nanna (web): resumed\\x1b[2J" in line


def test_a_reason_that_is_no_text_is_refused_before_anything_changes(
    app: Horsies, connection: Database, call: Call
) -> None:
    waiting = add_task(connection)
    with pytest.raises(TypeError, match="cancel_task: reason= takes a text or None, not int"):
        call(app, app.handle(waiting), "cancel", reason=5)
    assert recorded(connection) == []
    assert connection.execute("SELECT status FROM horsies_tasks").fetchone() == ("PENDING",)


def test_a_worker_deletes_records_after_ninety_days(connection: Database, app: Horsies) -> None:
    connection.execute(
        "INSERT INTO horsies_actions (at, actor, source, verb, subject, outcome) "
        "SELECT now() - interval '1 day' * age, 'anna', 'web', 'ping', 'workers', 'done' "
        "FROM generate_series(100, 80, -1) AS age"
    )
    with app.get_broker().database.connection() as own:
        assert sweep(Pipeline(own, prepared=False), RecoveryConfig()) is False
    oldest = "SELECT count(*), min(at) > now() - interval '90 days' FROM horsies_actions"
    assert connection.execute(oldest).fetchone() == (10, True)
