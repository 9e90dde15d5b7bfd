"""The queue settings, also importable from this documented path."""

from horsies.config.app import CustomQueueConfig, QueueMode

__all__ = ["CustomQueueConfig", "QueueMode"]
