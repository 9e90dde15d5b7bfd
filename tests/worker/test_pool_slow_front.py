"""A task keeps those behind it waiting for too long, and the child acts at the worst time.

The test plays the child at the other end of real sockets, because the cases last for microseconds.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from horsies.worker.pool.assignments import Assignments
from horsies.worker.pool.child_process import ChildProcess, ChildState
from horsies.worker.pool.children import Children, PoolSettings
from horsies.worker.pool.events import Reported, TakenBack
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import FrameReader
from horsies.worker.pool.stops import Stops
from horsies.worker.protocol import Assignment, ChildReport, encode_report
from horsies.worker.sharing import PermitPipe, Permits, SharedPage

PATIENCE_SECONDS = 0.01
FRONT, SECOND, THIRD = (
    Assignment(letter * 32, 1, "task", 1, "[]", "{}", timeout_ms)
    for letter, timeout_ms in (("a", None), ("b", 50), ("c", None))
)


class WatchedPipe(PermitPipe):
    """Calls `meanwhile` before the pool takes permits back."""

    meanwhile: Callable[[], None] | None = None

    def take_back(self) -> Iterable[int]:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().take_back()


@dataclass
class Scene:
    """The parts of a pool with one child, which has begun the first of three tasks."""

    assignments: Assignments
    stops: Stops
    frames: FrameReader
    child: ChildProcess
    pipe: WatchedPipe
    child_socket: socket.socket
    child_permits: Permits

    def begin(self, number: int) -> None:
        assert self.child_permits.allows(number)
        self.child.page.note_begun(number)

    def report(self, assignment: Assignment) -> None:
        report = ChildReport(assignment.task_id, 1, True, "null", None, None)
        self.child_socket.sendall(self.child.page.mark + encode_report(report))

    def enforce(self, at: float) -> int:
        """Enforce all deadlines until `at` and return how many there were."""
        count = 0
        while (target := self.assignments.deadlines.pop_due(at)) is not None and count < 100:
            assert isinstance(target, ChildProcess)
            assert target.front is not None
            self.stops.enforce(target.front, at)
            count += 1
        return count


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        own, other = (stack.enter_context(one) for one in socket.socketpair())
        settings = PoolSettings(processes=1, start_method=StartMethod.SPAWN, has_windows=True)
        assignments = Assignments(selector, has_time_limits=True)
        children = Children(settings, None, selector, assignments)  # type: ignore[arg-type]
        frames = FrameReader(children, assignments, selector)
        page, page_fd = SharedPage.create()
        stack.callback(os.close, page_fd)
        pipe = WatchedPipe()
        stack.callback(pipe.close)
        child_permits = Permits(os.dup(pipe.read_fd))
        stack.callback(child_permits.close)
        child = ChildProcess(own, settings.kinds()[0], False, page, pipe)
        child.pid = os.getpid()
        children.all[child] = None
        selector.register(own, selectors.EVENT_READ, child)
        stops = Stops(children, assignments, frames.drain, selector, 5.0)
        made = Scene(assignments, stops, frames, child, pipe, other, child_permits)
        assignments.give_window(child, [(one, PATIENCE_SECONDS) for one in (FRONT, SECOND, THIRD)])
        made.begin(1)
        yield made


def test_a_task_that_begins_while_its_successors_are_taken_back_keeps_its_time_limit(
    scene: Scene,
) -> None:
    def go_on() -> None:
        scene.report(FRONT)
        scene.begin(2)

    scene.pipe.meanwhile = go_on
    assert scene.enforce(time.monotonic() + PATIENCE_SECONDS) == 1
    scene.frames.drain(scene.child)
    taken, reported = scene.assignments.events
    assert isinstance(taken, TakenBack)
    assert taken.assignments == (THIRD,)
    assert isinstance(reported, Reported)
    assert [*scene.assignments.busy] == [SECOND.task_id]
    assert not scene.assignments.lined
    assert scene.assignments.deadlines.pop_due(time.monotonic() + 0.05) is scene.child


def test_permits_that_a_task_has_read_do_not_keep_the_pool_in_a_loop(scene: Scene) -> None:
    with socket.socket(fileno=os.dup(scene.pipe.read_fd)) as thief:
        thief.recv(1000)
    assert scene.enforce(time.monotonic() + PATIENCE_SECONDS) == 1
    assert scene.assignments.deadlines.next_at is None
    scene.report(FRONT)
    scene.frames.drain(scene.child)
    assert [*scene.assignments.busy] == [SECOND.task_id]
    assert scene.child.state is ChildState.BUSY
