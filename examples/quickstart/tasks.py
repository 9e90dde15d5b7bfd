"""The first application: one task, on the database that HORSIES_DATABASE_URL names."""

from horsies import Horsies, TaskError, TaskResult

app = Horsies()


@app.task("add")
def add(a: int, b: int) -> TaskResult[int, TaskError]:
    """Add two numbers."""
    return TaskResult(ok=a + b)
