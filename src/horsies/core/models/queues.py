"""The queue settings, also importable from this documented path."""

from horsies.config import CustomQueueConfig, QueueMode

__all__ = ["CustomQueueConfig", "QueueMode"]
