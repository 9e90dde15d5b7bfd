"""`horsies cancel` and `horsies retry` with several ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from horsies.ids import new_id
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_task, row_of


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
