"""What the supervisor of child processes tells the parent loop, which makes outcomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from horsies.worker.protocol import Assignment, ChildReport


class Reported(NamedTuple):
    """A child finished its assignment, which took it `run_seconds`."""

    report: ChildReport
    pid: int
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """A child ended by itself; `assignment` is what it took along.

    `description` reads ``exit code 3`` or ``signal 9 (SIGKILL)``. `started` is False when it is
    certain that user code never saw the assignment.
    """

    assignment: Assignment | None
    pid: int
    description: str
    started: bool = True


@dataclass(frozen=True, slots=True)
class Stopped:
    """A task was ended from outside, by asking or (`forced`) by killing its child."""

    assignment: Assignment
    pid: int
    forced: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HookFailed:
    """A child's start hook failed: every further child would fail the same way."""

    name: str
    description: str


PoolEvent = Reported | Died | Stopped | HookFailed
