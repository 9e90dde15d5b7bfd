"""Tasks with effects, in a queue that runs the tasks of each key one after the other."""

from __future__ import annotations

from horsies import (
    INJECTED,
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PerKey,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    TaskTransaction,
    WorkerResilienceConfig,
)
from tests.support.apps.booking import AGAIN, insert
from tests.support.workers import HARDLY_POLLS, QUICK_RECOVERY, broker_settings

# The count of numbers per key.
SPAN = 100

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name="ordered", per_key=PerKey(max_concurrency=1, order="fifo"))
        ],
        recovery=RecoveryConfig.model_validate(QUICK_RECOVERY["recovery"]),
        resilience=WorkerResilienceConfig.model_validate(HARDLY_POLLS["resilience"]),
    )
)


@app.task("book_in_order", queue_name="ordered", key="key", retry_policy=AGAIN)
def book_in_order(key: str, number: int, tx: TaskTransaction = INJECTED) -> list[int]:
    """Write a row; return the numbers that the earlier tasks of the key have written."""
    insert(tx, number)
    own = (number - number % SPAN, number - 1)
    query = "SELECT number FROM bookings WHERE number BETWEEN %s AND %s ORDER BY number"
    return [one for (one,) in tx.connection.execute(query, own).fetchall()]
