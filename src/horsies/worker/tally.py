"""Tally: counts a worker's attempts, for ``horsies_measures`` and for Prometheus, and writes the log
lines about them.

Counts only grow, so another thread can read them without a lock. The growth since the last ``cut`` is stored
in the database. Counting an attempt takes 1.2 µs, a third of it for parsing the time at which the task was
due.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, TypeAlias

from horsies.db.statement import Step
from horsies.db.statements.measures import AddMeasures, add_measures
from horsies.db.statements.turn import ClaimedTask
from horsies.error_codes import OperationalErrorCode, OutcomeCode
from horsies.errors import UNLIMITED_RETRIES
from horsies.logs import headers_to_log
from horsies.monitor.measures import BOUNDS, BUCKETS, NAMES_MAX
from horsies.states import TaskStatus
from horsies.tasks.outcome import RETURNED_TO_QUEUE, Outcome
from horsies.worker.agenda import NEVER
from horsies.worker.host_clock import HostClock

# Writes one line per ended attempt, after the next tasks have been given to the children. A line costs
# about 20 µs; --quiet-tasks raises the logger's level.
ends_logger = logging.getLogger("horsies.tasks")

FLUSH_SECONDS = 30.0
# The kinds of ends of an attempt, in the order of their counts.
ENDS = ("completed", "failed", "retried", "crashed", "timeout", "cancelled", "stopped")
# The upper bounds of the buckets for the durations of turns, in seconds.
TURN_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

# The layout of the list of counts for a queue and task: the ends, the buckets, and two sums in seconds.
_WAITED = len(ENDS)
_RAN = _WAITED + BUCKETS
_WAITED_SECONDS = _RAN + BUCKETS
_RAN_SECONDS = _WAITED_SECONDS + 1
_NONE = (0,) * (_RAN_SECONDS + 1)
_COMPLETED, _RETRIED, _FAILED = 0, 2, 1
_FINAL = {
    OperationalErrorCode.WORKER_CRASHED.value: 3,
    OutcomeCode.TASK_TIMEOUT.value: 4,
    OutcomeCode.TASK_CANCELLED.value: 5,
    OperationalErrorCode.WORKER_STOPPED.value: 6,
}
_SUCCEEDED = TaskStatus.COMPLETED
_parse = datetime.fromisoformat

Key = tuple[str, str]
# A recorded outcome, its task, and how many seconds the attempt ran; None if the attempt never reached a
# child.
End: TypeAlias = tuple[Outcome, ClaimedTask, float | None]


class Counts(NamedTuple):
    """The counts for one task in one queue: attempts by how they ended, and the buckets and sums of their
    durations.
    """

    ends: Sequence[int]
    waited: Sequence[int]
    ran: Sequence[int]
    waited_seconds: float
    ran_seconds: float

    @classmethod
    def of(cls, counts: Sequence[float]) -> Counts:
        whole = [int(count) for count in counts[:_WAITED_SECONDS]]
        ends, waited, ran = whole[:_WAITED], whole[_WAITED:_RAN], whole[_RAN:]
        return cls(ends, waited, ran, counts[_WAITED_SECONDS], counts[_RAN_SECONDS])

    def plus(self, other: Counts) -> Counts:
        return Counts(
            _added(self.ends, other.ends),
            _added(self.waited, other.waited),
            _added(self.ran, other.ran),
            self.waited_seconds + other.waited_seconds,
            self.ran_seconds + other.ran_seconds,
        )


class Tally:
    """One worker's counts since its start, by queue and task name.

    After ``NAMES_MAX`` names, all further names are counted together under ''.
    """

    def __init__(self) -> None:
        self._counts: dict[Key, list[float]] = {}
        self._names: set[str] = set()
        # The counts at the last cut, and for each minute the growth that is not stored in the database yet.
        self._cut: dict[Key, list[float]] = {}
        self._grown: dict[tuple[int, Key], list[float]] = {}
        # The minute of the database's clock to which new counts belong, and its start and end on this
        # worker's clock.
        self._minute = 0
        self._minute_at = self._minute_ends_at = 0.0
        self._clock = HostClock()
        self.flush_at = NEVER
        # How many tasks were given to idle children, and how many were placed behind another task.
        self.handed_alone = 0
        self.handed_behind = 0
        self.turns = 0
        self.turn_tasks = 0
        self.turn_seconds = 0.0
        self.turn_buckets = [0] * (len(TURN_BOUNDS) + 1)

    def note_clock(self, database_now: datetime, taken_seconds: float) -> None:
        """Set the database's time, which was requested ``taken_seconds`` ago."""
        self._clock.note(database_now, time.time(), taken_seconds)

    def note_starts(self, tasks: Sequence[ClaimedTask], behind: int = 0) -> None:
        """Count tasks that were given to children, ``behind`` of them behind another task."""
        now, find = self._now(), self._counts.get
        self.handed_alone += len(tasks) - behind
        self.handed_behind += behind
        for task in tasks:
            try:
                waited = now - _parse(task.enqueued_at).timestamp()
            except ValueError:  # a manual edit of the row may have stored -infinity
                continue
            counts = find((task.queue_name, task.task_name)) or self._first(task)
            counts[_WAITED + bisect_left(BOUNDS, waited)] += 1
            if waited > 0.0:
                counts[_WAITED_SECONDS] += waited

    def note_ends(self, ends: Sequence[End]) -> None:
        """Count the attempts with these recorded outcomes."""
        if not ends:
            return
        self._now()
        find = self._counts.get
        for outcome, task, seconds in ends:
            counts = find((task.queue_name, task.task_name)) or self._first(task)
            counts[_COMPLETED if outcome.status is _SUCCEEDED else _end_of(outcome)] += 1
            if seconds is not None:
                counts[_RAN + bisect_left(BOUNDS, seconds)] += 1
                counts[_RAN_SECONDS] += seconds

    def note_turn(self, seconds: float, tasks: int) -> None:
        """Count a turn, with the tasks that it has recorded, started or claimed."""
        self.turns += 1
        self.turn_tasks += tasks
        self.turn_seconds += seconds
        self.turn_buckets[bisect_left(TURN_BOUNDS, seconds)] += 1

    @property
    def ended(self) -> int:
        """How many attempts have ended since the start."""
        return int(sum(sum(counts[:_WAITED]) for counts in self._counts.values()))

    def totals(self) -> Mapping[Key, Counts]:
        """All counts since the start; safe to call from another thread."""
        # Each copy is a single step of the interpreter, because the worker may add a key concurrently.
        return {key: Counts.of(list(counts)) for key, counts in list(self._counts.items())}

    def take_flush(self) -> list[Step]:
        """Return the statement that stores the growth since the last call, if there is any.

        The growth is dropped even if the statement fails later: a COMMIT in doubt is never repeated, so no
        attempt is counted twice.
        """
        self._cut_minute()
        grown, self._grown = self._grown, {}
        self.flush_at = NEVER
        self._minute_ends_at = 0.0  # the next count begins a minute and schedules the next call
        return [(add_measures, _as_columns(grown))] if grown else []

    def _now(self) -> float:
        """Set the database's time; counts from now on belong to its minute."""
        now = time.time() + self._clock.ahead_seconds
        if not self._minute_at <= now < self._minute_ends_at:
            self._begin_minute(int(now // 60))
        return now

    def _begin_minute(self, minute: int) -> None:
        if minute != self._minute:
            self._cut_minute()
            self._minute = minute
        self._minute_at, self._minute_ends_at = minute * 60.0, (minute + 1) * 60.0
        if self.flush_at == NEVER:
            self.flush_at = time.monotonic() + FLUSH_SECONDS

    def _first(self, task: ClaimedTask) -> list[float]:
        """Return new counts for a task that has no counts in this queue yet."""
        name = task.task_name
        if name not in self._names:
            if len(self._names) >= NAMES_MAX:
                name = ""
            else:
                self._names.add(name)
        return self._counts.setdefault((task.queue_name, name), list(_NONE))

    def _cut_minute(self) -> None:
        for key, counts in self._counts.items():
            before = self._cut.get(key)
            if before == counts:
                continue
            now = self._cut[key] = list(counts)
            # If the clock is set back, an earlier minute may occur a second time.
            earlier = self._grown.get((self._minute, key), _NONE)
            columns = zip(before or _NONE, now, earlier, strict=True)
            self._grown[self._minute, key] = [then - cut + more for cut, then, more in columns]


def _end_of(outcome: Outcome) -> int:
    """Return how an unsuccessful attempt is counted: as retried if another attempt follows."""
    if outcome.delay_seconds is not None:
        return _RETRIED
    return _FINAL.get(outcome.error_code or "", _FAILED)


def _as_columns(grown: Mapping[tuple[int, Key], Sequence[float]]) -> AddMeasures:
    counts = [Counts.of(one) for one in grown.values()]
    done, failed, retried, crashed, *stopped = map(
        list, zip(*(one.ends for one in counts), strict=True)
    )
    return AddMeasures(
        [minute for minute, _ in grown],
        [queue for _, (queue, _) in grown],
        [name for _, (_, name) in grown],
        done,
        failed,
        retried,
        crashed,
        [sum(ends) for ends in zip(*stopped, strict=True)],
        [round(one.waited_seconds * 1000) for one in counts],
        [round(one.ran_seconds * 1000) for one in counts],
        [_array(one.waited) for one in counts],
        [_array(one.ran) for one in counts],
    )


def _added(counts: Sequence[int], others: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(counts, others, strict=True)]


def _array(counts: Sequence[int]) -> str:
    return f"{{{','.join(map(str, counts))}}}"


def log_ends(ends: Iterable[End]) -> None:
    """Log the end of each attempt, unless --quiet-tasks raises the level."""
    if ends_logger.isEnabledFor(logging.INFO):
        for end in ends:
            log_end(*end)


def log_end(outcome: Outcome, task: ClaimedTask, seconds: float | None) -> None:
    """Log the end of an attempt, and when the next attempt is due if there is one."""
    fields = {
        "task_id": task.id,
        "task_name": task.task_name,
        "attempt": task.retry_count + 1,
        "outcome": outcome.status.value,
        "error_code": outcome.error_code,
        "seconds": seconds,
        "retry_in_seconds": outcome.delay_seconds,
        "retry_reason": outcome.retry_reason,
        **headers_to_log(task.task_options),
    }
    end = "completed"
    if outcome.status is not TaskStatus.COMPLETED:
        is_cancelled = outcome.status is TaskStatus.CANCELLED
        end = "was cancelled" if is_cancelled else f"failed with {outcome.error_code}"
    is_requeued = outcome.retry_reason == RETURNED_TO_QUEUE
    if is_requeued:
        end = "was interrupted"
    if seconds is not None:
        end += f" after {seconds:.3f} s"
    if (delay := outcome.delay_seconds) is not None and not is_requeued:
        limit = max(task.max_retries, outcome.max_retries)
        of_limit = "" if limit >= UNLIMITED_RETRIES else f" of {limit}"
        end += f", retry {task.retry_count + 1}{of_limit} in {delay:.{1 if delay >= 1 else 2}f} s"
    if outcome.retry_reason is not None:
        end += f" ({outcome.retry_reason})"
    text, words = "%s %s #%d %s", (task.task_name, task.id, task.retry_count + 1, end)
    # logger.info is not used, because it looks up the caller's line, which would take a fifth of the time of
    # a log line.
    record = ends_logger.makeRecord(
        ends_logger.name, logging.INFO, __file__, 0, text, words, None, extra=fields
    )
    ends_logger.handle(record)
