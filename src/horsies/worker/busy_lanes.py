"""Busy lanes: the last position in each lane from which a worker has taken many tasks. Pure.

Claimed tasks leave dead entries at the front of their lane until vacuum removes them, which an open
transaction prevents. A claim that starts behind the last task taken from a lane skips these entries. Tasks in
front of that position are found by claims that search everywhere (``Bookmarks``).

Searching behind marks costs the server 30 to 40 µs per task. Vacuum and scans usually remove dead entries
quickly, so a worker sends its marks only after two slow searches from the fronts in a row.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statements.turn import ClaimedTask

# How many tasks must be taken from a lane before it gets a mark. Each mark costs a claim one more index
# probe, which is more than skipping a few dead entries saves.
MARKED_AFTER = 32
# A search of lanes from their fronts is slow if it takes longer than this. Without dead entries, a search
# for four children takes 100 to 350 µs. Other processes can make a single search slow, so two slow searches
# in a row are needed.
SLOW_SEARCH_US = 600
SLOW_SEARCHES = 2
# The maximum number of marks in a claim, which searches all other lanes from their fronts.
MARKS_MAX = 32
# With more lanes than this, all marks and counts are dropped: each of so many lanes has few dead entries.
LANES_MAX = 4_096


class LaneMarks(NamedTuple):
    """Marks as columns: lanes in order, and the position of the task behind which to search each lane
    first.
    """

    lanes: Sequence[int]
    priorities: Sequence[int]
    enqueued_at: Sequence[str]
    ids: Sequence[str]


class Mark(NamedTuple):
    """The position of the last task taken from a lane."""

    lane: int
    priority: int
    enqueued_at: str
    id: str


NO_MARKS = LaneMarks([], [], [], [])


class BusyLanes:
    """The marks of one queue's lanes."""

    def __init__(self) -> None:
        # How many tasks were taken from each lane that does not have a mark yet.
        self._counts: dict[int, int] = {}
        # The fields of the marks. Few of them are ever sent, and a tuple is created faster than a Mark.
        self._marks: dict[int, tuple[int, int, str, str]] = {}
        # The lanes with a mark, in ascending order.
        self._ring: list[int] = []

    def note(self, lane: int, task: ClaimedTask) -> None:
        """Note a task that was taken from a lane."""
        position = lane, task.priority, task.enqueued_at, task.id
        if lane in self._marks:
            self._marks[lane] = position
            return
        count = self._counts.get(lane, 0) + 1
        if count == MARKED_AFTER:
            self._counts.pop(lane, None)
            self._marks[lane] = position
            insort(self._ring, lane)
        else:
            self._counts[lane] = count
        if len(self._counts) + len(self._ring) > LANES_MAX:
            self._counts, self._marks, self._ring = {}, {}, []

    def forget(self, lane: int) -> None:
        if self._marks.pop(lane, None) is not None:
            self._ring.remove(lane)

    def behind(self, cursor: int) -> list[Mark]:
        """Return the marks of the first lanes that a claim meets behind this place of the ring."""
        begin = bisect_right(self._ring, cursor)
        lanes = self._ring[begin : begin + MARKS_MAX]
        lanes += self._ring[: min(begin, MARKS_MAX - len(lanes))]
        return [Mark._make(self._marks[lane]) for lane in lanes]
