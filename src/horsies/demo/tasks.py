"""The demonstration's tasks and its schedule."""

import os
import time
from pathlib import Path

from horsies import (
    AppConfig,
    Horsies,
    IntervalSchedule,
    PostgresConfig,
    RetryPolicy,
    ScheduleConfig,
    TaskFailed,
    TaskSchedule,
    current_task,
)

FRAMES = 40

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(),
        schedule=ScheduleConfig(
            schedules=[
                TaskSchedule(
                    name="every-second", task_name="tick", pattern=IntervalSchedule(seconds=1)
                )
            ]
        ),
    )
)
app.discover_tasks(["horsies.demo.workflow"])


@app.task("square")
def square(number: int) -> int:
    """Return the square of a number; the demonstration's batch has a thousand of these tasks."""
    return number * number


@app.task("add")
def add(a: int, b: int) -> int:
    """Succeed."""
    return a + b


@app.task("withdraw")
def withdraw(balance: int, amount: int) -> int:
    """Fail with an error code of the application."""
    if amount > balance:
        raise TaskFailed("INSUFFICIENT_FUNDS", "too little")
    return balance - amount


@app.task("divide", exception_mapper={ZeroDivisionError: "NOT_A_NUMBER"})
def divide(a: int, b: int) -> float:
    """Raise an exception that the mapper converts to an error code."""
    return a / b


@app.task("fetch_rate", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["GATEWAY_DOWN"]))
def fetch_rate(marker: Path) -> float:
    """Fail and leave a marker; the retry a second later finds the marker and succeeds."""
    if not marker.exists():
        marker.touch()
        raise TaskFailed("GATEWAY_DOWN", "try again")
    return 1.08


@app.task("crash")
def crash() -> None:
    """Crash the process."""
    os._exit(3)


@app.task("oversleep", timeout_ms=500)
def oversleep(seconds: int) -> None:
    """Run longer than the time limit."""
    time.sleep(seconds)


@app.task("render", retry_policy=RetryPolicy.fixed([0.2], auto_retry_for=["WORKER_CRASHED"]))
def render() -> int:
    """Report progress; the first attempt is slow, so that its process can be killed while it runs."""
    task = current_task()
    for frame in range(1, FRAMES + 1):
        task.progress(frame, FRAMES, f"frame {frame}")
        time.sleep(1 if task.attempt == 1 else 0.01)
    return FRAMES


@app.task("tick")
def tick() -> str:
    """Return the time; a schedule sends this task once per second."""
    return time.strftime("%H:%M:%S")
