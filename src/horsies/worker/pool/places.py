"""A pool's places: which children may take the next assignments."""

from __future__ import annotations

from operator import attrgetter

from horsies.worker.pool.assignments import Assignments
from horsies.worker.pool.children import Children, PoolSettings
from horsies.worker.pool.window import fill_order

# An idle child has sent its pid.
_PID = attrgetter("pid")


class FreePlaces:
    """The children's free places, in the order in which they are filled."""

    def __init__(
        self, children: Children, assignments: Assignments, settings: PoolSettings
    ) -> None:
        self._children = children
        self._assignments = assignments
        self._busy = assignments.busy
        self._has_windows = settings.has_windows
        self.has_async = settings.async_children > 0

    @property
    def idle_count(self) -> int:
        """How many children with one place have no task."""
        return len(self._children.idle)

    @property
    def companions(self) -> int:
        """How many tasks run in batches, without the first task of each batch; they take no places."""
        return self._assignments.companions

    def idle(self, count: int) -> list[int]:
        """Return the children with one place that get the next `count` assignments, in order."""
        if count <= 0:
            return []
        return list(map(_PID, self._children.idle[: -count - 1 : -1]))

    def idle_and_behind(self, depth: int) -> tuple[list[int], list[int]]:
        """Return the idle children, which get the next assignments, and the children with a window of up
        to `depth`, which get the assignments after those.
        """
        idle = list(map(_PID, reversed(self._children.idle)))
        if depth <= 1 or not self._has_windows:
            return idle, []
        busy = (one.child for one in self._busy.values())
        rooms = [
            (child.known_pid, max(1, len(child.held)), room)
            for child in (*reversed(self._children.idle), *busy)
            if (room := child.window_room(depth))
        ]
        return idle, fill_order(rooms)

    def window_space(self, depth: int) -> tuple[int, int]:
        """Return how many more tasks fit into windows of `depth`, and how many tasks such windows hold in
        total.
        """
        free = room = 0
        for child in self._children.all:
            if most := child.window_room(depth):
                room += most
                free += most - len(child.held)
        return free, room

    @property
    def async_count(self) -> int:
        """How many tasks the async children can take now."""
        return sum(self._free_slots().values())

    def next_async(self, count: int) -> list[int]:
        """Return the async children for the next `count` assignments; each assignment goes to the least
        loaded child.
        """
        free = self._free_slots()
        pids: list[int] = []
        while len(pids) < count and any(free.values()):
            pid = max(free, key=free.__getitem__)
            free[pid] -= 1
            pids.append(pid)
        return pids

    def _free_slots(self) -> dict[int, int]:
        """Return the free slots of the async children, by pid."""
        shared = (one for one in self._children.all if one.is_async and one.pid is not None)
        return {child.known_pid: child.free_slots() for child in shared}
