"""An application with four kinds of queues: served first, capped, closed by a cap of zero, and plain."""

from __future__ import annotations

import time

from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode
from tests.support.workers import broker_settings

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="first", priority=1),
            CustomQueueConfig(name="capped", priority=2, max_concurrency=1),
            CustomQueueConfig(name="zero", priority=3, max_concurrency=0),
            CustomQueueConfig(name="mail", priority=4),
        ],
    )
)


@app.task(queue_name="mail")
def sleep(seconds: float) -> None:
    time.sleep(seconds)
