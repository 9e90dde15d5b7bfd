"""The application of the demonstration: six tasks with six different outcomes."""

import os
import time
from pathlib import Path

from horsies import AppConfig, Horsies, PostgresConfig, RetryPolicy, TaskError, TaskResult

app = Horsies(AppConfig(broker=PostgresConfig.from_env()))
app.discover_tasks(["demo_workflow"])


@app.task("add")
def add(a: int, b: int) -> TaskResult[int, TaskError]:
    """Succeed."""
    return TaskResult(ok=a + b)


@app.task("withdraw")
def withdraw(balance: int, amount: int) -> TaskResult[int, TaskError]:
    """Return a business error as a value."""
    if amount > balance:
        return TaskResult(err=TaskError(error_code="INSUFFICIENT_FUNDS", message="too little"))
    return TaskResult(ok=balance - amount)


@app.task("divide", exception_mapper={ZeroDivisionError: "NOT_A_NUMBER"})
def divide(a: int, b: int) -> TaskResult[float, TaskError]:
    """Raise: the mapper turns the exception into an error code."""
    return TaskResult(ok=a / b)


@app.task(
    "fetch_rate",
    retry_policy=RetryPolicy.fixed([1], auto_retry_for=["GATEWAY_DOWN"], jitter=False),
)
def fetch_rate(marker: Path) -> TaskResult[float, TaskError]:
    """Fail and leave the marker; the retry a second later finds it and succeeds."""
    if not marker.exists():
        marker.touch()
        return TaskResult(err=TaskError(error_code="GATEWAY_DOWN", message="try again"))
    return TaskResult(ok=1.08)


@app.task("crash")
def crash() -> TaskResult[None, TaskError]:
    """Crash the process."""
    os._exit(3)


@app.task("oversleep", timeout_ms=500)
def oversleep(seconds: int) -> TaskResult[None, TaskError]:
    """Run longer than allowed."""
    time.sleep(seconds)
    return TaskResult(ok=None)
