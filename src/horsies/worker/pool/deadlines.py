"""The times at which the pool must check a task or a child even without an event."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

# How many outdated entries may be kept before they are removed.
_STALE_MAX = 1_000


class Timed(Protocol):
    """An object that has at most one deadline, and at most one valid entry in the heap."""

    deadline: float | None
    queued_at: float | None


T = TypeVar("T", bound=Timed)


class Deadlines(Generic[T]):
    """A heap of targets, ordered by a time no later than each target's deadline.

    When a deadline moves to a later time, its entry is not moved. Each short task in a window moves a
    deadline, and the heap need not change for this.
    """

    __slots__ = ("_heap", "_made", "targets")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._made = 0
        # The number of targets with a deadline; if it is 0, the heap need not be checked.
        self.targets = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, target: T, at: float) -> None:
        if target.deadline is None:
            self.targets += 1
        target.deadline = at
        if target.queued_at is None or at < target.queued_at:
            self._push(target, at)
            if len(self._heap) > 2 * self.targets + _STALE_MAX:
                self.sweep()

    def _push(self, target: T, at: float) -> None:
        target.queued_at = at
        self._made += 1
        heapq.heappush(self._heap, (at, self._made, target))

    def sweep(self) -> None:
        """Remove the entries of targets without a deadline, because an entry keeps a dead child's shared
        memory open.
        """
        for _, _, target in self._heap:
            if target.deadline is None:
                target.queued_at = None
        self._heap = [one for one in self._heap if one[2].queued_at == one[0]]
        heapq.heapify(self._heap)

    def clear(self, target: T) -> None:
        if target.deadline is not None:
            target.deadline = None
            self.targets -= 1

    @property
    def next_at(self) -> float | None:
        """Return when to call ``pop_due`` again. The entry of a target without a deadline stays in the heap
        until that call, because most targets soon get a new deadline.
        """
        while self.targets:
            at, _, target = self._heap[0]
            if target.queued_at == at and target.deadline in (None, at):
                return at
            self._take_first()
        return None

    def pop_due(self, now: float) -> T | None:
        """Take and return a target whose deadline has passed; None if there is none."""
        while self.targets and self._heap[0][0] <= now:
            target = self._heap[0][2]
            if target.deadline is not None and target.deadline <= now:
                self.clear(target)
                return target
            self._take_first()
        return None

    def _take_first(self) -> None:
        """Remove the first entry; its target is added again at its deadline, if it has one."""
        at, _, target = heapq.heappop(self._heap)
        if target.queued_at == at:
            target.queued_at = None
            if target.deadline is not None:
                self._push(target, target.deadline)
