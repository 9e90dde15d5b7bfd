"""The queue settings, which can also be imported from this documented path."""

from horsies.config.app import CustomQueueConfig, QueueMode

__all__ = ["CustomQueueConfig", "QueueMode"]
