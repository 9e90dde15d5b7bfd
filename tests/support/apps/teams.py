"""An application whose queues are served by different workers, with a cap of one task in total."""

from __future__ import annotations

import time

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    TaskError,
    TaskResult,
    WorkerResilienceConfig,
)
from tests.support.workers import broker_settings

QUEUES = ("urgent", "mail", "reports")

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name=name, priority=number)
            for number, name in enumerate(QUEUES, start=1)
        ],
        cluster_wide_cap=1,
        recovery=RecoveryConfig(check_interval_ms=1_000),
        # Polls are rare, so that only notifications and due times start tasks in time.
        resilience=WorkerResilienceConfig(notify_poll_interval_ms=300_000),
    )
)


@app.task("mail", queue_name="mail")
def mail(seconds: float = 0) -> TaskResult[None, TaskError]:
    time.sleep(seconds)
    return TaskResult(ok=None)


@app.task("report", queue_name="reports")
def report() -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


@app.task("alarm", queue_name="urgent")
def alarm() -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)
