"""An application whose tasks have keys."""

from __future__ import annotations

import time

from horsies import AppConfig, Horsies, PostgresConfig, RetryLater, WorkerResilienceConfig
from tests.support.workers import HARDLY_POLLS, broker_settings

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        resilience=WorkerResilienceConfig(**HARDLY_POLLS["resilience"]),
    )
)


@app.task("work", key="tenant")
def work(tenant: str, ms: int = 0) -> str:
    time.sleep(ms / 1000)
    return tenant


@app.task("async_work", key="tenant")
async def async_work(tenant: str) -> str:
    return tenant


@app.task("plain")
def plain(ms: int = 0) -> None:
    time.sleep(ms / 1000)


@app.task("twice", key="tenant")
def twice(tenant: str) -> str:
    """Fail in the first attempt; the retry follows shortly afterwards."""
    from horsies import current_task

    if current_task().attempt == 1:
        raise RetryLater(0.2)
    return tenant
