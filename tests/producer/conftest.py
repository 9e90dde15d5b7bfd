"""Fixtures: a task to send, both faces of sending, and a database that can go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.task import TaskFunction
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.request import TaskSendResult
from tests.producer.rows import Database
from tests.proxy import Proxy

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


def run_closing(app: Horsies, work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work on an event loop of its own and leave no connection behind."""

    async def main() -> Any:
        try:
            return await work
        finally:
            await app.close_async()

    return asyncio.run(main())


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


def app_at(url: str, **settings: Any) -> Horsies:
    """Return an application on this URL that does not wait long for connections."""
    broker = PostgresConfig(database_url=url, pool_size=1, max_overflow=4, pool_timeout=0.5)
    return Horsies(AppConfig(broker=broker, **settings))


@pytest.fixture
def distant_app(proxy: Proxy) -> Iterator[Horsies]:
    """An application that reaches the database through the proxy."""
    application = app_at(proxy.url)
    yield application
    application.close()


SendResult: TypeAlias = TaskSendResult[Any]
