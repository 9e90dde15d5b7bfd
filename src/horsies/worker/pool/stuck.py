"""Stuck children: they do not start their task, or have sent only a part of a frame. A healthy child starts a
task within milliseconds and sends a frame in one write. A child that does neither for seconds no longer
receives assignments, or a task has written to its socket. A stuck child is killed. A task that it has not
started returns to the queue; the outcome of a started task is lost, because the child would never have
reported it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from horsies.worker.pool.child_process import ChildProcess, ChildState
from horsies.worker.pool.children import Children

STUCK_SECONDS = 5.0
_LOOK_SECONDS = 1.0
# How many checks must find a child unchanged before it counts as stuck. One check is not enough, because
# after a freeze of the whole worker the children need time to continue.
_LOOKS = 3


@dataclass(slots=True)
class Suspicion:
    """How long a child has not changed: since when, over how many checks, and the problem."""

    sign: Hashable
    problem: str
    since: float
    looks: int = 1

    def is_proved(self, now: float) -> bool:
        return self.looks >= _LOOKS and now - self.since >= STUCK_SECONDS


# Return a value that changes when the child makes progress, and the problem to report if it does not change;
# None for a healthy child.
Sign = tuple[Hashable, str]


class StuckWatch:
    """Checks a pool's children about once a second."""

    __slots__ = ("_children", "_suspicions", "look_at", "next_look")

    def __init__(self, children: Children) -> None:
        self._children = children
        self._suspicions: dict[ChildProcess, Suspicion] = {}
        # ``look_at`` is the earliest time of the next check. ``next_look`` is the time at which to check even
        # without an event; None if no child is suspected.
        self.look_at = 0.0
        self.next_look: float | None = None

    def attend(self, now: float) -> None:
        """Check all children, and kill stuck children. Must be called at ``look_at``."""
        self.look_at = now + _LOOK_SECONDS
        suspicions: dict[ChildProcess, Suspicion] = {}
        for child in tuple(self._children.all):
            child.is_stuck = False
            if child.was_killed or (sign := see_child(child)) is None:
                continue
            found = self._suspicions.get(child)
            if found is None or found.sign != sign[0]:
                suspicions[child] = Suspicion(*sign, since=now)
                continue
            suspicions[child] = found
            found.looks += 1
            child.is_stuck = found.looks >= _LOOKS
            if found.is_proved(now) and found.problem:
                child.verdict = child.verdict or f"killed because it {found.problem}"
                self._children.kill(child)
        self._suspicions = suspicions
        self.next_look = self.look_at if suspicions else None


def see_child(child: ChildProcess) -> Sign | None:
    """Return a child's problem, if it has one. An async child that does not start its latest tasks is killed
    only if it runs no other tasks, because another task may be blocking its event loop.
    """
    if child.state is not ChildState.BUSY and child.state is not ChildState.IDLE:
        return None
    if (size := child.frames.pending_bytes) > 0:
        problem = f"sent a malformed frame (incomplete, and nothing more for {STUCK_SECONDS:g} s)"
        return ("frame", child.tasks_done, size), problem
    begun = child.page.begun
    places = itertools.islice(child.held.values(), child.kind.slots)
    waiting = [one.assignment for one in places if one.number > begun]
    if not waiting:
        return None
    runs_none = len(waiting) == min(child.kind.slots, len(child.held))
    problem = f"did not begin a task within {STUCK_SECONDS:g} s" if runs_none else ""
    return ("begin", begun, waiting[0].task_id, waiting[0].generation, runs_none), problem
