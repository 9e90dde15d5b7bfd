"""The application of the benchmark of keys: a queue without limits, and two queues with a cap per key."""

from __future__ import annotations

import time

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PerKey,
    PostgresConfig,
    QueueMode,
    RetryPolicy,
    TaskError,
    TaskResult,
)

# The cap of the hot key, and the duration of its tasks.
HOT_PLACES = 2
HOT_SECONDS = 0.05

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(pool_size=1),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="open"),
            CustomQueueConfig(name="capped", per_key=PerKey(max_concurrency=50)),
            CustomQueueConfig(name="hot", per_key=PerKey(max_concurrency=HOT_PLACES)),
        ],
    )
)
AGAIN = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])


@app.task("noop", queue_name="open", key="tenant")
def noop(tenant: str = "any") -> TaskResult[None, TaskError]:
    """Do nothing, in a separate child."""
    return TaskResult(ok=None)


@app.task("burst", queue_name="open", key="tenant", retry_policy=AGAIN)
def burst(tenant: str = "any") -> TaskResult[None, TaskError]:
    """Do nothing; the task is retried after a crash."""
    return TaskResult(ok=None)


@app.task("capped", queue_name="capped", key="tenant")
def capped(tenant: str = "any") -> TaskResult[None, TaskError]:
    """Do nothing, under a cap that is never reached."""
    return TaskResult(ok=None)


@app.task("hot", queue_name="hot", key="tenant")
def hot(tenant: str = "any") -> TaskResult[None, TaskError]:
    """Wait for an external event, as most tasks do."""
    time.sleep(HOT_SECONDS)
    return TaskResult(ok=None)
