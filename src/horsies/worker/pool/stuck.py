"""Children that are stuck: one that does not begin its task, or has sent half a frame and nothing more.

A child begins a task within milliseconds and sends a frame in one go. One that does neither for seconds no
longer receives assignments, or a task has written to its socket. It is killed: a task that has not begun
returns to the queue, and one that has begun would never have been reported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from horsies.worker.pool.child_process import ChildProcess, ChildState
from horsies.worker.pool.children import Children

STUCK_SECONDS = 5.0
_LOOK_SECONDS = 1.0
# How often a child must look the same: a worker that was frozen itself gives its children time to go on.
_LOOKS = 3
_WITH_TASK = (ChildState.BUSY, ChildState.STOPPING)


@dataclass(slots=True)
class Suspicion:
    """What a child has looked like since when, at so many looks, and what is wrong with it."""

    sign: Hashable
    problem: str
    since: float
    looks: int = 1

    def is_proved(self, now: float) -> bool:
        return self.looks >= _LOOKS and now - self.since >= STUCK_SECONDS


# A value that changes whenever the child goes on, and the problem if it does not; None when all is well.
Sign = tuple[Hashable, str]


class StuckWatch:
    """Looks at the children of a pool about once a second, by a function that sees signs."""

    __slots__ = ("_children", "_looked_at", "_see", "_suspicions")

    def __init__(self, children: Children, see: Callable[[ChildProcess], Sign | None]) -> None:
        self._children = children
        self._see = see
        self._looked_at = 0.0
        self._suspicions: dict[ChildProcess, Suspicion] = {}

    @property
    def next_look(self) -> float | None:
        """When to look again even if nothing happens; None without a suspicion."""
        return self._looked_at + _LOOK_SECONDS if self._suspicions else None

    def is_suspected(self, child: ChildProcess) -> bool:
        """Whether the child has been stuck for so long that it should get no more tasks."""
        found = self._suspicions.get(child)
        return found is not None and found.looks >= _LOOKS

    def attend(self, now: float) -> None:
        """Look at all children if it is time to, and kill those that are stuck."""
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        suspicions: dict[ChildProcess, Suspicion] = {}
        for child in tuple(self._children.children):
            if child.was_killed or (sign := self._see(child)) is None:
                continue
            found = self._suspicions.get(child)
            if found is None or found.sign != sign[0]:
                suspicions[child] = Suspicion(*sign, since=now)
                continue
            suspicions[child] = found
            found.looks += 1
            if found.is_proved(now) and found.problem:
                child.verdict = child.verdict or f"killed because it {found.problem}"
                self._children.kill(child)
        self._suspicions = suspicions


def see_child(child: ChildProcess) -> Sign | None:
    """What is wrong with a child that runs one task at a time, if anything."""
    if (size := child.frames.pending_bytes) > 0:
        problem = f"sent a malformed frame (incomplete, and nothing more for {STUCK_SECONDS:g} s)"
        return ("frame", child.tasks_done, size), problem
    if child.assignment is not None and child.state in _WITH_TASK and not child.has_begun:
        task = child.assignment.task_id, child.assignment.generation
        return ("begin", task), f"did not begin a task within {STUCK_SECONDS:g} s"
    return None
