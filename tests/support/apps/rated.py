"""An application with two queues, one of them limited by a rate."""

from __future__ import annotations

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PostgresConfig,
    QueueMode,
    Rate,
    WorkerResilienceConfig,
)
from tests.support.workers import broker_settings

PER_SECOND = 20

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="api", priority=1, rate=Rate(count=PER_SECOND, burst=2)),
            CustomQueueConfig(name="open", priority=2),
        ],
        resilience=WorkerResilienceConfig(notify_poll_interval_ms=60_000),
    )
)


@app.task(queue_name="api")
def call(number: int) -> int:
    return number


@app.task("plain", queue_name="open")
def plain(number: int) -> int:
    return number
