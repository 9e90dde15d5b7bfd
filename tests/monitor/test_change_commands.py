"""`horsies cancel` and `horsies retry` with several ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from horsies.ids import new_id
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_run, add_task, row_of


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


TASK = "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a"
TWIN = "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8b"
RUN = "01a1dd42-fbab-7000-8000-000000000001"


def test_the_first_digits_of_an_id_are_enough_to_change_it(
    horsies: Run, database: Database
) -> None:
    add_task(database, id=TASK)
    add_run(database, id=RUN, root_workflow_id=RUN, status="RUNNING")
    paused = horsies("workflow", "pause", "01a1dd42")  # the task with these digits does not count
    assert (paused.code, RUN in paused.out) == (0, True)
    cancelled = horsies("cancel", "01a1dd42")
    assert (cancelled.code, f"Task {TASK} was PENDING" in cancelled.out) == (0, True)
    add_task(database, id=TWIN)
    ambiguous = horsies("retry", "01a1dd42")
    assert (ambiguous.code, ambiguous.out) == (4, "")
    assert "Several ids begin with 01a1dd42" in ambiguous.err
    assert horsies("retry", TASK).code == 0
    assert horsies("cancel", "ffffff").code == 4


def test_one_argument_is_changed_by_its_name(
    horsies: Run, database: Database, tmp_path: Path, process_url: str
) -> None:
    app = tmp_path / "edited.py"
    app.write_text(
        "from horsies import AppConfig, Horsies, PostgresConfig\n"
        f"app = Horsies(AppConfig(broker=PostgresConfig(database_url={process_url!r})))\n"
        "@app.task('echo')\ndef echo(value: int, other: str = '') -> int:\n    return value\n"
    )
    failed = add_task(database, task_name="echo", status="FAILED", args='["a"]')
    missing = horsies("retry", failed, "--set", "value=1")
    assert (missing.code, "needs the application" in missing.err) == (1, True)
    for text in ("value", "=1", "value=one"):
        wrong = horsies("retry", failed, "--set", text)
        assert (wrong.code, "write NAME=JSON" in wrong.err) == (2, True)
    several = horsies("retry", "--queue", "default", "--set", "value=1")
    assert (several.code, "changes one task" in several.err) == (2, True)
    misfit = horsies("retry", failed, str(app), "--set", 'value="b"')
    assert (misfit.code, "Nothing was sent." in misfit.err) == (1, True)
    sent = horsies("retry", failed, str(app), "--set", "value=5", "--json")
    assert (sent.code, sent.err) == (0, "")
    assert row_of(database, json.loads(sent.out)["task_id"])["kwargs"] == '{"value":5}'
