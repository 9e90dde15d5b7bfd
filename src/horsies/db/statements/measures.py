"""Catalogue of the statements on ``horsies_measures``, the attempt counts per minute."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.db.statements.workers import Deleted

MEASURES = StatementFile("measures.sql")


class AddMeasures(NamedTuple):
    """Counts of attempts as columns: minutes since the epoch, and the buckets as array literals."""

    minutes: Sequence[int]
    queues: Sequence[str]
    names: Sequence[str]
    done: Sequence[int]
    failed: Sequence[int]
    retried: Sequence[int]
    crashed: Sequence[int]
    stopped: Sequence[int]
    waited_ms: Sequence[int]
    ran_ms: Sequence[int]
    waited: Sequence[str]
    ran: Sequence[str]


class Measured(NamedTuple):
    """The attempts of one subject in one slot; the subject is None in a slot without any attempts."""

    at: datetime
    until: datetime
    subject: str | None
    done: int
    failed: int
    retried: int
    crashed: int
    stopped: int
    waited_ms: int
    ran_ms: int
    waited: Sequence[int]
    ran: Sequence[int]


class DoneByMinute(NamedTuple):
    """How many attempts of a queue completed in each minute; a minute is identified by how many minutes ago
    it was.
    """

    queue_name: str
    minutes_ago: Sequence[int]
    done: Sequence[int]


class FailingTask(NamedTuple):
    """A task name with its final failures and its retries in the last ten minutes, and the averages per ten
    minutes over the hour before. ``crashes`` counts failures in which the process died.
    """

    name: str
    failures: int
    usual: float
    crashes: int = 0
    retries: int = 0
    usual_retries: float = 0.0


add_measures = MEASURES.declare("add_measures", AddMeasures, Nothing)


@MEASURES.statement
def read_measures(
    seconds: float,
    unit_seconds: int,
    step_seconds: int,
    # How the sums are grouped: "all", "queue" or "task".
    split: str,
    queues: Sequence[str],
    names: Sequence[str],
    # Whether the buckets of the waits, and of the run times, are summed; otherwise they are empty.
    with_waited: bool = True,
    with_ran: bool = True,
) -> Measured: ...
@MEASURES.statement
def count_done_by_minute(minutes: int, queues: Sequence[str]) -> DoneByMinute: ...
@MEASURES.statement
def find_failing_tasks() -> FailingTask: ...
@MEASURES.statement
def compact_measures(limit: int) -> Deleted: ...
@MEASURES.statement
def delete_old_measures(hours: float, limit: int) -> Deleted: ...


MEASURES.complete()
