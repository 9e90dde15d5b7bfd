"""The pages of redacted tasks and runs show that they ran, and nothing about the person."""

from __future__ import annotations

import pytest

from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.traces import PERSON, add_person, add_personal_run
from tests.support.web_server import Ask


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_a_redacted_task_and_run_have_their_pages(
    ask: Ask, connection: Database, horsies: Run, prefix: str
) -> None:
    task_id, run_id = add_person(connection), add_personal_run(connection)
    assert PERSON in ask(f"{prefix}/tasks/{task_id}", payload=True).text
    assert horsies("redact", task_id, run_id, "--yes").code == 0
    for path in (f"/tasks/{task_id}", f"/workflows/{run_id}", "/tasks", "/workflows", "/failures"):
        answer = ask(prefix + path, payload=True)
        assert (answer.status_code, PERSON in answer.text) == (200, False), path
    assert "edacted" in ask(f"{prefix}/tasks/{task_id}", payload=True).text
