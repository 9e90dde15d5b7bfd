"""The events that a pool returns: how assignments end, and how children die."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horsies.captured_log import CapturedLog
from horsies.worker.protocol import Assignment, ChildReport


class Reported(NamedTuple):
    """A child finished its assignment in `run_seconds`."""

    report: ChildReport
    pid: int
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """A child ended unexpectedly, either while it had a started assignment or while it had none.

    `description` reads ``exit code 3`` or ``signal 9 (SIGKILL)``.
    """

    assignment: Assignment | None
    pid: int
    description: str
    run_seconds: float | None = field(default=None, compare=False)
    log: CapturedLog | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker stopped a task, either by a request to its child or, if `forced`, by killing the child. If
    the child ended, `description` is the reason.
    """

    assignment: Assignment
    pid: int
    forced: bool
    reason: str
    run_seconds: float | None = field(default=None, compare=False)
    description: str = field(default="", compare=False)
    log: CapturedLog | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Assignments that were given to a child but have not started and never will."""

    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class HookFailed:
    """A child's start hook failed and would fail in every further child too."""

    name: str
    description: str


PoolEvent = Reported | Died | Stopped | TakenBack | HookFailed
