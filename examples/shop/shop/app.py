"""The application: its queues, the daily report, and the code around every task."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import time

from horsies import (
    AppConfig,
    CurrentTask,
    CustomQueueConfig,
    DailySchedule,
    Horsies,
    PerKey,
    PostgresConfig,
    QueueMode,
    Rate,
    ScheduleConfig,
    TaskSchedule,
)

REPORT = TaskSchedule(
    name="daily-report",
    task_name="shop.tasks.report",
    pattern=DailySchedule(time=time(6, 0)),
    timezone="Europe/Berlin",
)

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="orders", priority=1),
            # At most five calls to the payment gateway at a time, and 50 per second, in the whole cluster.
            CustomQueueConfig(
                name="payments", priority=2, max_concurrency=5, rate=Rate(count=50, per_seconds=1)
            ),
            # The key of a task is its customer: at most two tasks of a customer run at a time.
            CustomQueueConfig(name="invoices", priority=2, per_key=PerKey(max_concurrency=2)),
            CustomQueueConfig(name="reports", priority=3),
        ],
        schedule=ScheduleConfig(schedules=[REPORT]),
    )
)
app.discover_tasks(["shop.tasks", "shop.fulfilment"])


@app.around_task
def log_customer(task: CurrentTask) -> Iterator[None]:
    """Log the customer that the sender put into the headers; Sentry or a session would go here too."""
    if customer := task.headers.get("customer"):
        task.logger.info("works for %s", customer)
    yield
