"""When a worker rests that has found no task with a key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from horsies.worker.keyed import KeyRings


def answer(lane: int, wait_seconds: str = "") -> Any:
    """A claim by keys that saw the lanes up to this one, and not all."""
    return SimpleNamespace(
        queue_name="default", lane=lane, details=f"f {wait_seconds}", generation=None
    )


def rings_at(lane: int) -> KeyRings:
    rings = KeyRings(["default"])
    rings.note_keyed(["default"])
    rings.note_claim([answer(lane)], {"default"}, 0.0)
    return rings


def steps(rings: KeyRings, *answers: Any, now: float = 0.0) -> list[bool]:
    return [rings.note_claim([one], (), now).has_more for one in answers]


def test_a_worker_rests_after_one_round_without_a_task() -> None:
    assert steps(rings_at(5), answer(2**62), answer(-(2**62)), answer(5)) == [True, True, False]


def test_a_round_that_a_single_claim_makes_counts() -> None:
    assert steps(rings_at(5), answer(5)) == [False]


def test_a_task_starts_the_round_again() -> None:
    rings = rings_at(5)
    assert steps(rings, answer(2**62)) == [True]
    assert rings.note_claim([answer(-(2**62))], {"default"}, 0.0).has_more
    assert steps(rings, answer(5), answer(2**62), answer(-(2**62))) == [True, True, False]


def test_news_starts_the_round_again() -> None:
    rings = rings_at(5)
    assert steps(rings, answer(2**62)) == [True]
    rings.note_news()
    assert steps(rings, answer(5), answer(2**62)) == [True, False]


def test_a_lane_that_has_got_room_during_the_round_is_seen_again() -> None:
    rings = rings_at(5)
    assert steps(rings, answer(2**62, "0.5")) == [True]
    assert steps(rings, answer(5), now=1.0) == [True]
    assert steps(rings, answer(2**62), answer(5), now=1.0) == [True, False]
    assert steps(rings, answer(2**62, "0.5"), answer(5), now=1.0) == [True, False]
