"""One child process of the pool: its socket, state, assignments and limits. This module reads and writes the
socket; other modules make the decisions about a child.
"""

from __future__ import annotations

import math
import os
import random
import selectors
import socket
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from horsies.captured_log import KEEP_NOTHING, LogLimits
from horsies.worker import os_process
from horsies.worker.log_area import area_bytes
from horsies.worker.protocol import Assignment, FrameBuffer
from horsies.worker.sharing import PermitPipe, SharedPage

_SMALL_RECEIVE_BYTES = 1 << 16
_LARGE_RECEIVE_BYTES = 1 << 20
_NEARLY = 0.9

_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0


class RestartDelay:
    """The delay before a child is started again: 0 after the first early death, then 0.1 s, doubled up to 5 s
    until a process survives.
    """

    __slots__ = ("_died_at", "deaths", "not_before")

    def __init__(self) -> None:
        # The number of early deaths in a row, since a process last survived.
        self.deaths = 0
        self._died_at = self.not_before = 0.0

    def note_early_death(self) -> None:
        self.deaths += 1
        self._died_at = time.monotonic()
        if self.deaths > 1:
            delay = _FIRST_DELAY_SECONDS * 2 ** min(self.deaths - 2, 10)
            self.not_before = time.monotonic() + min(delay, _LONGEST_DELAY_SECONDS)

    def reset(self, ready_at: float | None = None) -> None:
        """Note that a process survived. A process that became ready before the last death does not count."""
        if ready_at is None or ready_at > self._died_at:
            self.deaths = 0
            self.not_before = 0.0


class ChildState(Enum):
    """The stages of a child process's life."""

    BOOTING = auto()
    SPARE = auto()
    IDLE = auto()
    BUSY = auto()
    EXITING = auto()
    CLOSED = auto()
    KILLED = auto()


# Constants, because accessing an enum member takes 0.1 to 0.5 µs, and every task needs seven accesses.
IDLE, BUSY = ChildState.IDLE, ChildState.BUSY
WITH_ROOM = (IDLE, BUSY)


@dataclass(frozen=True, slots=True)
class RecycleLimits:
    """The limits at which a child is replaced: a number of tasks, and a size in bytes; 0 means no limit."""

    max_tasks: int
    max_rss_bytes: int

    def early_task_limit(self) -> int:
        """Draw a child's limit at random from the last tenth of the configured number of tasks, so that the
        children do not all exit at the same time.
        """
        if self.max_tasks == 0:
            return 0
        earliest = max(1, math.ceil(self.max_tasks * _NEARLY))
        return random.randint(min(earliest, self.max_tasks - 1), self.max_tasks - 1)


class ChildKind(NamedTuple):
    """A kind of children (with one place each, or async children with several): their number and their
    limits.
    """

    processes: int
    slots: int
    limits: RecycleLimits
    is_async: bool = False
    has_windows: bool = False
    log_limits: LogLimits = KEEP_NOTHING

    @property
    def log_bytes(self) -> int:
        """The size of the memory that a child shares with its worker for the logs of its tasks."""
        return area_bytes(self.log_limits) * self.slots


@dataclass(eq=False)
class Held:
    """An assignment that a child holds, with its number among that child's assignments.

    If it runs for longer than `patience_seconds`, the assignments queued behind it are taken back. With
    0, no assignments are queued behind it while it is the front. Fields that few tasks need are set
    later; until then their defaults are those of the class.
    """

    number: int
    assignment: Assignment
    child: ChildProcess
    patience_seconds: float = 0.0
    # When the task became the front, which runs or runs next; 0 while the task is queued.
    assigned_at: float = 0.0
    # Whether this task has kept the tasks behind it waiting for too long.
    is_slow: bool = field(default=False, init=False)
    stop_reason: str | None = field(default=None, init=False)
    # Whether the task runs in one call with the other tasks that its child holds, and the reason why it
    # should be stopped. A call is stopped only when all of its tasks should be stopped.
    is_batched: bool = field(default=False, init=False)
    stop_wish: str | None = field(default=None, init=False)
    # The deadline of the task, used only in async children. Any other child has a single deadline, which may
    # belong to the front.
    deadline: float | None = field(default=None, init=False)
    queued_at: float | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        return self.child.pid


class ExitWatch(NamedTuple):
    """The data of the selector key for the descriptor that becomes readable when a child ends."""

    child: ChildProcess


@dataclass(slots=True, eq=False)
class ChildProcess:
    """One child as its parent sees it."""

    socket: socket.socket
    kind: ChildKind
    is_spare: bool
    page: SharedPage
    permits: PermitPipe | None = None
    socket_is_open: bool = True
    frames: FrameBuffer = field(init=False)
    # Whether the child runs all assignments that it holds at the same time, rather than one after
    # another.
    is_async: bool = False
    has_limits: bool = False
    soft_task_limit: int = 0
    state: ChildState = ChildState.BOOTING
    pid: int | None = None
    exit_fd: int | None = None
    # The bytes that did not fit into the socket. Up to 250 large assignments may wait here for one
    # blocked event loop.
    outgoing: bytearray = field(default_factory=bytearray)
    # The assignments in the order of their numbers. A child with one place runs the first assignment, the
    # front; all other assignments are in line behind it, or in the same batch.
    held: dict[str, Held] = field(default_factory=dict)
    # How many assignments the child was given in total, and how many of those that it holds are being
    # stopped.
    given: int = 0
    stopping: int = 0
    # The last progress report that was read from the page.
    seen_progress: bytes = bytes(28)
    ready_at: float | None = None
    tasks_done: int = 0
    rss_bytes: int = 0
    deadline: float | None = None
    queued_at: float | None = None
    was_killed: bool = False
    was_retired: bool = False
    # Whether this async child takes no more tasks: its replacement is started now, and it exits after its
    # last task.
    is_draining: bool = False
    # Whether a task has interfered with the child's socket or permits, so that it takes no more tasks and
    # is replaced.
    is_tainted: bool = False
    # Whether the child's latest tasks have waited for seconds to start, because its event loop is blocked
    # or gets no data.
    is_stuck: bool = False
    verdict: str | None = None
    failed_hook: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self.frames = FrameBuffer(self.page.mark)
        self.is_async = self.kind.is_async
        limits = self.kind.limits
        self.has_limits = limits.max_tasks > 0 or limits.max_rss_bytes > 0
        self.soft_task_limit = limits.early_task_limit()

    @property
    def known_pid(self) -> int:
        """The pid of a child that has sent its hello frame."""
        assert self.pid is not None
        return self.pid

    @property
    def front(self) -> Held | None:
        """The task that runs or runs next in a child with one place."""
        for one in self.held.values():
            return one
        return None

    def is_regular(self) -> bool:
        """Return whether the child counts towards `processes`: it is neither the spare nor about to exit."""
        return not (self.is_spare or self.is_draining) and self.state is not ChildState.EXITING

    def receive(self) -> bytes | None:
        """Read once from the child's socket; None if nothing has arrived, empty if the child has closed
        its end.
        """
        size = _SMALL_RECEIVE_BYTES
        if self.frames.pending and self.frames.wanted_bytes() > size:
            size = _LARGE_RECEIVE_BYTES
        try:
            return self.socket.recv(size)
        except BlockingIOError:
            return None
        except OSError:
            # The kernel raises this error if the child ended with unread bytes in its socket.
            return b""

    def send(self, frame: bytes, selector: selectors.BaseSelector) -> None:
        """Write `frame`; bytes that do not fit into the socket follow when it is writable.

        It is not an error if the child has ended, because the selector reports that.
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
        """Make the selector report the end of the child, whose pid is now known; return False if this is not
        possible.
        """
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
        """Return whether the child has nearly reached its limit of tasks."""
        return self.kind.limits.max_tasks > 0 and self.tasks_done >= self.soft_task_limit

    def must_retire(self) -> bool:
        limits = self.kind.limits
        return (
            self.is_tainted
            or 0 < limits.max_tasks <= self.tasks_done
            or 0 < limits.max_rss_bytes <= self.rss_bytes
        )

    def is_near_limit(self) -> bool:
        """Return whether a spare should be ready to replace the child."""
        if self.is_tainted:
            return True
        return self.has_limits and (
            self.may_retire()
            or self.must_retire()
            or 0 < self.kind.limits.max_rss_bytes * _NEARLY <= self.rss_bytes
        )

    def is_spent(self) -> bool:
        """Return whether an async child should accept no further tasks."""
        limit = self.soft_task_limit
        return 0 < limit <= self.tasks_done + len(self.held) or self.must_retire()

    def free_slots(self) -> int:
        """Return how many more tasks an async child may take; 0 while one of its tasks is being stopped,
        because the child may have to be killed for this.
        """
        if self.state not in WITH_ROOM or self.stopping or self.is_stuck:
            return 0
        if self.is_draining or self.is_tainted:
            return 0
        free = self.kind.slots - len(self.held)
        if self.soft_task_limit:
            free = min(free, self.soft_task_limit - self.tasks_done - len(self.held))
        return max(0, free)

    def window_room(self, depth: int) -> int:
        """Return how many assignments the child may hold at a time, at most `depth`; 0 if it may not take
        any now.
        """
        if self.permits is None or self.is_tainted or self.state not in WITH_ROOM:
            return 0
        if (front := self.front) is not None and not _may_be_followed(front):
            return 0
        if not self.has_limits:
            return depth
        if self.must_retire():
            return 0
        most = self.kind.limits.max_tasks
        return min(depth, most - self.tasks_done) if most > 0 else depth


def _may_be_followed(front: Held) -> bool:
    """Return whether other tasks may wait behind the front: the front is a short task, and has not already
    run for too long.
    """
    if front.is_slow or front.stop_reason is not None or not front.patience_seconds:
        return False
    return time.monotonic() < front.assigned_at + front.patience_seconds
