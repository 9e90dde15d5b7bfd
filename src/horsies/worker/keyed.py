"""Keys: which queues have tasks with keys, and where the next claim from each of these queues continues.
Pure.

The lanes of keys form a ring (``db/functions/19_keys.sql``). Each worker starts at a random place of the
ring, so that the workers of a queue serve different keys at the same time, and no key comes first for all
workers.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horsies.config.app import AppConfig, PerKey, Rate
from horsies.db.statements.turn import ClaimedTask
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.keys import key_of_task
from horsies.worker import busy_lanes
from horsies.worker.busy_lanes import NO_MARKS, BusyLanes, LaneMarks

# The most tasks that one search moves to their lanes.
PROMOTED_MAX = 1_000
# How many places a ring has.
RING_SIZE = 2**64


class SeenLanes(NamedTuple):
    """Whether lanes have more tasks for this worker now, and after how many seconds a lane may start tasks
    again.
    """

    has_more: bool
    wait_seconds: float | None


@dataclass(slots=True)
class Walk:
    """How far claims have moved along a ring without finding a task, and when one of these lanes may start
    tasks again. A claim checks a limited number of lanes. If it finds no task for this worker, the next claim
    checks the lanes behind them, until all lanes have been checked.
    """

    distance: int = 0
    room_at: float = float("inf")

    def note(self, before: int, after: int, room_at: float) -> None:
        self.distance += (after - before) % RING_SIZE or RING_SIZE
        self.room_at = min(self.room_at, room_at)

    def is_over(self, now: float) -> bool:
        """Return whether claims have checked every lane, and no lane can start tasks again yet."""
        return self.distance >= RING_SIZE and self.room_at > now


class KeyRings:
    """The position of one kind of tasks on each queue's ring; a queue without keyed tasks has no position."""

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = queues
        # The place where the next claim continues, for each queue that has tasks with keys. Most
        # applications have no keys; callers that handle every claim check this mapping first.
        self.by_queue: dict[str, int] = {}
        # For each queue, the walk along its ring that has found no task so far.
        self._walks: dict[str, Walk] = {}
        self._busy: dict[str, BusyLanes] = {}
        # For each queue, how many searches from the fronts of its lanes in a row were slow. Slow searches
        # mean that the lanes have dead entries.
        self._slow: Counter[str] = Counter()
        # Tasks with keys are claimed only after these limits are stored.
        self.limits: LimitsOfKeys | None = None

    @property
    def queues(self) -> list[str]:
        return [*self.by_queue]

    def note_keyed(self, queues: Iterable[str]) -> None:
        """Note that these queues have tasks with keys."""
        for queue in queues:
            if queue in self._queues and queue not in self.by_queue:
                self.by_queue[queue] = random.randrange(-(2**63) + 1, 2**63)

    def note_search(self, searched: Iterable[str], found: Sequence[str]) -> None:
        """Note that of the queues that were searched, only those found have tasks with keys."""
        for queue in searched:
            if queue not in found:
                self.by_queue.pop(queue, None)
                self._walks.pop(queue, None)
        self.note_keyed(found)

    def cursors(self) -> Sequence[int | None]:
        """Return for each queue the place where the next claim continues; empty if no queue has keys."""
        if not self.by_queue or (self.limits is not None and self.limits.unstored is not None):
            return ()
        return [self.by_queue.get(queue) for queue in self._queues]

    def marks(self) -> LaneMarks:
        """Return the marks behind which the next claim searches busy lanes, for the first lanes that it
        visits in each queue. There are none for a queue whose lanes are searched quickly from their fronts.
        """
        if not self._slow:
            return NO_MARKS
        found = [
            mark
            for queue, busy in self._busy.items()
            if self._slow[queue] >= busy_lanes.SLOW_SEARCHES
            and (cursor := self.by_queue.get(queue)) is not None
            for mark in busy.behind(cursor)
        ]
        return LaneMarks(*map(list, zip(*sorted(found), strict=True))) if found else NO_MARKS

    def note_taken(self, claimed: Iterable[ClaimedTask]) -> None:
        """Note that these tasks were claimed; the tasks of one lane and priority must be passed in order."""
        for task in claimed:
            if task.lane is not None:
                busy = self._busy.get(task.queue_name)
                if busy is None:
                    busy = self._busy[task.queue_name] = BusyLanes()
                busy.note(task.lane, task)

    def step_back(self, returned: Iterable[ClaimedTask]) -> None:
        """Search the lanes of these tasks from their fronts again, because the tasks were returned to
        them.
        """
        for task in returned:
            if task.lane is not None and task.queue_name in self._busy:
                self._busy[task.queue_name].forget(task.lane)

    def note_news(self) -> None:
        """Note that any lane may have tasks, even one that a claim has just passed."""
        self._walks.clear()

    def note_claim(
        self, answers: Iterable[ClaimedTask], served: Collection[str], now: float
    ) -> SeenLanes:
        """Continue behind the lanes that a claim has checked. The claim took tasks from the queues in
        `served`.
        """
        has_more, wait_seconds = False, None
        for answer in answers:
            is_drained, _, wait = answer.details.partition(" ")
            room_seconds = float(wait) if wait else float("inf")
            if wait and (wait_seconds is None or room_seconds < wait_seconds):
                wait_seconds = room_seconds
            queue, after = answer.queue_name, answer.lane
            self._judge_search(queue, answer.generation)
            before = self.by_queue.get(queue)
            if before is not None and after is not None:
                self.by_queue[queue] = after
            if is_drained == "t" or queue in served or before is None or after is None:
                self._walks.pop(queue, None)
                has_more = has_more or is_drained != "t"
            else:
                has_more = self._walk_on(queue, before, after, now + room_seconds, now) or has_more
        return SeenLanes(has_more, wait_seconds)

    def _judge_search(self, queue: str, search_us: int | None) -> None:
        """Note how long a search from the fronts of a queue's lanes took; None if marks were used."""
        if search_us is None:
            return
        if search_us > busy_lanes.SLOW_SEARCH_US:
            self._slow[queue] += 1
        elif self._slow:
            del self._slow[queue]

    def _walk_on(self, queue: str, before: int, after: int, room_at: float, now: float) -> bool:
        """Note a claim that checked some lanes and took no task; return True if further lanes
        may have tasks.
        """
        walk = self._walks.setdefault(queue, Walk())
        walk.note(before, after, room_at)
        if walk.distance >= RING_SIZE:
            del self._walks[queue]
        return not walk.is_over(now)


class LimitsOfKeys:
    """The limits for keys in the application's queues, and the rates of its tasks, until they are stored."""

    def __init__(self, config: AppConfig, tasks: Mapping[str, TaskDefinition]) -> None:
        limits = [
            {"queue_name": queue.name, **_columns(queue.per_key)}
            for queue in config.queues()
            if queue.per_key is not None
        ]
        self.queues = [queue.name for queue in config.queues()]
        self.rates = json.dumps([_rate_of(name, task.rate) for name, task in tasks.items()])
        self.unstored: str | None = json.dumps(limits)


def _rate_of(name: str, rate: Rate | None) -> dict[str, str | int | float | None]:
    return {
        "key": key_of_task(name),
        "rate_seconds": None if rate is None else rate.seconds_per_start,
        "rate_burst": None if rate is None else rate.burst,
    }


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
