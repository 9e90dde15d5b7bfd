"""Catalogue of the statements that show and change the keys of queues."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import QueueName

KEYS = StatementFile("keys.sql")


class KeyState(NamedTuple):
    """One key of a queue, with its tasks and the limits that apply to it."""

    queue_name: str
    """The name of the queue."""
    key: str
    """The key."""
    due: int
    """How many tasks with the key are due, counted up to 1,000."""
    first_due_at: datetime | None
    """Since when the task that starts first is due; None if no task is due."""
    in_flight: int
    """How many tasks with the key are claimed or running."""
    max_concurrency: int | None
    """The maximum number of the key's tasks in flight; None if there is no limit."""
    rate_seconds: float | None
    """The seconds between two starts under the key's rate; None if the key has no rate."""
    rate_burst: int | None
    """How many tasks may start immediately one after another under the key's rate; None if the key has no
    rate.
    """
    weight: float
    """How many tasks of the key start in each of its turns, on average."""
    is_fifo: bool
    """Whether the key's tasks run one at a time, in the order in which they were sent."""
    halts: bool
    """Whether a failed task pauses the key."""
    is_own: bool
    """Whether limits were set for this key with ``app.keys.set``."""
    paused_at: datetime | None
    """When the key was paused; None if it is not paused."""
    pause_reason: str | None
    """Why the key was paused; None if no reason was given."""
    starts_at: datetime | None
    """When the rate allows the next start; None if the key has no rate, or no task has started under it."""

    @property
    def is_paused(self) -> bool:
        """Whether the key is paused."""
        return self.paused_at is not None


class KeyCounts(NamedTuple):
    """How many keys of a queue have due tasks, and how many are paused."""

    queue_name: str
    waiting: int
    paused: int


class HeldQueue(NamedTuple):
    """A queue whose due tasks wait for paused keys or for rates."""

    name: str
    paused_keys: int
    rated_keys: int
    # None if the queue's own rate allows a start.
    rate_wait_seconds: float | None


class PausedDue(NamedTuple):
    """How many due tasks of a queue belong to paused keys."""

    name: str
    due: int


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
def find_paused_keys(queue: str | None, limit: int, most: int) -> KeyState: ...
@KEYS.statement
def list_limited_queues() -> QueueName: ...
@KEYS.statement
def count_keys(most: int) -> KeyCounts: ...
@KEYS.statement
def list_held_queues(names: Sequence[str], most: int) -> HeldQueue: ...
@KEYS.statement
def count_paused_due(names: Sequence[str], most: int) -> PausedDue: ...


KEYS.complete()
