"""When a worker wants tasks of one kind, and for which children."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from horsies.worker.kinds import (
    ASYNC_CLAIMS_MAX,
    AsyncPlaces,
    ChildPlaces,
    TaskKind,
    kinds_of,
    shared_room,
)
from horsies.worker.pool.window import Windows


def pool(*, idle: int = 0, window: int = 0, has_async: bool = False) -> Any:
    return SimpleNamespace(
        idle_count=idle,
        window_space=lambda _: (window, 8),
        idle_and_behind=lambda depth: (list(range(idle)), [9] * window if depth > 1 else []),
        has_async=has_async,
    )


def async_pool(places: int) -> Any:
    return SimpleNamespace(async_count=places, next_async=lambda count: [7] * count)


@pytest.mark.parametrize(
    ("idle", "prefetched", "may_have_work", "wants"),
    [(1, 2, True, True), (0, 1, True, True), (0, 2, True, False), (1, 0, False, False)],
)
def test_a_worker_wants_tasks_for_free_children_and_to_fill_its_prefetch_buffer(
    idle: int, prefetched: int, may_have_work: bool, wants: bool
) -> None:
    kind = TaskKind(["default"], 5.0, ChildPlaces(pool(idle=idle), Windows()), prefetch_max=2)
    kind.agenda.may_have_work = may_have_work
    assert kind.wants_tasks(prefetched) is wants


@pytest.mark.parametrize(("depth", "is_free"), [(1, False), (2, True)])
def test_room_behind_other_tasks_counts_only_while_windows_are_filled(
    depth: int, is_free: bool
) -> None:
    windows = Windows(32)
    windows.depth = depth
    places = ChildPlaces(pool(window=3), windows)
    assert places.are_free() is is_free
    assert places.take(10) == ([], [9, 9, 9] if is_free else [])


@pytest.mark.parametrize(
    ("free", "room", "count"), [(5, 3, 3), (2, 3, 2), (1000, 1000, ASYNC_CLAIMS_MAX), (0, 3, 0)]
)
def test_async_children_take_as_many_tasks_as_they_have_places_up_to_a_limit(
    free: int, room: int, count: int
) -> None:
    places = AsyncPlaces(async_pool(free))
    assert places.are_free() is (free > 0)
    assert places.take(room) == ([7] * count, ())


def test_a_worker_claims_all_tasks_together_or_each_kind_separately() -> None:
    (both,) = kinds_of(["default"], 5.0, pool(), Windows(), 3)
    assert (both.is_async, both.prefetch_max) == (None, 3)
    plain, coroutines = kinds_of(["default"], 5.0, pool(has_async=True), Windows(), 3)
    assert (plain.is_async, plain.prefetch_max) == (False, 3)
    assert (coroutines.is_async, coroutines.prefetch_max) == (True, 0)
    assert coroutines.agenda is not plain.agenda


@pytest.mark.parametrize(
    ("room", "space", "held", "shares"),
    [
        (4, (8, 8), (0, 0), [2, 2]),
        (3, (8, 8), (0, 0), [2, 1]),
        (1, (8, 8), (3, 0), [0, 1]),
        (2, (8, 8), (3, 0), [0, 2]),
        (4, (8, 1), (0, 0), [3, 1]),
        (4, (0, 8), (0, 0), [0, 4]),
        (9, (2, 3), (0, 0), [2, 3]),
        (0, (2, 3), (0, 0), [0, 0]),
    ],
)
def test_kinds_share_a_limit_by_how_many_tasks_of_each_are_held(
    room: int, space: tuple[int, int], held: tuple[int, int], shares: list[int]
) -> None:
    assert shared_room(room, space, held) == shares


@pytest.mark.parametrize(("prefetched", "space"), [(0, 5), (2, 3), (3, 2)])
def test_prefetched_tasks_take_space(prefetched: int, space: int) -> None:
    kind = TaskKind(["default"], 5.0, ChildPlaces(pool(idle=2), Windows()), prefetch_max=3)
    assert kind.space(10, prefetched) == space
