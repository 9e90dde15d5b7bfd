"""Five queues: alarms in the first queue, very short tasks in all of them."""

from __future__ import annotations

from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode
from tests.support.workers import broker_settings

LANES = ("first", "second", "third", "fourth", "last")

app = Horsies(
    AppConfig(
        broker=PostgresConfig(**broker_settings()),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name=name, priority=number)
            for number, name in enumerate(LANES, start=1)
        ],
    )
)


@app.task("alarm", queue_name="first")
def alarm() -> None:
    """Run in a separate child."""


@app.task("blink", queue_name="last", burst=True)
def blink() -> None:
    """Run for so short a time that the task may wait in a child."""
