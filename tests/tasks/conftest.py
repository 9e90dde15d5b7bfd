"""Fixtures: a task to send, both faces of sending, and a database that can go away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from horsies.app import Horsies
from horsies.task import TaskFunction
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.request import TaskSendResult
from tests.support.applications import app_at, run_closing
from tests.support.producer_rows import Database
from tests.support.proxy import Proxy

Task: TypeAlias = TaskFunction[..., Any]
Call: TypeAlias = Callable[..., Any]


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


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Call:
    """Call a method of a task or handle, or its _async twin; both must behave the same."""

    def through(app: Horsies, target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            return getattr(target, method)(*args, **kwargs)
        return run_closing(app, getattr(target, f"{method}_async")(*args, **kwargs))

    return through


@pytest.fixture
def proxy(process_url: str, connection: Database) -> Iterator[Proxy]:
    """A way to this process's database that can be cut."""
    with Proxy(process_url) as proxy:
        yield proxy


@pytest.fixture
def distant_app(proxy: Proxy) -> Iterator[Horsies]:
    """An application that reaches the database through the proxy."""
    application = app_at(proxy.url)
    yield application
    application.close()


SendResult: TypeAlias = TaskSendResult[Any]
