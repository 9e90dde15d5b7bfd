"""Bookmarks: where claims look, and how soon they look everywhere again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from horsies.db.statements.turn import ClaimedTask
from horsies.worker.agenda import REST_FACTOR
from horsies.worker.kinds import Places, TaskKind
from horsies.worker.turn import COSTLY_SECONDS, EVERYWHERE, EVERYWHERE_SECONDS, Bookmarks, Positions

MOMENT = "2026-01-02 03:04:05.678901+00"


def claimed(task_id: str, queue: str = "first", priority: int = 100) -> ClaimedTask:
    return ClaimedTask(
        task_id,
        1,
        "work",
        queue,
        "[]",
        "{}",
        0,
        0,
        None,
        None,
        7,
        priority=priority,
        enqueued_at=MOMENT,
    )


@pytest.fixture
def bookmarks() -> Bookmarks:
    """The bookmarks of a worker that looked everywhere at 100.0 and got one task."""
    bookmarks = Bookmarks(["first", "second"])
    note(bookmarks, EVERYWHERE, [claimed("a")], at=100.0)
    return bookmarks


def note(
    bookmarks: Bookmarks,
    positions: Positions,
    tasks: Sequence[ClaimedTask] = (),
    *,
    at: float,
    taken: float = 0.001,
    was_short: bool = False,
) -> None:
    bookmarks.note_claim(positions, tasks, was_short=was_short, span=(at - taken, at))


def test_the_first_claim_looks_everywhere() -> None:
    assert Bookmarks(["first"]).positions(100.0) is EVERYWHERE


def test_claims_look_everywhere_until_one_brings_a_task() -> None:
    bookmarks = Bookmarks(["first"])
    note(bookmarks, EVERYWHERE, at=100.0, was_short=True)
    assert bookmarks.positions(100.0) is EVERYWHERE


def test_the_next_claim_looks_behind_the_last_task_of_each_queue(bookmarks: Bookmarks) -> None:
    assert bookmarks.positions(100.0) == Positions([100, None], [MOMENT, None], ["a", None])
    tasks = [claimed("b"), claimed("c", "second", 5), claimed("d", "second", 9)]
    note(bookmarks, bookmarks.positions(100.0), tasks, at=100.01)
    positions = bookmarks.positions(100.01)
    assert (positions.ids, positions.priorities) == (["b", "d"], [100, 9])
    assert positions.looks_everywhere


def test_after_a_notification_the_next_claim_looks_everywhere_once(bookmarks: Bookmarks) -> None:
    bookmarks.note_news()
    assert bookmarks.positions(100.0) is EVERYWHERE
    note(bookmarks, EVERYWHERE, at=100.01)
    assert bookmarks.positions(100.01) is not EVERYWHERE


def test_the_next_claim_begins_with_tasks_that_went_back() -> None:
    first, second, third = (f"00000000-0000-0000-0000-0000000000{n}0" for n in (1, 2, 3))
    bookmarks = Bookmarks(["first", "second"])
    note(bookmarks, EVERYWHERE, [claimed(first), claimed(second), claimed(third)], at=100.0)
    bookmarks.step_back([claimed(second), claimed(third), claimed(first, "second")])
    positions = bookmarks.positions(100.0)
    assert positions.ids == ["00000000-0000-0000-0000-00000000001f", None]
    assert (positions.priorities[0], positions.enqueued_at[0]) == (100, MOMENT)


@pytest.mark.parametrize(
    ("is_async", "position"),
    [
        (True, "00000000-0000-0000-0000-00000000000f"),
        (False, "00000000-0000-0000-0000-00000000001f"),
        (None, "00000000-0000-0000-0000-00000000000f"),
    ],
)
def test_tasks_that_went_back_move_the_bookmarks_of_their_kind_alone(
    is_async: bool | None, position: str
) -> None:
    first, second, third = (f"00000000-0000-0000-0000-0000000000{n}0" for n in (1, 2, 3))
    kind = TaskKind(["first"], 5.0, cast(Places, None), is_async)
    note(kind.bookmarks, EVERYWHERE, [claimed(third)], at=100.0)
    coroutine = claimed(first)._replace(task_options='{"async":true,"retry_policy":null}')
    plain = claimed(second)._replace(task_options='{"retry_policy":null}')
    kind.step_back([coroutine, plain, claimed(second)])
    assert kind.bookmarks.positions(100.0).ids == [position]


def test_a_notification_is_not_forgotten_by_a_claim_that_looks_behind_bookmarks(
    bookmarks: Bookmarks,
) -> None:
    positions = bookmarks.positions(100.0)
    bookmarks.note_news()
    note(bookmarks, positions, [claimed("b")], at=100.01)
    assert bookmarks.positions(100.01) is EVERYWHERE


def test_bookmarks_alone_are_relied_on_for_a_bounded_time(bookmarks: Bookmarks) -> None:
    for step in range(1, 10):
        now = 100.0 + step * EVERYWHERE_SECONDS / 10
        positions = bookmarks.positions(now)
        assert positions is not EVERYWHERE
        note(bookmarks, positions, [claimed(f"b{step}")], at=now)
    assert bookmarks.positions(100.0 + EVERYWHERE_SECONDS) is EVERYWHERE


def test_a_short_claim_has_looked_everywhere(bookmarks: Bookmarks) -> None:
    note(bookmarks, bookmarks.positions(100.09), at=100.09, was_short=True)
    assert bookmarks.positions(100.1) is not EVERYWHERE
    assert bookmarks.positions(100.09 + EVERYWHERE_SECONDS) is EVERYWHERE


def test_a_costly_look_is_followed_by_a_rest_of_ten_times_its_length(bookmarks: Bookmarks) -> None:
    note(bookmarks, EVERYWHERE, [claimed("b")], at=200.0, taken=0.05)
    bookmarks.note_news()
    assert bookmarks.rested_at == pytest.approx(200.0 + 0.05 * REST_FACTOR)
    resting = bookmarks.positions(200.4)
    assert resting.ids == ["b", None]
    assert not resting.looks_everywhere
    note(bookmarks, resting, at=200.4, was_short=True)
    assert bookmarks.positions(bookmarks.rested_at) is EVERYWHERE


def test_a_cheap_look_is_not_followed_by_a_rest(bookmarks: Bookmarks) -> None:
    note(bookmarks, EVERYWHERE, [claimed("b")], at=200.0, taken=COSTLY_SECONDS / 2)
    assert bookmarks.rested_at == 200.0
