"""Fixtures: a task to send, both faces of sending, and a database that can go away."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from horsies.app import Horsies
from horsies.task import TaskFunction
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.request import TaskSendResult

Task: TypeAlias = TaskFunction[..., Any]


def add_task(app: Horsies, **options: Any) -> Task:
    """Define the task most tests send."""

    @app.task("add", **options)
    def add(a: int, b: int = 0) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    return add


def store_task(app: Horsies) -> Task:
    """Define a task that takes anything JSON can hold."""

    @app.task("store")
    def store(value: Any) -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    return store


@pytest.fixture
def add(app: Horsies) -> Task:
    return add_task(app)


SendResult: TypeAlias = TaskSendResult[Any]
