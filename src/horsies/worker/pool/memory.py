"""Memory limits of tasks: a child whose task uses more than its ``memory_limit_mb`` is killed.

The parent reads the resident memory of the children that run a task with a limit, several times a second.
The kernel's own limits are not suitable: RLIMIT_AS and RLIMIT_DATA also count addresses that are reserved
and never used, and control groups need rights that most workers do not have. If no task has a limit, the
worker does not watch its children's memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from horsies.tasks.outcome import STOPPED_BY_MEMORY
from horsies.words import megabytes
from horsies.worker import os_process
from horsies.worker.pool.child_process import ChildProcess, ChildState, Held
from horsies.worker.pool.children import Children
from horsies.worker.pool.stops import Stops

LOOK_SECONDS = 0.05


class MemoryWatch:
    """Watches the children that run a task with a memory limit."""

    __slots__ = ("_children", "_fresh_mb", "_limits", "_looked_at", "_stops", "_watched")

    def __init__(self, children: Children, stops: Stops, limits: Mapping[str, int]) -> None:
        self._children = children
        self._stops = stops
        # The limits in megabytes, by task name.
        self._limits = limits
        self._watched: dict[Held, int] = {}
        self._looked_at = 0.0
        self._fresh_mb = 0.0

    def note_fresh(self, fresh_mb: float) -> str | None:
        """Note the memory of a fresh child; return a problem if the child already exceeds a task's limit."""
        self._fresh_mb = fresh_mb
        for name, limit_mb in sorted(self._limits.items(), key=lambda one: one[1]):
            if limit_mb <= fresh_mb:
                return (
                    f"A fresh child process already uses {megabytes(fresh_mb)}, which is not below "
                    f"memory_limit_mb={limit_mb} of task {name!r}; raise the limit."
                )
        return None

    def admits(self, child: ChildProcess, task_name: str) -> bool:
        """Return whether a child has enough memory left for a task.

        Memory kept by earlier tasks must be at most half of the difference between the limit and a fresh
        child's memory.
        """
        limit_mb = self._limits.get(task_name)
        if limit_mb is None or child.is_async or not child.tasks_done:
            return True
        used_mb = os_process.rss_megabytes([child.known_pid])
        return used_mb <= (self._fresh_mb + limit_mb) / 2

    def note_start(self, held: Held) -> None:
        """Watch an assignment if its task has a limit; tasks in async children never have one."""
        limit_mb = self._limits.get(held.assignment.task_name)
        if limit_mb is not None and not held.child.is_async:
            self._watched[held] = limit_mb

    @property
    def next_look(self) -> float | None:
        """Return when to check again even without an event; None if no task with a limit is running."""
        return self._looked_at + LOOK_SECONDS if self._watched else None

    def attend(self, now: float) -> None:
        """If a check is due, check the watched children, and kill those that exceed their limits."""
        if not self._watched or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for held, limit_mb in tuple(self._watched.items()):
            if not _is_running(held):
                del self._watched[held]
                continue
            used_mb = os_process.rss_megabytes([held.child.known_pid])
            if used_mb > limit_mb:
                used = megabytes(used_mb)
                self._end(held, f"used {used}, more than its memory_limit_mb={limit_mb}")

    def _end(self, held: Held, fault: str) -> None:
        """Kill the child, unless its task has just ended. Not enough memory is left to request the task to
        stop.
        """
        child = held.child
        self._stops.find_front(child)
        if not _is_running(held):
            return
        for one in child.held.values():  # a child that runs a batch holds several assignments
            if one.stop_reason is None:
                one.stop_reason = STOPPED_BY_MEMORY
                child.stopping += 1
        child.verdict = fault
        self._children.kill(child)


def _is_running(held: Held) -> bool:
    child = held.child
    return child.state is ChildState.BUSY and child.held.get(held.assignment.task_id) is held


def fresh_megabytes(children: Children) -> float:
    """Return the resident memory of the largest child."""
    pids = [child.pid for child in children.all if child.pid is not None]
    return max((os_process.rss_megabytes([pid]) for pid in pids), default=0.0)
