"""Stops tasks on request and at their time limit, and takes back tasks that are queued behind a slow one."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence

from horsies.worker import os_process, protocol
from horsies.worker.pool.assignments import Assignments
from horsies.worker.pool.child_process import ChildProcess, ChildState, Held
from horsies.worker.pool.children import Children
from horsies.worker.protocol import FrameKind


def ending_with(held: Held, reason: str) -> Sequence[Held]:
    """Return the tasks that a stop of this task ends.

    The tasks of a batch share one call, so they end only when all of them should stop; any other task ends
    alone.
    """
    if not held.is_batched:
        return (held,)
    held.stop_wish = reason
    batch = tuple(held.child.held.values())
    return batch if all(one.stop_wish is not None for one in batch) else ()


class Stops:
    """Stops tasks, and kills the child of a task that does not end within the grace period."""

    __slots__ = ("_assignments", "_children", "_drain", "_grace_seconds", "_selector")

    def __init__(
        self,
        children: Children,
        assignments: Assignments,
        drain: Callable[[ChildProcess], object],
        selector: selectors.BaseSelector,
        grace_seconds: float,
    ) -> None:
        self._children = children
        self._assignments = assignments
        self._drain = drain
        self._selector = selector
        self._grace_seconds = grace_seconds

    def find_front(self, child: ChildProcess) -> None:
        """Take back all permits and read all reports, so that the front is certainly the running task."""
        self._assignments.return_tasks(self._assignments.take_back(child))
        self._children.release(child)
        self._drain(child)

    def stop(self, held: Held, reason: str) -> None:
        """Stop a task: raise ``TaskStopped`` in it, or cancel its coroutine."""
        child, task_id = held.child, held.assignment.task_id
        if not child.is_async:
            self.find_front(child)
        if child.held.get(task_id) is not held or held.stop_reason is not None:
            return
        if child.state is not ChildState.BUSY:
            return
        stopped = ending_with(held, reason)
        if not stopped:
            return
        for one in stopped:
            one.stop_reason = one.stop_wish or reason
        child.stopping += len(stopped)
        self._assignments.extend(held, self._grace_seconds)
        if child.is_async:
            texts = (task_id, str(held.assignment.generation))
            child.send(protocol.encode_texts(FrameKind.STOP_TASK, *texts), self._selector)
            return
        child.page.request_stop()
        # The frame shows the child that its parent sent the signal. If the child has not read its assignment
        # yet, it finds the frame behind the assignment and interrupts no code.
        child.send(protocol.encode_numbers(FrameKind.STOP), self._selector)
        if child.pid is not None:
            os_process.terminate(child.pid)

    def withdraw(self, held: Held) -> bool:
        """Take back one queued task; return False if it has started. Taking back the permits takes back the
        whole window, so the other tasks are sent to the child again.
        """
        child = held.child
        taken = self._assignments.take_back(child)
        kept = [one for one in taken if one is not held]
        if kept:
            given = [(one.assignment, one.patience_seconds) for one in kept]
            self._assignments.give_window(child, given)
        self._children.release(child)
        if held not in taken:
            # The task's permit was used, so the child has sent the report of the previous task.
            self._drain(child)
            return False
        self._assignments.return_tasks([held])
        return True

    def enforce(self, held: Held, now: float) -> None:
        """Handle a task's deadline: stop it, kill its child, or take back the tasks behind it."""
        child, limit_ms = held.child, held.assignment.timeout_ms
        if held.stop_reason is not None:
            child.verdict = child.verdict or (
                f"killed because task {held.assignment.task_name!r} in it did not end within "
                f"{self._grace_seconds:g} s after it was stopped"
            )
            self._children.kill(child)
        elif limit_ms is None or now < held.assigned_at + limit_ms / 1000:
            self._relieve(held)
        else:
            self._stop_overdue(held)

    def _stop_overdue(self, held: Held) -> None:
        child, tasks_done = held.child, held.child.tasks_done
        for one in tuple(child.held.values()) if held.is_batched else (held,):
            self.stop(one, "timeout")
        if child.state is ChildState.IDLE and child.tasks_done == tasks_done:
            child.verdict = "killed because it did not begin a task within its timeout_ms"
            self._children.kill(child)

    def _relieve(self, front: Held) -> None:
        """Take back the assignments behind a slow front, because other children can run them sooner."""
        child = front.child
        self._drain(child)
        if child.front is not front or child.state is not ChildState.BUSY:
            return
        taken = self._assignments.take_back(child)
        if front in taken:
            # The child has not even started the front, and keeps it, as it would without a window.
            taken.remove(front)
            given = [(front.assignment, front.patience_seconds)]
            self._assignments.give_window(child, given)
        self._assignments.return_tasks(taken)
        # Only the front is slow: if the child has just used the permit of a task behind it, that task starts
        # when the front has ended.
        if (kept := child.front) is not None:
            kept.assigned_at, kept.is_slow = front.assigned_at, True
            self._assignments.arm(kept)
