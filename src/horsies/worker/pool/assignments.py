"""The assignments that children hold: given out, taken back, and the events in which they end.

A child runs one assignment at a time, the front. With a window it holds more of them, in line behind the
front, each with a permit that the worker can take back until the child begins the task.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horsies.worker import protocol
from horsies.worker.pool.child_process import ChildProcess, ChildState, Held
from horsies.worker.pool.window import split_unstarted
from horsies.worker.protocol import Assignment, ChildReport, ProgressReport

logger = logging.getLogger("horsies.pool")


class Reported(NamedTuple):
    """A child finished its assignment in `run_seconds`."""

    report: ChildReport
    pid: int
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """A child ended by itself, with its assignment if it had one.

    `description` reads ``exit code 3`` or ``signal 9 (SIGKILL)``. `started` is False when user code
    cannot have seen the assignment.
    """

    assignment: Assignment | None
    pid: int
    description: str
    started: bool = True
    run_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker stopped a task, by asking its child or (`forced`) by killing it."""

    assignment: Assignment
    pid: int
    forced: bool
    reason: str
    run_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Assignments that were given to a child, have not begun, and never will."""

    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class HookFailed:
    """A child's start hook failed: every further child would fail the same way."""

    name: str
    description: str


PoolEvent = Reported | Died | Stopped | TakenBack | HookFailed


class Assignments:
    """The assignments of all children of a pool, their deadlines, and the events about them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        # The children by the task that they run, and by the tasks in line behind it.
        self.busy: dict[str, ChildProcess] = {}
        self.lined: dict[str, ChildProcess] = {}
        self.deadlines: dict[ChildProcess, float] = {}
        self.events: list[PoolEvent] = []
        # The latest progress of each task that reported any, until the worker has stored it.
        self.progress: dict[str, ProgressReport] = {}
        self._selector = selector

    def note_free(self, child: ChildProcess) -> None:
        """A child has no assignment any more."""
        raise NotImplementedError

    def drain(self, child: ChildProcess) -> bool:
        """Handle the frames that a child has sent; True if it sends faster than they are read."""
        raise NotImplementedError

    def note_progress(self, child: ChildProcess) -> None:
        """Keep the child's latest report of progress until the worker stores it."""
        if child.assignment is None:
            return
        raw = child.page.raw_progress
        report = child.page.read_progress(child.assignment)
        if report is not None:
            child.seen_progress = raw
            self.progress[report.task_id] = report

    def release(self, child: ChildProcess) -> Assignment | None:
        if child.page.raw_progress != child.seen_progress:
            self.note_progress(child)
        assignment = child.assignment
        child.assignment = child.front = None
        child.is_slow = False
        if assignment is not None and self.busy.get(assignment.task_id) is child:
            del self.busy[assignment.task_id]
        self.deadlines.pop(child, None)
        return assignment

    def hold(self, child: ChildProcess, given: Iterable[tuple[Assignment, float]]) -> None:
        """Give assignments, each with its patience, to a child that may hold several."""
        assert child.permits is not None
        held = [Held(number, *one) for number, one in enumerate(given, child.given + 1)]
        child.given += len(held)
        child.permits.grant(one.number for one in held)
        for one in held:
            self.lined[one.assignment.task_id] = child
        child.line += held
        if child.assignment is None:
            child.state = ChildState.BUSY
            self.advance(child, time.monotonic())
        elif len(child.line) == len(held) and child.front is not None:
            self._arm(child, child.front)
        frames = [
            protocol.encode_assignment(one.assignment, one.number, needs_permit=True)
            for one in held
        ]
        child.send(frames[0] if len(frames) == 1 else b"".join(frames), self._selector)

    def advance(self, child: ChildProcess, now: float) -> None:
        """The first assignment in line becomes the front."""
        child.front = front = child.line.popleft()
        child.assignment = assignment = front.assignment
        child.assigned_at = now
        self.lined.pop(assignment.task_id, None)
        self.busy[assignment.task_id] = child
        if child.state is ChildState.BUSY and (child.line or assignment.timeout_ms is not None):
            self._arm(child, front)

    def _arm(self, child: ChildProcess, front: Held) -> None:
        """Set the time to look at the front: its time limit, or earlier when others wait behind it."""
        timeout_ms = front.assignment.timeout_ms
        if timeout_ms is None:
            if not child.line:
                self.deadlines.pop(child, None)
                return
            limit = front.patience_seconds
        else:
            limit = timeout_ms / 1000
            if child.line:
                limit = min(limit, front.patience_seconds)
        self.deadlines[child] = child.assigned_at + limit

    def take_back(self, child: ChildProcess) -> list[Held]:
        """Take from a child the assignments that it has not begun, the front possibly among them."""
        if child.front is None or child.permits is None:
            return []
        unused = set(child.permits.take_back())
        if not unused:
            return []
        begun, taken = split_unstarted(child.line, unused)
        child.line = deque(begun)
        for one in taken:
            self.lined.pop(one.assignment.task_id, None)
        if child.front.number in unused:
            taken.insert(0, child.front)
            self.release(child)
        return taken

    def return_unstarted(self, child: ChildProcess) -> None:
        """Take back everything that a child has not begun and return it to the worker."""
        self._return(self.take_back(child))
        if child.state is ChildState.BUSY and child.assignment is None:
            self.note_free(child)

    def _return(self, taken: Sequence[Held]) -> None:
        if taken:
            self.events.append(TakenBack(tuple(one.assignment for one in taken)))

    def note_unstarted(self, child: ChildProcess, first: int, last: int) -> None:
        """A child has passed over the assignments of these numbers: it found no permits, or no messages.

        Mostly the worker has taken them back. Those that it has not go to another child: a task has read
        what the worker sent, or shut down the socket that permits come through.
        """
        held = child.line if child.front is None else (child.front, *child.line)
        if not any(first <= one.number <= last for one in held):
            return
        self.taint(child, "read or cut off the messages or permits of other tasks")
        held = child.line if child.front is None else (child.front, *child.line)
        missed = [one for one in held if first <= one.number <= last]
        self._return(missed)
        child.line = deque(one for one in child.line if one not in missed)
        for one in missed:
            self.lined.pop(one.assignment.task_id, None)
        if child.front in missed:
            self.release(child)
        if child.assignment is None and child.line:
            self.advance(child, time.monotonic())
        elif child.assignment is None and child.state is ChildState.BUSY:
            self.note_free(child)

    def taint(self, child: ChildProcess, act: str) -> None:
        """The code of a task has meddled with the way to this child: it is replaced after its task."""
        if child.is_tainted:
            return
        child.is_tainted = True
        task = child.assignment
        logger.warning(
            "A task in child %s %s; the child is replaced. It runs %s now, the task may be an earlier one.",
            child.pid,
            act,
            "no task" if task is None else f"task {task.task_name!r} ({task.task_id})",
        )
        self.return_unstarted(child)

    def withdraw(self, task_id: str) -> bool:
        """Take back one task behind the front of a window; False when it has begun meanwhile.

        The kernel gives back the whole rest of the window: the other tasks go to the same child again.
        """
        child = self.lined[task_id]
        taken = self.take_back(child)
        kept = [one for one in taken if one.assignment.task_id != task_id]
        self._return([one for one in taken if one.assignment.task_id == task_id])
        if kept:
            self.hold(child, (one[1:] for one in kept))
        elif child.assignment is None:
            self.note_free(child)
        if len(kept) == len(taken):
            # Its permit was used, so the report of its predecessor has been sent.
            self.drain(child)
        return len(kept) < len(taken)

    def _relieve(self, child: ChildProcess) -> None:
        """Take back the assignments behind a slow front: others can run them sooner."""
        front = child.assignment
        self.drain(child)
        if child.assignment is not front or child.state is not ChildState.BUSY:
            return
        taken, since = self.take_back(child), child.assigned_at
        if taken and taken[0].assignment is front:
            # The child has not even begun. It keeps its front, as it would without a window.
            self.hold(child, [taken.pop(0)[1:]])
            child.assigned_at = since
        self._return(taken)
        child.is_slow = True
        if child.front is not None:
            self._arm(child, child.front)
