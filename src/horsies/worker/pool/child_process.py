"""One child process as the pool sees it: its socket, its state, its assignment, its limits.

The pool and ``children.py`` decide about a child; this module moves its bytes.
"""

from __future__ import annotations

import math
import os
import random
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from horsies.worker import os_process
from horsies.worker.protocol import Assignment, FrameBuffer
from horsies.worker.sharing import PermitPipe, SharedPage

_SMALL_RECEIVE_BYTES = 1 << 16
_LARGE_RECEIVE_BYTES = 1 << 20
_NEARLY = 0.9

_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0


class RestartDelay:
    """No delay after a first early death, then 0.1 s doubling to 5 s until a process lives."""

    __slots__ = ("_deaths", "_died_at", "not_before")

    def __init__(self) -> None:
        self._deaths = 0
        self._died_at = self.not_before = 0.0

    def note_early_death(self) -> None:
        self._deaths += 1
        self._died_at = time.monotonic()
        if self._deaths > 1:
            delay = _FIRST_DELAY_SECONDS * 2 ** min(self._deaths - 2, 10)
            self.not_before = time.monotonic() + min(delay, _LONGEST_DELAY_SECONDS)

    def reset(self, ready_at: float | None = None) -> None:
        """A process lives; one that was ready before the last death says nothing about later ones."""
        if ready_at is None or ready_at > self._died_at:
            self._deaths = 0
            self.not_before = 0.0


class ChildState(Enum):
    """The life of a child process."""

    BOOTING = auto()
    SPARE = auto()
    IDLE = auto()
    BUSY = auto()
    STOPPING = auto()
    EXITING = auto()
    CLOSED = auto()
    KILLED = auto()


_WITH_ROOM = (ChildState.IDLE, ChildState.BUSY)


@dataclass(frozen=True, slots=True)
class RecycleLimits:
    """When to replace a child: after a number of tasks (0: never), at a size in bytes (0: never)."""

    max_tasks: int
    max_rss_bytes: int

    def early_task_limit(self) -> int:
        """A number of tasks in the last tenth, drawn per child: children should not exit all at once."""
        if self.max_tasks == 0:
            return 0
        earliest = max(1, math.ceil(self.max_tasks * _NEARLY))
        return random.randint(min(earliest, self.max_tasks - 1), self.max_tasks - 1)


class Held(NamedTuple):
    """An assignment in a child, with its number among those of this child.

    Assignments behind it are taken back when it runs for longer than `patience_seconds`; 0 means that the
    child gets none while this one is in front.
    """

    number: int
    assignment: Assignment
    patience_seconds: float


class ExitWatch(NamedTuple):
    """The selector's data for the descriptor that becomes readable when a child ends."""

    child: ChildProcess


@dataclass(slots=True, eq=False)
class ChildProcess:
    """The parent's side of one child."""

    socket: socket.socket
    limits: RecycleLimits
    is_spare: bool
    page: SharedPage
    permits: PermitPipe | None = None
    socket_is_open: bool = True
    frames: FrameBuffer = field(init=False)
    has_limits: bool = False
    soft_task_limit: int = 0
    state: ChildState = ChildState.BOOTING
    pid: int | None = None
    exit_fd: int | None = None
    # Bytes that did not fit into the socket; 250 large assignments may wait for one blocked event loop.
    outgoing: bytearray = field(default_factory=bytearray)
    # The task that runs, or runs next: the front of the window.
    assignment: Assignment | None = None
    assigned_at: float = 0.0
    front: Held | None = None
    # How many assignments it was given.
    given: int = 0
    # The assignments behind the front, in order.
    line: deque[Held] = field(default_factory=deque)
    # Whether the front has kept others waiting for too long.
    is_slow: bool = False
    # The last report of progress that was read.
    seen_progress: bytes = bytes(28)
    ready_at: float | None = None
    tasks_done: int = 0
    rss_bytes: int = 0
    stop_reason: str | None = None
    was_killed: bool = False
    was_retired: bool = False
    # A child of several tasks that takes no more: it is replaced now and exits after the last one.
    is_draining: bool = False
    # Whether a task has meddled with the socket or the permits: the child takes no more and is replaced.
    is_tainted: bool = False
    verdict: str | None = None
    failed_hook: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self.frames = FrameBuffer(self.page.mark)
        self.has_limits = self.limits.max_tasks > 0 or self.limits.max_rss_bytes > 0
        self.soft_task_limit = self.limits.early_task_limit()

    @property
    def known_pid(self) -> int:
        """The pid of a child that has sent its hello frame."""
        assert self.pid is not None
        return self.pid

    def is_regular(self) -> bool:
        """Whether the child counts towards `processes`: it is neither the spare nor about to exit."""
        return not (self.is_spare or self.is_draining) and self.state is not ChildState.EXITING

    def receive(self) -> bytes | None:
        """One read from the child; None when nothing has arrived, empty when it closed its end."""
        wanted = self.frames.wanted_bytes()
        size = _LARGE_RECEIVE_BYTES if wanted > _SMALL_RECEIVE_BYTES else _SMALL_RECEIVE_BYTES
        try:
            return self.socket.recv(size)
        except BlockingIOError:
            return None
        except OSError:
            # The kernel reports it when the child ended with unread bytes in its socket.
            return b""

    def send(self, frame: bytes, selector: selectors.BaseSelector) -> None:
        """Write `frame`; bytes that do not fit into the socket follow when it is writable.

        A child that is gone is not an error here: its end arrives through the selector.
        """
        if self.outgoing:
            self.outgoing += frame
            return
        sent = self._write(frame)
        if sent < len(frame):
            self.outgoing += memoryview(frame)[sent:]
            selector.modify(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def flush(self, selector: selectors.BaseSelector) -> None:
        del self.outgoing[: self._write(self.outgoing)]
        if not self.outgoing:
            selector.modify(self.socket, selectors.EVENT_READ, self)

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def watch_exit(self, pid: int, selector: selectors.BaseSelector) -> bool:
        """The child's pid is known: have the selector report its end; False if it cannot."""
        self.pid = pid
        self.exit_fd = os_process.open_process(pid)
        if self.exit_fd is None:
            return False
        selector.register(self.exit_fd, selectors.EVENT_READ, ExitWatch(self))
        return True

    def close_socket(self, selector: selectors.BaseSelector) -> None:
        if self.socket_is_open:
            self.socket_is_open = False
            selector.unregister(self.socket)
            self.socket.close()

    def close(self, selector: selectors.BaseSelector) -> None:
        self.close_socket(selector)
        if self.permits is not None:
            self.permits.close()
            self.permits = None
        if self.exit_fd is not None:
            selector.unregister(self.exit_fd)
            os.close(self.exit_fd)
            self.exit_fd = None

    def kill(self) -> None:
        self.was_killed = True
        if self.pid is not None:
            os_process.kill_group(self.pid)

    def may_retire(self) -> bool:
        """Whether the child has done nearly all of its tasks."""
        return self.limits.max_tasks > 0 and self.tasks_done >= self.soft_task_limit

    def must_retire(self) -> bool:
        limits = self.limits
        return (
            self.is_tainted
            or 0 < limits.max_tasks <= self.tasks_done
            or 0 < limits.max_rss_bytes <= self.rss_bytes
        )

    def is_near_limit(self) -> bool:
        """Whether a spare should be ready to replace the child."""
        if self.is_tainted:
            return True
        return self.has_limits and (
            self.may_retire()
            or self.must_retire()
            or 0 < self.limits.max_rss_bytes * _NEARLY <= self.rss_bytes
        )

    def window_room(self, depth: int) -> int:
        """How many assignments the child may hold at the same time, at most `depth`; 0 if no more now."""
        if self.permits is None or self.is_slow or self.is_tainted or self.state not in _WITH_ROOM:
            return 0
        if self.assignment is not None and not self._may_be_followed():
            return 0
        if not self.has_limits:
            return depth
        if self.must_retire():
            return 0
        most = self.limits.max_tasks
        return min(depth, most - self.tasks_done) if most > 0 else depth

    def _may_be_followed(self) -> bool:
        """Whether others may wait behind the front: it is short, and has not run for too long already."""
        front = self.front
        if front is None or not front.patience_seconds:
            return False
        return time.monotonic() < self.assigned_at + front.patience_seconds

    @property
    def held_count(self) -> int:
        return len(self.line) + (self.assignment is not None)

    @property
    def has_begun(self) -> bool:
        """Whether the child has begun its assignment: it notes that in the shared page beforehand."""
        return self.front is not None and self.page.begun >= self.front.number
