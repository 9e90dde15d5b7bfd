"""The application the worker benchmarks run: tasks that do nothing."""

from __future__ import annotations

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult

app = Horsies(AppConfig(broker=PostgresConfig.from_env(pool_size=1)))


@app.task("noop")
def noop() -> TaskResult[None, TaskError]:
    """Do nothing, successfully."""
    return TaskResult(ok=None)


@app.task("after")
def after(before: TaskResult[None, TaskError]) -> TaskResult[None, TaskError]:
    """Do nothing with the result of another node."""
    return before
