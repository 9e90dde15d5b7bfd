"""The application whose task is traced."""

import os

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult

app = Horsies(AppConfig(broker=PostgresConfig(database_url=os.environ["HORSIES_TRACE_DATABASE"])))


@app.task("add")
def add(a: int, b: int) -> TaskResult[int, TaskError]:
    """Add two numbers."""
    return TaskResult(ok=a + b)
