"""When the worker's loop acts: when it claims, takes a turn, does a regular job, and shuts down.

Bookkeeping on the monotonic clock, without I/O.
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

# An idle worker looks ahead immediately; a busy one at most this often.
LOOK_AHEAD_SECONDS = 0.1
# After a look-ahead, the next one waits this many times its duration, so that look-aheads take at
# most a tenth of the worker's time.
REST_FACTOR = 10

# Tasks count as short when they take less than a turn, as measured by their child.
SHORT_SECONDS = 0.0007
# How long to wait for the rest of a batch: after the batch was handed out, and after the last report
# from any child.
PATIENCE_SECONDS = 0.002
SILENCE_SECONDS = 0.001
# The weight of the newest run time, and its upper bound: the average follows a change of load within a
# few dozen tasks, even after a task that took an hour.
_WEIGHT = 0.1
_LONG_SECONDS = 0.05

# How long a stopping worker waits for a lost database to take back a claim in doubt.
RELEASE_PATIENCE_SECONDS = 5.0
# How long a stopping worker without running tasks repeats turns that a reachable database refuses.
REFUSED_PATIENCE_SECONDS = 30.0


BurstStep = Literal["go_on", "look_again", "stop"]


def burst_step(*, is_calm: bool, ended: int, looked_after: int | None) -> BurstStep:
    """Decide whether a worker that only runs due tasks (--burst) has run all of them.

    It has if no attempt has ended since a check of every queue that began while nothing was in flight:
    ``ended`` is the number of attempts so far, and ``looked_after`` the number before the last such
    check.
    """
    if not is_calm:
        return "go_on"
    return "stop" if looked_after == ended else "look_again"


# Returns the seconds on a clock that does not stop while the machine is suspended.
lifetime_clock = partial(time.clock_gettime, _LIFETIME_CLOCK)


@dataclass(slots=True)
class AwakeClock:
    """The time by which the loop should run again; if it runs much later, the process was frozen."""

    gap_seconds: float
    by: float = field(default_factory=lifetime_clock)


class Silence:
    """When a worker that cannot send heartbeats stops its own tasks, once per silence."""

    __slots__ = ("_stopped_after", "limit_seconds")

    def __init__(self, limit_ms: int | None) -> None:
        self.limit_seconds = NEVER if limit_ms is None else limit_ms / 1000
        # The last heartbeat before the tasks were stopped.
        self._stopped_after: float | None = None

    def seconds_left(self, shown_at: float) -> float:
        """How long until the tasks must be stopped, if the last heartbeat was at that time."""
        if self._stopped_after == shown_at:
            return NEVER
        return max(0.0, shown_at + self.limit_seconds - lifetime_clock())

    def note_stop(self, shown_at: float) -> None:
        self._stopped_after = shown_at


@dataclass(slots=True)
class Agenda:
    """When to claim and when to look ahead.

    A claim that came back short means that the queues are empty for now. From then on, another claim is
    worthwhile only after a notification, at a due time or at the safety poll.
    """

    poll_seconds: float
    may_have_work: bool = True
    needs_look_ahead: bool = True
    # When the last look-ahead happened, on the database's clock. The next one counts only tasks that
    # became due since then; None makes it count every due task.
    last_look: datetime | None = None
    looked_ahead_at: float = -NEVER
    due_at: float = NEVER
    claim_at: float = NEVER
    poll_at: float = 0.0

    def wake(self) -> None:
        """Note that there may be work: after a notification, a gap, or freed capacity."""
        self.may_have_work = True

    def look_everywhere(self) -> None:
        """Claim, and count every due task again, not only those that became due since the last look-ahead."""
        self.may_have_work = self.needs_look_ahead = True
        self.last_look = None

    @property
    def is_drained(self) -> bool:
        """Whether the last claim left no due task behind and nothing has happened since."""
        return not self.may_have_work and self.claim_at == NEVER

    @property
    def is_calm(self) -> bool:
        """Whether nothing is due according to the last claim and the last look-ahead."""
        return not (self.may_have_work or self.needs_look_ahead) and self.claim_at == NEVER

    def wake_at(self, at: float) -> None:
        """Claim again at that time at the latest, whether or not a task is known to be due."""
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
        # Deadlines also pass while every child is busy.
        self.needs_look_ahead = True
        if now >= self.due_at:
            self.may_have_work = True
        if is_poll:
            self.last_look = None
        self.due_at = NEVER
        self.poll_at = now + self.poll_seconds

    def note_claim(self, wanted: int, got: int) -> None:
        """Note the size of a claim: after a full one there may be more tasks; after a short one there
        are none for now.
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
        """Note when the next task is due, in seconds; 0 means now, and None means that no task is
        scheduled.
        """
        self.needs_look_ahead = False
        self.last_look = looked_at
        self.looked_ahead_at = now + max(0.0, REST_FACTOR * taken_seconds - LOOK_AHEAD_SECONDS)
        self.due_at = now + seconds if seconds else NEVER
        if seconds == 0:
            self.may_have_work = True

    def note_next_key(self, now: float, seconds: float) -> None:
        """Note when the next task with a key is due: look ahead then, and move it to its lane."""
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
        """Start the average at this run time."""
        return cls(min(run_seconds, _LONG_SECONDS), 1)

    def note(self, run_seconds: float) -> None:
        self.typical_seconds += _WEIGHT * (min(run_seconds, _LONG_SECONDS) - self.typical_seconds)
        self.count += 1


@dataclass(slots=True)
class Pace:
    """Whether to wait briefly for the rest of a batch before the next turn.

    A turn costs about 0.7 ms, however little it carries. If tasks are shorter than that, the children
    that one turn gave work to report within a fraction of a millisecond of each other, and a turn taken
    at the first report carries one outcome instead of all: with two children that halves throughput. If
    tasks are longer, a turn for the finished ones is over while the others run, and there is no wait:
    with tasks of 3 ms and eight children, waiting cost a quarter of the throughput.
    """

    run_times: RunTimes = field(default_factory=lambda: RunTimes(SHORT_SECONDS))
    handed_out_at: float = 0.0
    reported_at: float = 0.0
    outstanding: set[str] = field(default_factory=set)

    def note_hand_out(self, task_ids: Iterable[str], now: float) -> None:
        self.outstanding = set(task_ids)
        self.handed_out_at = now

    def note_end(self, task_id: str, run_seconds: float, now: float) -> None:
        """Note the end of a task, whichever batch it belongs to. Children that are out of step each
        form their own batch; only waiting for each other brings them back in step.
        """
        self.outstanding.discard(task_id)
        self.reported_at = now
        self.run_times.note(run_seconds)

    def linger_seconds(self, now: float) -> float:
        """How long to wait for more reports from the last batch before taking a turn."""
        if not self.outstanding or self.run_times.typical_seconds > SHORT_SECONDS:
            return 0.0
        until = min(self.handed_out_at + PATIENCE_SECONDS, self.reported_at + SILENCE_SECONDS)
        return max(0.0, until - now)


class Timer:
    """A regular job: due immediately, and then after every interval."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self.at

    def done(self, now: float) -> None:
        self.at = now + self.seconds


class Shutdown:
    """How far a worker's shutdown has come.

    The first request lets running tasks finish. The second one, or the end of the grace period,
    interrupts them. The third one ends the worker immediately. Without a grace period there is no time
    limit.
    """

    def __init__(self, grace_seconds: float | None) -> None:
        self._grace_seconds = NEVER if grace_seconds is None else grace_seconds
        self._requests = 0
        # Whether the worker is stopping: it claims nothing new.
        self.is_requested = False
        self._began_at: float | None = None
        self._grace_ends_at = NEVER
        self._is_over = False
        self._refused_since: float | None = None
        self.has_interrupted = False
        # Why the worker stops, if the reason is a failure.
        self.failure: str | None = None

    def request(self) -> None:
        """Ask for a shutdown, or for a quicker one; safe in a signal handler."""
        self._requests += 1
        self.is_requested = True

    @property
    def is_immediate(self) -> bool:
        return self._requests >= 3

    def begin(self, now: float) -> bool:
        """Start the grace period; True the first time."""
        if self._began_at is not None:
            return False
        self._began_at = now
        self._grace_ends_at = now + self._grace_seconds
        return True

    def wants_interruption(self, now: float) -> bool:
        """Return whether to interrupt the running tasks now; True only once."""
        if self._is_over:
            return False
        return self._requests >= 2 or now >= self._grace_ends_at

    def note_interruption(self, count: int, *, forced: int) -> None:
        """Count the interrupted tasks; ``forced`` of them were supposed to finish."""
        self._grace_ends_at = NEVER
        self._is_over = count > 0
        self.has_interrupted = forced > 0

    def next_at(self) -> float:
        """When the loop must be awake for the end of the grace period."""
        return self._grace_ends_at

    def release_ends_at(self) -> float:
        """When to stop waiting for a lost database and leave a claim in doubt unreleased."""
        if self._began_at is None:
            return NEVER
        return self._began_at + (0.0 if self._requests >= 2 else RELEASE_PATIENCE_SECONDS)

    def note_turn(self) -> None:
        """Note that the database accepted a turn."""
        self._refused_since = None

    def note_refusal(self, now: float) -> bool:
        """Note that a reachable database refused a turn; True if it has done so for too long since the
        request.
        """
        if self._began_at is None:
            return False
        if self._refused_since is None:
            self._refused_since = now
        return now >= self._refused_since + REFUSED_PATIENCE_SECONDS
