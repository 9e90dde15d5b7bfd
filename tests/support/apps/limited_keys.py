"""An application whose keys have limits. Its tasks record in a file when they start and end."""

from __future__ import annotations

import json
import os
import random
import time

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PerKey,
    PostgresConfig,
    QueueMode,
    Rate,
    RecoveryConfig,
    RetryPolicy,
    WorkerResilienceConfig,
)
from tests.support.workers import CONFIG_VARIABLE, QUICK_RECOVERY, broker_settings

JOURNAL = os.environ.get("HORSIES_E2E_JOURNAL", "")
CAP = 2
PER_SECOND = 20
BURST = 2


def read_resilience() -> WorkerResilienceConfig:
    config = json.loads(os.environ.get(CONFIG_VARIABLE) or "{}")
    settings = {"notify_poll_interval_ms": 1_000, "db_retry_max_ms": 500}
    return WorkerResilienceConfig(**settings | config.get("resilience", {}))


app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="capped", per_key=PerKey(max_concurrency=CAP)),
            CustomQueueConfig(name="ordered", per_key=PerKey(order="fifo")),
            CustomQueueConfig(
                name="rated", per_key=PerKey(rate=Rate(count=PER_SECOND, burst=BURST))
            ),
            CustomQueueConfig(name="newest"),
        ],
        recovery=RecoveryConfig.model_validate(QUICK_RECOVERY["recovery"]),
        resilience=read_resilience(),
    )
)

ALWAYS = RetryPolicy.fixed(
    [0.05] * 20, auto_retry_for=["WORKER_CRASHED", "WORKER_STOPPED", "UNHANDLED_EXCEPTION"]
)


def _write(what: str, queue: str, key: str, number: int) -> None:
    """Append one line in a single write."""
    line = f"{time.monotonic():.6f} {os.getpid()} {what} {queue} {key} {number}\n".encode()
    journal = os.open(f"{JOURNAL}.keys", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(journal, line)
    finally:
        os.close(journal)


def _work(queue: str, key: str, number: int) -> None:
    _write("start", queue, key, number)
    time.sleep(random.uniform(0, 0.01))
    if random.random() < 0.1:
        _write("fail", queue, key, number)
        raise OSError("a failure that is retried")
    _write("end", queue, key, number)


@app.task("capped", queue_name="capped", key="key", retry_policy=ALWAYS)
def capped(key: str, number: int) -> None:
    _work("capped", key, number)


@app.task("ordered", queue_name="ordered", key="key", retry_policy=ALWAYS)
def ordered(key: str, number: int) -> None:
    _work("ordered", key, number)


@app.task("rated", queue_name="rated", key="key", retry_policy=ALWAYS)
def rated(key: str, number: int) -> None:
    _work("rated", key, number)


@app.task("newest", queue_name="newest", key="key", retry_policy=ALWAYS)
def newest(key: str, number: int) -> None:
    _work("newest", key, number)


@app.task("rest", queue_name="newest", retry_policy=ALWAYS)
def rest(label: str) -> None:
    """Run until the test releases the label."""
    while not os.path.exists(f"{JOURNAL}.{label}"):
        time.sleep(0.01)
