"""Applications on a test database that are closed after use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.task import TaskDecorator, TaskFunction
from horsies.task_result import TaskError, TaskResult

NOWHERE = "postgresql://127.0.0.1:1/nowhere"
UNREACHABLE = "postgresql://app:hunter2@127.0.0.1:1/shop"
Call: TypeAlias = Callable[..., Any]
Task: TypeAlias = TaskFunction[..., Any]


def run_closing(app: Horsies, work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work on its own event loop and leave no connection open."""

    async def main() -> Any:
        try:
            return await work
        finally:
            await app.close_async()

    return asyncio.run(main())


def app_at(url: str, **settings: Any) -> Horsies:
    """Return an application on this URL that does not wait long for connections."""
    broker = PostgresConfig(database_url=url, pool_size=1, max_overflow=4, pool_timeout=0.5)
    return Horsies(AppConfig(broker=broker, **settings))


def add_task(app: Horsies, **options: Any) -> Task:
    """Define the task that most tests send."""

    decorate: TaskDecorator = app.task("add", **options)

    @decorate
    def add(a: int, b: int = 0) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    return add


def store_task(app: Horsies) -> Task:
    """Define a task that takes any JSON value."""

    @app.task("store")
    def store(value: Any) -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    return store


def never_poll(app: Horsies) -> None:
    """Make polls so rare that waiters wake only on notifications."""
    app.get_broker().waiters._poll_seconds = 600.0
