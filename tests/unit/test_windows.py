"""Windows: how wide they are, who is filled first, which tasks have begun, and when a turn is due."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horsies.worker.pool.window import (
    ENDS_MIN,
    Windows,
    fill_order,
    linger_seconds,
    width,
)
from horsies.worker.protocol import Assignment, assignment_number, encode_assignment
from horsies.worker.sharing import PermitError, PermitPipe, Permits

TASK = Assignment("task", 1, "work", 1, "[]", "{}", None)


def measured(seconds: float, ends: int = ENDS_MIN, widest: int = 32) -> Windows:
    windows = Windows(widest)
    for _ in range(ends):
        windows.note_end("work", seconds)
    return windows


@pytest.mark.parametrize(
    ("seconds", "widest", "expected"),
    [
        (0.0, 32, 32),
        (0.0001, 32, 32),
        (0.0005, 32, 13),
        (0.001, 4, 4),
        (0.0052, 32, 2),
        (0.007, 32, 1),
    ],
)
def test_a_child_is_given_about_five_milliseconds_ahead(
    seconds: float, widest: int, expected: int
) -> None:
    assert width(seconds, widest) == expected


def test_run_times_count_after_ten_ends() -> None:
    assert measured(0.0001, ENDS_MIN - 1).width("work") == 1
    windows = measured(0.0001)
    assert (windows.width("work"), windows.width("other")) == (32, 1)
    assert windows.short_names() == ["work"]


def test_others_wait_behind_a_short_task_for_ten_milliseconds_or_four_times_its_run_time() -> None:
    assert measured(0.0001).patience_seconds("work") == 0.01
    assert measured(0.005).patience_seconds("work") == pytest.approx(0.02)
    assert measured(0.007).patience_seconds("work") == 0.0, "nothing waits behind it"


def test_one_very_long_run_does_not_close_the_windows_for_long() -> None:
    windows = measured(0.0001)
    windows.note_end("work", 3600.0)
    assert windows.width("work") == 2
    for _ in range(40):
        windows.note_end("work", 0.0001)
    assert windows.width("work") > 8


def depths(windows: Windows, claims: int) -> list[int]:
    """The depths after that many claims which came back full of short tasks."""
    found = []
    for _ in range(claims):
        windows.note_claim(4, ["work"] * 4, is_drained=False)
        found.append(windows.depth)
    return found


def test_windows_grow_with_full_claims_and_begin_again_when_the_queues_are_drained() -> None:
    windows = measured(0.0001)
    assert depths(windows, 6) == [2, 4, 8, 16, 32, 32]
    windows.note_claim(4, ["work"] * 3, is_drained=True)
    assert windows.depth == 1
    assert depths(windows, 2) == [2, 4]


def test_a_task_that_needs_a_child_closes_the_windows_until_one_has_taken_it() -> None:
    windows = measured(0.0001)
    depths(windows, 5)
    windows.note_claim(40, ["work"] * 3, is_drained=False)
    assert windows.depth == 1
    windows.note_claim(1, [], is_drained=False)
    assert windows.depth == 1, "a child took the task, the windows were not tried"
    assert depths(windows, 2) == [16, 32]


def test_many_tasks_that_need_a_child_let_windows_grow_slowly() -> None:
    windows = measured(0.0001)
    depths(windows, 5)
    tried = []
    for _ in range(5):
        windows.note_claim(40, ["work"] * 3, is_drained=False)
        tried += depths(windows, 1)
    assert tried == [16, 8, 4, 2, 2]


@pytest.mark.parametrize("names", [["work"], ["work", "unknown"]])
def test_another_kind_of_task_closes_the_windows(names: list[str]) -> None:
    windows = measured(0.0001)
    windows.note_claim(2, ["work"] * 2, is_drained=False)
    assert windows.depth == 2
    windows.note_claim(2, names, is_drained=False)
    assert windows.depth == 1


def test_deep_windows_are_for_the_shortest_tasks_only() -> None:
    windows = measured(0.0001)
    for _ in range(ENDS_MIN):
        windows.note_end("slower", 0.002)
    assert (windows.depth, windows.short_names()) == (1, ["work", "slower"])
    assert depths(windows, 2) == [2, 4]
    assert windows.width("slower") == 4
    assert windows.short_names() == ["work", "slower"]
    depths(windows, 1)
    assert windows.short_names() == ["work"]


def test_windows_that_are_off_stay_closed() -> None:
    windows = measured(0.0001, widest=0)
    windows.note_claim(2, ["work"] * 2, is_drained=False)
    assert (windows.is_on, windows.depth) == (False, 1)


def test_the_emptiest_children_are_filled_first() -> None:
    assert fill_order([(1, 1, 3), (2, 2, 3), (3, 1, 1), (4, 1, 2)]) == [1, 4, 1, 2]
    assert fill_order([]) == []


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 32), st.integers(0, 32))))
def test_filling_in_order_never_exceeds_the_room_of_a_child(
    rooms: list[tuple[int, int, int]],
) -> None:
    rooms = list({pid: (pid, held, most) for pid, held, most in rooms}.values())
    held = {pid: count for pid, count, _ in rooms}
    most = {pid: limit for pid, _, limit in rooms}
    levels = []
    for pid in fill_order(rooms):
        levels.append(held[pid])
        held[pid] += 1
        assert held[pid] <= most[pid]
    assert levels == sorted(levels), "a child was filled before an emptier one"
    assert all(held[pid] >= most[pid] for pid in held), "a place was left out"


def test_a_turn_waits_until_half_the_room_is_free_or_a_report_is_old() -> None:
    assert linger_seconds(16, 32, waiting_since=5.0, now=5.0) == 0.0
    wait = linger_seconds(15, 32, waiting_since=5.0, now=5.0)
    assert 0.0 < wait < 0.5
    assert linger_seconds(15, 32, waiting_since=5.0, now=5.0 + wait) == 0.0
    assert linger_seconds(15, 32, waiting_since=5.0, now=5.5) == 0.0
    assert linger_seconds(0, 0, waiting_since=5.0, now=5.0) == 0.0


@pytest.fixture
def pipe() -> Iterator[PermitPipe]:
    pipe = PermitPipe()
    yield pipe
    pipe.close()


@pytest.fixture
def permits(pipe: PermitPipe) -> Iterator[Permits]:
    permits = Permits(os.dup(pipe.read_fd))
    yield permits
    permits.close()


def test_a_permit_goes_to_the_child_or_back_to_the_worker(
    pipe: PermitPipe, permits: Permits
) -> None:
    pipe.grant([1, 2, 3])
    assert permits.allows(1)
    assert list(pipe.take_back()) == [2, 3]
    assert [permits.allows(number) for number in (2, 3)] == [False, False]
    pipe.grant([4])
    assert permits.allows(4)
    assert list(pipe.take_back()) == []


def test_a_later_permit_skips_the_assignments_before_it(pipe: PermitPipe, permits: Permits) -> None:
    pipe.grant([1, 2])
    pipe.take_back()
    pipe.grant([3])
    assert [permits.allows(number) for number in (1, 2, 3)] == [False, False, True]


def test_permits_do_not_run_out_after_four_thousand_million_tasks(
    pipe: PermitPipe, permits: Permits
) -> None:
    pipe.grant([2**32])
    number, _ = assignment_number(encode_assignment(TASK, 2**32, needs_permit=True))
    assert permits.allows(number)


def test_permits_that_are_not_those_of_the_child_end_it(pipe: PermitPipe, permits: Permits) -> None:
    pipe.grant([1])
    with pytest.raises(PermitError, match="permit 1 came where 2"):
        permits.allows(2)
    ours, theirs = socket.socketpair()
    replaced = Permits(theirs.detach())
    ours.close()
    with pytest.raises(PermitError, match="end within a number"):
        replaced.allows(1)
    replaced.close()
    with pytest.raises(PermitError, match="cannot be read"):
        replaced.allows(1)


@pytest.mark.parametrize("stolen", range(1, 24))
def test_a_number_that_was_read_in_parts_is_taken_for_no_other(
    pipe: PermitPipe, permits: Permits, stolen: int
) -> None:
    """Neither by the child, nor by the worker when it takes the rest back."""
    pipe.grant(range(165, 205))  # the last byte of 165 is the first one of a permit
    assert len(os.read(pipe.read_fd, stolen)) == stolen
    if stolen % 8:
        with pytest.raises(PermitError):
            permits.allows(165)
    else:
        assert not permits.allows(165)
    unread = list(pipe.take_back())
    assert unread == list(range(165 + 1 + math.ceil(stolen / 8), 205))


@pytest.mark.parametrize("is_blocking", [True, False])
def test_nobody_waits_for_permits_whatever_their_socket_is_set_to(
    pipe: PermitPipe, permits: Permits, is_blocking: bool
) -> None:
    os.set_blocking(pipe.read_fd, is_blocking)
    assert list(pipe.take_back()) == []
    assert not permits.allows(1)


def test_a_socket_of_permits_that_was_shut_down_permits_nothing(
    pipe: PermitPipe, permits: Permits
) -> None:
    with socket.socket(fileno=os.dup(pipe.read_fd)) as shared:
        shared.shutdown(socket.SHUT_RDWR)
    pipe.grant([1, 2])
    with pytest.raises(PermitError):
        permits.allows(1)
    assert list(pipe.take_back()) == []
