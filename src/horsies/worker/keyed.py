"""Keys: which queues have tasks with keys, and where the next claim of each continues. Pure.

Keys lie on a ring (``db/functions/19_keys.sql``), and a worker begins at a random place of it: so the
workers of a queue serve different keys at a time, and none is the first for all of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from horsies.config.app import AppConfig, PerKey
from horsies.db.statements.turn import ClaimedTask

# How many tasks a search moves to their lanes at once.
PROMOTED_MAX = 1_000


class SeenLanes(NamedTuple):
    """Whether lanes have more tasks for this worker now, and after how many seconds they may have."""

    has_more: bool
    wait_seconds: float | None


class KeyRings:
    """The rings of one kind of tasks, by queue; a queue without tasks that have keys has none."""

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = queues
        self._cursors: dict[str, int] = {}
        # No key is served before these are stored.
        self.limits: LimitsOfKeys | None = None

    def __bool__(self) -> bool:
        return bool(self._cursors)

    @property
    def queues(self) -> list[str]:
        return [*self._cursors]

    def note_keyed(self, queues: Iterable[str]) -> None:
        """These queues have tasks with keys."""
        for queue in queues:
            if queue in self._queues and queue not in self._cursors:
                self._cursors[queue] = random.randrange(-(2**63) + 1, 2**63)

    def note_search(self, searched: Iterable[str], found: Sequence[str]) -> None:
        """Of the queues that were searched, only those found have tasks with keys."""
        for queue in searched:
            if queue not in found:
                self._cursors.pop(queue, None)
        self.note_keyed(found)

    def cursors(self) -> Sequence[int | None]:
        """Per queue, the place where the next claim continues; empty if no queue has keys."""
        if not self._cursors or (self.limits is not None and self.limits.unstored is not None):
            return ()
        return [self._cursors.get(queue) for queue in self._queues]

    def note_claim(self, answers: Iterable[ClaimedTask]) -> SeenLanes:
        """Continue behind the lanes that a claim has seen."""
        has_more, waits = False, list[float]()
        for answer in answers:
            if answer.queue_name in self._cursors and answer.lane is not None:
                self._cursors[answer.queue_name] = answer.lane
            is_drained, _, wait_seconds = answer.details.partition(" ")
            has_more = has_more or is_drained != "t"
            waits += [float(wait_seconds)] if wait_seconds else []
        return SeenLanes(has_more, min(waits, default=None))


class LimitsOfKeys:
    """The limits of the application's queues, until they are stored."""

    def __init__(self, config: AppConfig) -> None:
        limits = [
            {"queue_name": queue.name, **_columns(queue.per_key)}
            for queue in config.queues()
            if queue.per_key is not None
        ]
        self.queues = [queue.name for queue in config.queues()]
        self.unstored: str | None = json.dumps(limits)


def _columns(limits: PerKey) -> dict[str, int | float | bool | None]:
    rate = limits.rate
    return {
        "max_concurrency": limits.max_concurrency,
        "rate_seconds": None if rate is None else rate.seconds_per_start,
        "rate_burst": None if rate is None else rate.burst,
        "weight": limits.weight,
        "is_fifo": limits.order == "fifo",
        "halts": limits.on_failure == "halt",
    }
