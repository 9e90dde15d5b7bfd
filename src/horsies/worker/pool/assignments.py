"""The assignments that children hold: gives them out, takes them back, and notes their ends.

A child with one place runs one assignment at a time, the front. If it has a window, it holds further
assignments in line behind the front, each with a permit that the worker can take back until the child
starts the task. An async child runs all assignments that it holds at the same time. In a child that runs
a batch, the assignments that it holds are the batch, and run in one call.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Iterable, Sequence

from horsies.worker import protocol
from horsies.worker.pool.child_process import BUSY, ChildProcess, Held
from horsies.worker.pool.deadlines import Deadlines
from horsies.worker.pool.events import Died, PoolEvent, Stopped, TakenBack
from horsies.worker.protocol import Assignment, FrameKind, ProgressReport

logger = logging.getLogger("horsies.pool")


class Assignments:
    """The assignments of all children of a pool, with the deadlines and the events."""

    def __init__(self, selector: selectors.BaseSelector, *, has_time_limits: bool) -> None:
        # Assignments by task id: ``busy`` contains those that run or run next, ``lined`` those in line behind
        # them.
        self.busy: dict[str, Held] = {}
        self.lined: dict[str, Held] = {}
        self.deadlines: Deadlines[Held | ChildProcess] = Deadlines()
        self.events: list[PoolEvent] = []
        # The latest reported progress of each task, until the worker has stored it.
        self.progress: dict[str, ProgressReport] = {}
        # How many assignments run in batches, without the first assignment of each batch.
        self.companions = 0
        self._selector = selector
        self._has_time_limits = has_time_limits

    def give(self, child: ChildProcess, assignment: Assignment) -> Held:
        """Give an assignment to a child that starts it immediately, because no other task runs there or
        the child is async.
        """
        child.state = BUSY
        child.given = number = child.given + 1
        one = Held(number, assignment, child, assigned_at=time.monotonic())
        child.held[assignment.task_id] = self.busy[assignment.task_id] = one
        if assignment.timeout_ms is not None:
            self.arm(one)
        child.send(protocol.encode_assignment(assignment, number, False), self._selector)
        return one

    def give_batch(self, child: ChildProcess, batch: Sequence[Assignment]) -> Held:
        """Give assignments to an idle child that runs them in one call, and return the first assignment.

        The shortest of their time limits applies to the call.
        """
        limits = [one.timeout_ms for one in batch if one.timeout_ms is not None]
        first, now = child.given + 1, time.monotonic()
        frames = [protocol.encode_numbers(FrameKind.BATCH, first, child.given + len(batch))]
        child.state = BUSY
        for assignment in batch:
            if limits:
                assignment = assignment._replace(timeout_ms=min(limits))
            child.given = number = child.given + 1
            one = Held(number, assignment, child, assigned_at=now)
            # The assignment is marked as slow, so that no other assignment waits behind a batch.
            one.is_batched = one.is_slow = True
            child.held[assignment.task_id] = self.busy[assignment.task_id] = one
            frames.append(protocol.encode_assignment(assignment, number, False))
        self.companions += len(batch) - 1
        front = next(iter(child.held.values()))
        self.arm(front)
        child.send(b"".join(frames), self._selector)
        return front

    def give_window(self, child: ChildProcess, given: Iterable[tuple[Assignment, float]]) -> None:
        """Give assignments to a child with a window, each with its patience in seconds, and grant their
        permits.
        """
        assert child.permits is not None
        first = child.given + 1
        frames = []
        child.state = BUSY
        for assignment, patience_seconds in given:
            child.given = number = child.given + 1
            one = Held(number, assignment, child, patience_seconds)
            is_front = not child.held
            child.held[assignment.task_id] = one
            if is_front:
                self._start(one)
            else:
                self.lined[assignment.task_id] = one
            frames.append(protocol.encode_assignment(assignment, number, True))
        if len(child.held) > 1 and (front := child.front) is not None:
            self.arm(front)
        child.permits.grant(range(first, child.given + 1))
        child.send(frames[0] if len(frames) == 1 else b"".join(frames), self._selector)

    def _start(self, one: Held) -> None:
        """Make an assignment the front of a child that has a window."""
        one.assigned_at = time.monotonic()
        assignment = one.assignment
        self.busy[assignment.task_id] = one
        if assignment.timeout_ms is not None or len(one.child.held) > 1:
            self.arm(one)

    def arm(self, one: Held) -> None:
        """Set the time of a task's next check: its time limit, or earlier if other tasks wait behind it."""
        child, timeout_ms = one.child, one.assignment.timeout_ms
        limit = None if timeout_ms is None or not self._has_time_limits else timeout_ms / 1000
        target: Held | ChildProcess = one
        if not child.is_async:
            target = child
            has_line = len(child.held) > 1 and not one.is_slow
            if has_line and (limit is None or one.patience_seconds < limit):
                limit = one.patience_seconds
        if limit is None:
            self.deadlines.clear(target)
        else:
            self.deadlines.set(target, one.assigned_at + limit)

    def extend(self, one: Held, seconds: float) -> None:
        """Set the next check of a task that is being stopped to the end of its grace period."""
        target = one if one.child.is_async else one.child
        self.deadlines.set(target, time.monotonic() + seconds)

    def remove(self, one: Held) -> None:
        """Note that a child no longer has this assignment; the next one in line becomes the front."""
        child, task_id = one.child, one.assignment.task_id
        if child.page.raw_progress != child.seen_progress:
            self.note_progress(one)
        del child.held[task_id]
        target = one if child.is_async else child
        # A child that is exiting has a different deadline, which must not be changed.
        if target.deadline is not None and one.assigned_at and child.state is BUSY:
            self.deadlines.clear(target)
        if one.stop_reason is not None:
            child.stopping -= 1
        if self.busy.get(task_id) is one:
            del self.busy[task_id]
        elif self.lined.get(task_id) is one:
            del self.lined[task_id]
        if child.held and not child.is_async:
            front = next(iter(child.held.values()))
            if one.is_batched:
                self.companions -= 1
            elif not front.assigned_at:
                self.lined.pop(front.assignment.task_id, None)
                self._start(front)

    def note_progress(self, one: Held) -> None:
        """Keep a task's latest progress report in the shared page until the worker stores it."""
        page = one.child.page
        raw = page.raw_progress
        if (report := page.read_progress(one.assignment)) is not None:
            one.child.seen_progress = raw
            self.progress[report.task_id] = report

    def take_back(self, child: ChildProcess) -> list[Held]:
        """Take back the assignments that a child has not started, possibly including the front."""
        if child.permits is None or not child.held:
            return []
        unused = set(child.permits.take_back())
        taken = [one for one in child.held.values() if one.number in unused]
        # The last assignment is taken back first, so that no other assignment becomes the front in between.
        for one in reversed(taken):
            self.remove(one)
        return taken

    def return_tasks(self, taken: Sequence[Held]) -> None:
        """Return these tasks, which have not started, to the queue."""
        if taken:
            self.events.append(TakenBack(tuple(one.assignment for one in taken)))

    def note_unstarted(self, child: ChildProcess, first: int, last: int) -> None:
        """Note that a child skipped the assignments with these numbers, because their permits or messages
        were missing.

        Usually the worker has taken the assignments back or stopped them. Otherwise a task has read the
        worker's messages or shut down the socket for permits, so another child gets the assignments.
        """
        missed = [one for one in child.held.values() if first <= one.number <= last]
        if any(one.stop_reason is None for one in missed):
            self.taint(child, "read or cut off the messages or permits of other tasks")
            missed = [one for one in child.held.values() if first <= one.number <= last]
        for one in reversed(missed):
            self.remove(one)
        self.return_tasks(missed)

    def taint(self, child: ChildProcess, act: str) -> None:
        """Replace a child after its task, because task code has interfered with its socket."""
        if child.is_tainted:
            return
        child.is_tainted = True
        task = next((one.assignment for one in child.held.values()), None)
        logger.warning(
            "A task in child %s %s; the child is replaced. It is running %s now, but an earlier task may "
            "have been the cause.",
            child.pid,
            act,
            "no task" if task is None else f"task {task.task_name!r} ({task.task_id})",
            extra=None if task is None else {"task_id": task.task_id},
        )
        self.return_tasks(self.take_back(child))

    def note_end_by_death(self, child: ChildProcess, description: str) -> bool:
        """Note that a child, and with it the assignments that it held, has ended; return whether it had
        started any of them.
        """
        self.return_tasks(self.take_back(child))
        now, pid, last_begun = time.monotonic(), child.known_pid, child.page.begun
        held = list(child.held.values())
        for one in reversed(held):
            self.remove(one)
        begun = [one for one in held if one.number <= last_begun]
        for one in begun:
            seconds = now - (one.assigned_at or now)
            log = child.page.read_log(one.assignment, child.kind.log_limits)
            self.events.append(
                Died(one.assignment, pid, description, seconds, log)
                if one.stop_reason is None
                else Stopped(
                    *(one.assignment, pid, child.was_killed, one.stop_reason),
                    *(seconds, description, log),
                )
            )
        self.return_tasks([one for one in held if one.number > last_begun])
        return bool(begun)
