"""Catalogue of the statements that show and change the keys of queues."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName

KEYS = StatementFile("keys.sql")


class KeyState(NamedTuple):
    """One key of a queue: its tasks, and the limits that hold for it."""

    queue_name: str
    """The name of the queue."""
    key: str
    """The key."""
    due: int
    """How many of its tasks are due, counted up to 1,000."""
    first_due_at: datetime | None
    """Since when the task that starts first is due; None without one."""
    in_flight: int
    """How many of its tasks are claimed or running."""
    max_concurrency: int | None
    """The most tasks in flight; None if there is no limit."""
    rate_seconds: float | None
    """The seconds between two starts under its rate; None without a rate."""
    rate_burst: int | None
    """How many tasks its rate lets start at once; None without a rate."""
    weight: float
    """How many of its tasks start at its turn, on average."""
    is_fifo: bool
    """Whether its tasks run one after the other."""
    halts: bool
    """Whether a failure pauses the key."""
    is_own: bool
    """Whether limits were set for this key with ``app.keys.set``."""
    paused_at: datetime | None
    """When it was paused, or None."""
    pause_reason: str | None
    """Why it was paused; None without a reason."""
    starts_at: datetime | None
    """When its rate allows the next start; None without a rate or a start."""

    @property
    def is_paused(self) -> bool:
        """Whether the key is paused."""
        return self.paused_at is not None


class KeyCounts(NamedTuple):
    """How many keys of a queue have due tasks, and how many are paused."""

    queue_name: str
    waiting: int
    paused: int


@KEYS.statement
def list_keys(queue: str, limit: int, most: int) -> KeyState: ...
@KEYS.statement
def read_key(queue: str, key: str, most: int) -> KeyState: ...
@KEYS.statement
def read_lane(queue: str, lane: int, most: int) -> KeyState: ...
@KEYS.statement
def set_key(
    queue: str,
    key: str,
    given: Sequence[str],
    max_concurrency: int | None,
    rate_seconds: float | None,
    rate_burst: int | None,
    weight: float | None,
) -> QueueName: ...
@KEYS.statement
def clear_key(queue: str, key: str) -> QueueName: ...
@KEYS.statement
def pause_key(queue: str, key: str, reason: str | None) -> QueueName: ...
@KEYS.statement
def resume_key(queue: str, key: str) -> QueueName: ...
@KEYS.statement
def find_paused_keys(limit: int, most: int) -> KeyState: ...
@KEYS.statement
def list_limited_queues() -> QueueName: ...
@KEYS.statement
def count_keys(most: int) -> KeyCounts: ...


KEYS.complete()
