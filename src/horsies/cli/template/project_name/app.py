"""The application: its database and its schedule.

HORSIES_DATABASE_URL names the database: embedded:// while you develop, your server in production.
"""

from datetime import time

from horsies import (
    AppConfig,
    DailySchedule,
    Horsies,
    PostgresConfig,
    ScheduleConfig,
    TaskSchedule,
)

NIGHTLY = TaskSchedule(
    name="nightly-report",
    task_name="project_name.tasks.report",
    pattern=DailySchedule(time=time(3, 0)),
    timezone="UTC",
)

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(),
        schedule=ScheduleConfig(schedules=[NIGHTLY]),
    )
)
app.discover_tasks(["project_name.tasks", "project_name.workflows"])
