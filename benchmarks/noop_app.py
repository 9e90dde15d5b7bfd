"""The application the worker benchmarks run: tasks that do nothing, or hardly anything."""

from __future__ import annotations

import time

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult

app = Horsies(AppConfig(broker=PostgresConfig.from_env(pool_size=1)))


@app.task("noop")
def noop() -> TaskResult[None, TaskError]:
    """Do nothing, successfully."""
    return TaskResult(ok=None)


@app.task("nap")
def nap() -> TaskResult[None, TaskError]:
    """Wait for something else, as most tasks do."""
    time.sleep(0.005)
    return TaskResult(ok=None)


@app.task("after")
def after(before: TaskResult[None, TaskError]) -> TaskResult[None, TaskError]:
    """Do nothing with the result of another node."""
    return before
