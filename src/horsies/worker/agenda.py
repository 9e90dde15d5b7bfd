"""Decides when the worker's loop acts: when it claims, takes a turn, does a regular job, and shuts down.

This module only computes with times of the monotonic clock; it does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Literal

NEVER = float("inf")
# A clock that also runs while the machine is suspended, if the system has one.
_LIFETIME_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# The minimum time between two look-aheads of a busy worker. An idle worker looks ahead immediately.
LOOK_AHEAD_SECONDS = 0.1
# The pause after a look-ahead, as a multiple of its duration, so that look-aheads take at most a tenth of the
# worker's time.
REST_FACTOR = 10

# Tasks count as short when they take less than a turn, as measured by their child.
SHORT_SECONDS = 0.0007
# How long a turn waits for the rest of a batch: the first limit counts from the time the batch was handed
# out, and the second from the last report of any child.
PATIENCE_SECONDS = 0.002
SILENCE_SECONDS = 0.001
# The weight of the newest run time in the average, and the longest run time that the average counts. With
# these values the average follows a change of load within a few dozen tasks, even after a task that took
# an hour.
_WEIGHT = 0.1
_LONG_SECONDS = 0.05

# How long a stopping worker waits for an unavailable database in order to release a claim in doubt.
RELEASE_PATIENCE_SECONDS = 5.0
# How long a stopping worker without running tasks keeps repeating a turn that a reachable database
# refuses.
REFUSED_PATIENCE_SECONDS = 30.0


BurstStep = Literal["go_on", "look_again", "stop"]


def burst_step(*, is_calm: bool, ended: int, looked_after: int | None) -> BurstStep:
    """Decide whether a worker that only runs due tasks (--burst) has run all of them.

    All due tasks have run if no attempt has ended since the last check of every queue that started while
    nothing was in flight. ``ended`` is the number of attempts that have ended so far, and
    ``looked_after`` is that number just before the check.
    """
    if not is_calm:
        return "go_on"
    return "stop" if looked_after == ended else "look_again"


# Returns seconds from a clock that does not stop while the machine is suspended.
lifetime_clock = partial(time.clock_gettime, _LIFETIME_CLOCK)


@dataclass(slots=True)
class AwakeClock:
    """The time by which the loop should run again. If the loop runs much later, the process was frozen."""

    gap_seconds: float
    by: float = field(default_factory=lifetime_clock)


class Silence:
    """Decides when a worker that cannot send heartbeats stops its own tasks; it stops them once
    per outage.
    """

    __slots__ = ("_stopped_after", "limit_seconds")

    def __init__(self, limit_ms: int | None) -> None:
        self.limit_seconds = NEVER if limit_ms is None else limit_ms / 1000
        # The time of the last heartbeat before the worker stopped its tasks.
        self._stopped_after: float | None = None

    def seconds_left(self, shown_at: float) -> float:
        """Return the seconds until the tasks must be stopped, given the time of the last heartbeat."""
        if self._stopped_after == shown_at:
            return NEVER
        return max(0.0, shown_at + self.limit_seconds - lifetime_clock())

    def note_stop(self, shown_at: float) -> None:
        self._stopped_after = shown_at


@dataclass(slots=True)
class Agenda:
    """Decides when a worker claims and when it looks ahead.

    If a claim returns fewer tasks than requested, the queues are empty for now. The next claim is useful only
    after a notification, at a due time or at the safety poll.
    """

    poll_seconds: float
    may_have_work: bool = True
    needs_look_ahead: bool = True
    # The time of the last look-ahead, on the database's clock. The next look-ahead counts only tasks that
    # became due after this time; None makes it count every due task.
    last_look: datetime | None = None
    looked_ahead_at: float = -NEVER
    due_at: float = NEVER
    claim_at: float = NEVER
    poll_at: float = 0.0

    def wake(self) -> None:
        """Note that there may be tasks to claim, because of a notification, a gap in the notifications, or a
        freed place.
        """
        self.may_have_work = True

    def look_everywhere(self) -> None:
        """Request a claim and a look-ahead that counts every due task, not only those due since the last
        look-ahead.
        """
        self.may_have_work = self.needs_look_ahead = True
        self.last_look = None

    @property
    def is_drained(self) -> bool:
        """Return whether the last claim left no due task behind and no other claim has been
        requested since.
        """
        return not self.may_have_work and self.claim_at == NEVER

    @property
    def is_calm(self) -> bool:
        """Return whether no task is due according to the last claim and the last look-ahead."""
        return not (self.may_have_work or self.needs_look_ahead) and self.claim_at == NEVER

    def wake_at(self, at: float) -> None:
        """Request a claim at that time, even if no task is known to be due."""
        self.claim_at = min(self.claim_at, at)

    def tick(self, now: float, early_seconds: float = 0.0) -> None:
        """Request a claim if a due time has come, and a check of everything if the safety poll is due
        now or within `early_seconds`.
        """
        is_poll = now + early_seconds >= self.poll_at
        if now >= self.claim_at:
            self.may_have_work = True
            self.claim_at = NEVER
        if now < self.due_at and not is_poll:
            return
        # Check even while every child is busy, because waiting tasks may pass their deadlines.
        self.needs_look_ahead = True
        if now >= self.due_at:
            self.may_have_work = True
        if is_poll:
            self.last_look = None
        self.due_at = NEVER
        self.poll_at = now + self.poll_seconds

    def note_claim(self, wanted: int, got: int) -> None:
        """Note whether a claim was full. After a full claim there may be more tasks; after a short claim
        there are none for now.
        """
        self.may_have_work = got >= wanted
        if got < wanted:
            self.needs_look_ahead = True

    def wants_look_ahead(self, now: float) -> bool:
        return self.needs_look_ahead and now >= self.looked_ahead_at + LOOK_AHEAD_SECONDS

    def note_look_ahead(
        self,
        now: float,
        seconds: float | None,
        taken_seconds: float = 0.0,
        looked_at: datetime | None = None,
    ) -> None:
        """Note in how many seconds the next task is due: 0 means now, None means that no task
        is scheduled.
        """
        self.needs_look_ahead = False
        self.last_look = looked_at
        self.looked_ahead_at = now + max(0.0, REST_FACTOR * taken_seconds - LOOK_AHEAD_SECONDS)
        self.due_at = now + seconds if seconds else NEVER
        if seconds == 0:
            self.may_have_work = True

    def note_next_key(self, now: float, seconds: float) -> None:
        """Note when the next task with a key is due. The worker looks ahead then and moves the task to
        its lane.
        """
        self.due_at = min(self.due_at, now + seconds)

    def next_at(self) -> float:
        planned = min(self.poll_at, self.due_at, self.claim_at)
        if self.needs_look_ahead:
            planned = min(planned, self.looked_ahead_at + LOOK_AHEAD_SECONDS)
        return planned


@dataclass(slots=True)
class RunTimes:
    """The typical run time of tasks, as a moving average."""

    typical_seconds: float
    count: int = 0

    @classmethod
    def of(cls, run_seconds: float) -> RunTimes:
        """Start the average with this run time."""
        return cls(min(run_seconds, _LONG_SECONDS), 1)

    def note(self, run_seconds: float) -> None:
        self.typical_seconds += _WEIGHT * (min(run_seconds, _LONG_SECONDS) - self.typical_seconds)
        self.count += 1


@dataclass(slots=True)
class Pace:
    """Decides whether to wait briefly for the rest of a batch before the next turn. A turn costs at least
    about 0.7 ms. If tasks are shorter than that, all children that got a task in one turn report within a
    fraction of a millisecond. A turn taken at the first report would record one outcome instead of all of
    them; with two children this halves throughput. If tasks are longer, a turn for the finished tasks is over
    before the other tasks end, so there is no wait: with tasks of 3 ms and eight children, waiting cost a
    quarter of the throughput.
    """

    run_times: RunTimes = field(default_factory=lambda: RunTimes(SHORT_SECONDS))
    handed_out_at: float = 0.0
    reported_at: float = 0.0
    outstanding: set[str] = field(default_factory=set)

    def note_hand_out(self, task_ids: Iterable[str], now: float) -> None:
        self.outstanding = set(task_ids)
        self.handed_out_at = now

    def note_end(self, task_id: str, run_seconds: float, now: float) -> None:
        """Note the end of a task of any batch. Children that do not finish together form one batch each; only
        waiting for each other synchronizes them again.
        """
        self.outstanding.discard(task_id)
        self.reported_at = now
        self.run_times.note(run_seconds)

    def linger_seconds(self, now: float) -> float:
        """Return how long to wait for more reports from the last batch before the next turn."""
        if not self.outstanding or self.run_times.typical_seconds > SHORT_SECONDS:
            return 0.0
        until = min(self.handed_out_at + PATIENCE_SECONDS, self.reported_at + SILENCE_SECONDS)
        return max(0.0, until - now)


class Timer:
    """The timer of a regular job, which is due immediately and then after every interval."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self.at

    def done(self, now: float) -> None:
        self.at = now + self.seconds


class Shutdown:
    """Tracks the phases of a worker's shutdown.

    After the first request, running tasks may finish. The second request, or the end of the grace period,
    interrupts them. The third request ends the worker immediately. Without a grace period there is no
    time limit.
    """

    def __init__(self, grace_seconds: float | None) -> None:
        self._grace_seconds = NEVER if grace_seconds is None else grace_seconds
        self._requests = 0
        # Whether a shutdown was requested; the worker then claims no more tasks.
        self.is_requested = False
        self._began_at: float | None = None
        self._grace_ends_at = NEVER
        self._is_over = False
        self._refused_since: float | None = None
        self.has_interrupted = False
        # The reason why the worker stops, if it stops because of a failure.
        self.failure: str | None = None

    def request(self) -> None:
        """Request a shutdown, or speed up the current one; safe to call in a signal handler."""
        self._requests += 1
        self.is_requested = True

    @property
    def is_immediate(self) -> bool:
        return self._requests >= 3

    def begin(self, now: float) -> bool:
        """Start the grace period; return True only the first time."""
        if self._began_at is not None:
            return False
        self._began_at = now
        self._grace_ends_at = now + self._grace_seconds
        return True

    def wants_interruption(self, now: float) -> bool:
        """Return whether to interrupt the running tasks now; True is returned only once."""
        if self._is_over:
            return False
        return self._requests >= 2 or now >= self._grace_ends_at

    def note_interruption(self, count: int, *, forced: int) -> None:
        """Note that tasks were interrupted; ``forced`` of them were supposed to finish."""
        self._grace_ends_at = NEVER
        self._is_over = count > 0
        self.has_interrupted = forced > 0

    def next_at(self) -> float:
        """Return the end of the grace period, at which the loop must wake up."""
        return self._grace_ends_at

    def release_ends_at(self) -> float:
        """Return when to stop waiting for an unavailable database and leave a claim in doubt unreleased."""
        if self._began_at is None:
            return NEVER
        return self._began_at + (0.0 if self._requests >= 2 else RELEASE_PATIENCE_SECONDS)

    def note_turn(self) -> None:
        """Note that the database accepted a turn."""
        self._refused_since = None

    def note_refusal(self, now: float) -> bool:
        """Note that a reachable database refused a turn; return True if it has refused turns for too long
        since the shutdown began.
        """
        if self._began_at is None:
            return False
        if self._refused_since is None:
            self._refused_since = now
        return now >= self._refused_since + REFUSED_PATIENCE_SECONDS
