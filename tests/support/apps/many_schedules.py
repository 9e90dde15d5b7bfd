"""An application with many schedules, which would not fit into an environment variable."""

from __future__ import annotations

from horsies import (
    AppConfig,
    Horsies,
    IntervalSchedule,
    PostgresConfig,
    ScheduleConfig,
    TaskError,
    TaskResult,
    TaskSchedule,
)
from tests.support.schedulers import MANY, MANY_SECONDS
from tests.support.workers import broker_settings

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        schedule=ScheduleConfig(
            schedules=[
                TaskSchedule(
                    name=f"number {number}",
                    task_name="nothing",
                    pattern=IntervalSchedule(seconds=MANY_SECONDS),
                    catch_up_missed=True,
                )
                for number in range(MANY)
            ],
            check_interval_seconds=1,
        ),
    )
)


@app.task("nothing")
def nothing() -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)
