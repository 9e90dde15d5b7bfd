"""The queue settings, importable from this documented path as well."""

from horsies.config.app import CustomQueueConfig, QueueMode

__all__ = ["CustomQueueConfig", "QueueMode"]
