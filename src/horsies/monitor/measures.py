"""Measures: attempt rates and duration percentiles, from the counts that workers store.

A worker counts every attempt into buckets of its waiting and running time. Percentiles are therefore
estimates: exact to the bucket, interpolated inside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Literal

from horsies.db.statement import Script
from horsies.db.statements.measures import (
    DoneByMinute,
    Measured,
    count_done_by_minute,
    read_measures,
)

# The upper bounds of the buckets in seconds; a sixteenth bucket counts longer durations.
BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
BUCKETS = len(BOUNDS) + 1
# After this many task names in one process, further names are counted together.
NAMES_MAX = 200

# The age at which rows of single minutes are merged into rows of ten minutes.
MINUTES_KEPT = timedelta(hours=6)
_TEN_MINUTES = timedelta(minutes=10)
# The durations whose percentiles a reader needs; each takes about as long to sum as all counts together.
Duration = Literal["waited", "ran"]
BOTH: tuple[Duration, ...] = ("waited", "ran")
_COUNTS = ("done", "failed", "retried", "crashed", "stopped", "waited_ms", "ran_ms")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Durations in seconds of ``count`` attempts, or None without attempts."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """The attempts that ended in one slot of time, which begins at ``at``.

    ``retried`` attempts are followed by another attempt; all other outcomes are final. ``stopped``
    attempts were cancelled, exceeded their time limit, or ended with their worker. ``waited`` is the
    time from due to started, for attempts that started in the slot; ``ran`` is the time from started to
    ended.
    """

    at: datetime
    done: int = 0
    failed: int = 0
    retried: int = 0
    crashed: int = 0
    stopped: int = 0
    waited: Percentiles = Percentiles()
    ran: Percentiles = Percentiles()

    @property
    def attempts(self) -> int:
        return self.done + self.failed + self.retried + self.crashed + self.stopped


@dataclass(frozen=True, slots=True)
class Series:
    """Slots of equal length in chronological order, without gaps, up to the database's ``until``.

    The last slot is incomplete. ``total`` covers all attempts in the series and starts with its first
    slot.
    """

    step: timedelta
    until: datetime
    slots: Sequence[Slot]
    total: Slot

    def per_minute(self, count: int) -> float:
        """The rate of ``count`` attempts over the whole series."""
        seconds = (self.until - self.slots[0].at).total_seconds()
        return count * 60 / max(seconds, 1.0)


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration; a duration on a bound belongs to the lower bucket."""
    return bisect_left(BOUNDS, seconds)


def percentile(buckets: Sequence[int], share: float) -> float | None:
    """Return the duration in seconds that this share of attempts does not exceed, or None without
    attempts. Durations beyond the last bound are reported as that bound.
    """
    reached = list(accumulate(buckets))
    return _percentile(buckets, reached, share) if any(buckets) else None


def _percentile(buckets: Sequence[int], reached: Sequence[int], share: float) -> float:
    rank = share * reached[-1]
    found = bisect_left(reached, rank)
    if found >= len(BOUNDS):
        return BOUNDS[-1]
    below = BOUNDS[found - 1] if found else 0.0
    before = reached[found - 1] if found else 0
    return below + (BOUNDS[found] - below) * (rank - before) / max(buckets[found], 1)


def percentiles(buckets: Sequence[int], sum_ms: float) -> Percentiles:
    """Describe the durations counted in these buckets, whose sum is ``sum_ms``."""
    reached = list(accumulate(buckets))
    if not (count := reached[-1] if reached else 0):
        return Percentiles()
    p50, p95, p99 = (_percentile(buckets, reached, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(count, sum_ms / 1000 / count, p50, p95, p99)


def fitting_step(since: timedelta, step: timedelta) -> timedelta:
    """Round the step to whole minutes, or to tens of minutes for a series that begins before the stored
    minutes.
    """
    unit = timedelta(minutes=1) if since <= MINUTES_KEPT else _TEN_MINUTES
    return max(1, round(step / unit)) * unit


def read_measures_script(
    since: timedelta,
    step: timedelta,
    queues: Sequence[str] = (),
    names: Sequence[str] = (),
    durations: Collection[Duration] = BOTH,
) -> Script[Series]:
    """Read the attempts of the last ``since`` in slots of ``step``; ``queues`` and task ``names``
    restrict them. ``step`` is rounded by ``fitting_step``. Percentiles are computed only for
    ``durations``.
    """
    step = fitting_step(since, step)
    seconds = round(step.total_seconds())
    chosen = "waited" in durations, "ran" in durations
    rows: list[Measured] = yield read_measures(
        since.total_seconds(), seconds, seconds, "all", list(queues), list(names), *chosen
    )
    total = _slot(_total(rows))
    return Series(step, rows[0].until, [_slot(row) for row in rows], total)


def read_split_measures_script(
    split: Literal["queue", "task"],
    since: timedelta,
    queues: Sequence[str] = (),
    durations: Collection[Duration] = BOTH,
) -> Script[dict[str, Series]]:
    """Read the attempts of the period ``since`` as one slot per queue or task name with attempts. A
    worker counts its first 200 task names separately; the name '' has all its other tasks.
    """
    step = since + timedelta(minutes=1)
    seconds = round(step.total_seconds())
    chosen = "waited" in durations, "ran" in durations
    rows: list[Measured] = yield read_measures(
        since.total_seconds(), 60, seconds, split, list(queues), [], *chosen
    )
    slots = {row.subject: _slot(row) for row in rows if row.subject is not None}
    return {name: Series(step, rows[0].until, [slot], slot) for name, slot in slots.items()}


def done_by_minute_script(
    queues: Sequence[str], minutes: int = 60
) -> Script[dict[str, Sequence[int]]]:
    """Read the number of these queues' finished attempts per minute for the last whole minutes, oldest
    first.
    """
    rows: list[DoneByMinute] = yield count_done_by_minute(minutes, queues)
    found: dict[str, Sequence[int]] = {}
    for row in rows:
        counts = [0] * minutes
        for age, done in zip(row.minutes_ago, row.done, strict=True):
            counts[-age] = done
        found[row.queue_name] = counts
    return found


def _slot(row: Measured) -> Slot:
    return Slot(
        row.at,
        row.done,
        row.failed,
        row.retried,
        row.crashed,
        row.stopped,
        percentiles(row.waited, row.waited_ms),
        percentiles(row.ran, row.ran_ms),
    )


def _total(rows: Sequence[Measured]) -> Measured:
    sums = {name: sum(getattr(row, name) for row in rows) for name in _COUNTS}
    waited = [*map(sum, zip(*(row.waited for row in rows if row.waited), strict=True))]
    ran = [*map(sum, zip(*(row.ran for row in rows if row.ran), strict=True))]
    return rows[0]._replace(waited=waited, ran=ran, **sums)
