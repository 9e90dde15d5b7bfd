"""Habits that users bring from other task queues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from horsies import (
    AppConfig,
    Horsies,
    PayloadConfig,
    PayloadPolicy,
    PostgresConfig,
    RetrievalCode,
    TaskError,
    TaskResult,
)
from horsies.app import RegisteredTasks
from horsies.ids import new_id

URL = "postgresql://app:hunter2@127.0.0.1:1/shop"


@pytest.mark.parametrize("kind", ["task", "workflow"])
def test_get_in_a_running_event_loop_has_a_code_of_its_own(kind: str) -> None:
    app = Horsies(URL)
    handle: Any = app.handle(new_id()) if kind == "task" else app.workflow_handle(new_id())

    async def main() -> TaskResult[Any, TaskError]:
        result: TaskResult[Any, TaskError] = handle.get()
        return result

    error = asyncio.run(main()).err_value
    assert error.error_code is RetrievalCode.EVENT_LOOP_RUNNING
    assert "_async" in str(error.message)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (TaskResult(ok=3), "TaskResult(ok=3)"),
        (TaskResult(ok=None), "TaskResult(ok=None)"),
        (TaskResult(ok="x" * 1000), f"TaskResult(ok='{'x' * 97}...{'x' * 98}')"),
        (
            TaskResult(ok=list(range(1_000_000))),
            "TaskResult(ok=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...])",
        ),
        (
            TaskResult(err=TaskError(error_code="NO", message="it failed")),
            "TaskResult(err=TaskError(error_code='NO', message='it failed'))",
        ),
    ],
)
def test_a_result_shows_its_value_shortened(
    result: TaskResult[Any, TaskError], expected: str
) -> None:
    assert repr(result) == expected


def test_the_tasks_of_an_application_are_a_mapping_and_a_call() -> None:
    app = Horsies(URL)

    @app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    assert isinstance(app.tasks, RegisteredTasks)
    assert app.tasks["add"] is add
    assert list(app.tasks.items()) == [("add", add)]
    assert app.tasks() == {"add": add}
    assert "sub" not in app.tasks


def test_other_names_mean_the_same() -> None:
    app = Horsies(URL, run_schema_migrations=False)
    assert app.migrates is Horsies(URL, migrate=False).migrates is False
    assert app.rerun_task == app.retry_task
    assert app.rerun_task_async == app.retry_task_async
    config = AppConfig(broker=PostgresConfig(database_url=URL), payload=PayloadPolicy(warn_bytes=7))
    assert config.payload == PayloadConfig(warn_bytes=7)
