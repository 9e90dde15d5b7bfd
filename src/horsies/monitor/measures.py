"""Measures: rates of attempts and percentiles of their durations, from the counts that workers store.

A worker counts every attempt into buckets of its waiting and running time. Percentiles are therefore
estimates: exact to the bucket, interpolated inside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Literal

from horsies.db.statement import Script
from horsies.db.statements.measures import Measured, ReadMeasures, read_measures

# The upper bounds of the buckets in seconds; a sixteenth bucket has all longer durations.
BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
BUCKETS = len(BOUNDS) + 1
# After this many names of tasks in one process, all others count as one.
NAMES_MAX = 200

# Minutes become tens of minutes at this age.
MINUTES_KEPT = timedelta(hours=6)
_TEN_MINUTES = timedelta(minutes=10)
_COUNTS = ("done", "failed", "retried", "crashed", "stopped", "waited_ms", "ran_ms")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Durations in seconds of ``count`` attempts; None without any."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """The attempts that ended in one slot of time, which begins at ``at``.

    ``retried`` attempts are followed by another one; the other ends are final. ``stopped`` ones were
    cancelled, exceeded their time limit, or ended with their worker. ``waited`` is the time from due to
    started, of attempts that started in the slot; ``ran`` is the time from started to ended.
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
    """Slots of equal length in the order of time, without gaps, up to the database's ``until``.

    The last slot is not over yet. ``total`` has all attempts of the series, at the time of its first slot.
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
    """Return the bucket of a duration; a duration at a bound belongs to the bucket below it."""
    return bisect_left(BOUNDS, seconds)


def percentile(buckets: Sequence[int], share: float) -> float | None:
    """Return the duration in seconds that this share of attempts does not exceed; None without attempts.

    Beyond the last bound nothing is known, so the last bound is the answer.
    """
    total = sum(buckets)
    if not total:
        return None
    rank = share * total
    reached = list(accumulate(buckets))
    found = bisect_left(reached, rank)
    if found >= len(BOUNDS):
        return BOUNDS[-1]
    below = BOUNDS[found - 1] if found else 0.0
    before = reached[found - 1] if found else 0
    return below + (BOUNDS[found] - below) * (rank - before) / max(buckets[found], 1)


def percentiles(buckets: Sequence[int], sum_ms: float) -> Percentiles:
    """Describe the durations that these buckets count and that add up to ``sum_ms``."""
    count = sum(buckets)
    if not count:
        return Percentiles()
    p50, p95, p99 = (percentile(buckets, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(count, sum_ms / 1000 / count, p50, p95, p99)


def fitting_step(since: timedelta, step: timedelta) -> timedelta:
    """Return the step in whole minutes, and in whole tens of minutes for a series that begins before
    the minutes that are kept.
    """
    unit = timedelta(minutes=1) if since <= MINUTES_KEPT else _TEN_MINUTES
    return max(1, round(step / unit)) * unit


def read_measures_script(
    since: timedelta,
    step: timedelta,
    queues: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Script[Series]:
    """Read the attempts of the last ``since`` in slots of ``step``; ``queues`` and task ``names`` restrict
    them. ``step`` is rounded by ``fitting_step``.
    """
    found = yield from _read("all", since, step, queues, names)
    return found[""]


def read_split_measures_script(
    split: Literal["queue", "task"],
    since: timedelta,
    step: timedelta,
    queues: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Script[dict[str, Series]]:
    """``read_measures_script`` with a series for each queue or task that has attempts, by name. The task
    name '' is that of all tasks beyond the first 200 of a worker.
    """
    return (yield from _read(split, since, step, queues, names))


def _read(
    split: str, since: timedelta, step: timedelta, queues: Sequence[str], names: Sequence[str]
) -> Script[dict[str, Series]]:
    step = fitting_step(since, step)
    step_seconds = round(step.total_seconds())
    query = ReadMeasures(since.total_seconds(), step_seconds, split, list(queues), list(names))
    rows: list[Measured] = yield read_measures, query
    subjects = {row.subject for row in rows if row.subject is not None}
    if split == "all":
        subjects = {""}
    return {subject: as_series(rows, subject, step) for subject in sorted(subjects)}


def as_series(rows: Sequence[Measured], subject: str, step: timedelta) -> Series:
    """The rows of one subject, with an empty slot wherever it has none."""
    slots = {row.at: Slot(row.at) for row in rows}
    mine = [row for row in rows if row.subject == subject]
    slots |= {row.at: _slot(row) for row in mine}
    return Series(step, rows[0].until, list(slots.values()), _total(rows[0].at, mine))


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


def _total(at: datetime, rows: Sequence[Measured]) -> Slot:
    if not rows:
        return Slot(at)
    sums = {name: sum(getattr(row, name) for row in rows) for name in _COUNTS}
    waited = [*map(sum, zip(*(row.waited for row in rows), strict=True))]
    ran = [*map(sum, zip(*(row.ran for row in rows), strict=True))]
    return _slot(rows[0]._replace(at=at, waited=waited, ran=ran, **sums))
