"""The Horsies application of the site."""

from __future__ import annotations

from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[CustomQueueConfig(name="default"), CustomQueueConfig(name="mail")],
    )
)

# A producer on the same database, without its own queues.
plain = Horsies()
