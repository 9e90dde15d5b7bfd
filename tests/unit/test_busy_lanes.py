"""Which lanes have marks, and which of them a claim is told."""

from __future__ import annotations

import random
import sys
import time
from types import SimpleNamespace
from typing import Any

from horsies.worker.busy_lanes import (
    LANES_MAX,
    MARKED_AFTER,
    MARKS_MAX,
    NO_MARKS,
    SLOW_SEARCH_US,
    SLOW_SEARCHES,
    BusyLanes,
)
from horsies.worker.keyed import KeyRings


def task(number: int, lane: int = 1, queue: str = "default") -> Any:
    return SimpleNamespace(
        queue_name=queue, lane=lane, priority=100, enqueued_at=f"at {number}", id=f"id {number}"
    )


def take(busy: BusyLanes, *lanes: int, count: int = MARKED_AFTER) -> None:
    for lane in lanes:
        for number in range(count):
            busy.note(lane, task(number, lane))


def lanes(busy: BusyLanes, cursor: int) -> list[int]:
    return [mark.lane for mark in busy.behind(cursor)]


def test_a_lane_is_marked_once_many_tasks_were_taken_from_it() -> None:
    busy = BusyLanes()
    take(busy, 1, count=MARKED_AFTER - 1)
    assert busy.behind(0) == []
    busy.note(1, task(100))
    busy.note(1, task(101))
    assert busy.behind(0) == [(1, 100, "at 101", "id 101")]


def test_a_claim_is_told_the_lanes_that_it_meets_first() -> None:
    busy = BusyLanes()
    take(busy, *range(-MARKS_MAX, MARKS_MAX))
    assert lanes(busy, -1) == list(range(MARKS_MAX))
    assert lanes(busy, MARKS_MAX - 3) == [MARKS_MAX - 2, MARKS_MAX - 1, *range(-MARKS_MAX, -2)]
    few = BusyLanes()
    take(few, 1, 2, 3)
    assert lanes(few, 2) == [3, 1, 2]


def test_a_lane_to_which_a_task_returned_has_no_mark() -> None:
    busy = BusyLanes()
    take(busy, 1, 2)
    busy.forget(1)
    busy.forget(7)
    assert lanes(busy, 0) == [2]


def test_very_many_lanes_are_forgotten() -> None:
    busy = BusyLanes()
    take(busy, 1)
    take(busy, *range(2, LANES_MAX + 2), count=1)
    assert lanes(busy, 0) == []


def test_lanes_with_equal_hashes_cost_no_more_than_others() -> None:
    """Lanes that agree in their low bits, or modulo the prime of `hash`, share a place of a table. Of the
    numbers with eight bytes, no more than four of a sign have the same hash.
    """
    crafted = [number << 54 for number in range(-(2**9), 2**9)]
    crafted += [number * sys.hash_info.modulus + 1 for number in range(4)]
    others = random.Random(5).sample(range(2**62), len(crafted))
    assert set(map(hash, crafted[-4:])) == {1}

    def seconds(chosen: list[int]) -> float:
        began = time.thread_time()
        busy = BusyLanes()
        take(busy, *chosen)
        for lane in chosen:
            busy.behind(lane)
        return time.thread_time() - began

    assert min(seconds(crafted) for _ in range(3)) < 8 * min(seconds(others) for _ in range(3))


def answer(search_us: int | None, queue: str = "default") -> Any:
    """A claim by keys whose searches from the fronts of the lanes took this long; None if it used marks."""
    return SimpleNamespace(queue_name=queue, lane=0, details="t ", generation=search_us)


def test_marks_are_told_only_while_searches_from_the_fronts_are_slow() -> None:
    rings = KeyRings(["default", "api"])
    rings.note_keyed(["default", "api"])
    for queue in ("default", "api"):
        rings.note_taken([task(number, 7, queue) for number in range(MARKED_AFTER)])
    rings.note_claim([answer(SLOW_SEARCH_US)], (), 0.0)
    assert rings.marks() == NO_MARKS, "the search was quick"
    rings.note_claim([answer(SLOW_SEARCH_US + 1)], (), 0.0)
    assert rings.marks() == NO_MARKS, "one slow search may be the machine's"
    rings.note_claim([answer(SLOW_SEARCH_US + 1)], (), 0.0)
    assert rings.marks().lanes == [7], "the lanes of the other queue are searched quickly"
    rings.note_claim([answer(None), answer(1, "api")], (), 0.0)
    assert rings.marks().lanes == [7], "a search behind marks shows nothing"
    rings.note_claim([answer(SLOW_SEARCH_US)], (), 0.0)
    assert rings.marks() == NO_MARKS


def test_marks_are_told_for_queues_with_keys_and_in_the_order_of_lanes() -> None:
    rings = KeyRings(["default", "api"])
    assert rings.marks() == NO_MARKS
    for queue, numbers in {"default": (7, -5), "api": (3,)}.items():
        for lane in numbers:
            rings.note_taken([task(number, lane, queue) for number in range(MARKED_AFTER)])
    assert rings.marks() == NO_MARKS, "no queue is known to have keys"
    rings.note_keyed(["default", "api"])
    slow = SLOW_SEARCH_US + 1
    for _ in range(SLOW_SEARCHES):
        rings.note_claim([answer(slow), answer(slow, "api")], (), 0.0)
    assert rings.marks().lanes == [-5, 3, 7]
    rings.note_search(["default", "api"], ["api"])
    assert rings.marks().lanes == [3]
    rings.step_back([task(0, 3, "api"), task(0, 3, "other")])
    assert rings.marks() == NO_MARKS
