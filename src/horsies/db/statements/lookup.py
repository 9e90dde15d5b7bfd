"""Statements for the search by argument, groups of failures, and tasks related to a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.monitor import TaskSummary
from horsies.db.statements.turn import ClaimedTask
from horsies.encryption import SearchedPayload, ShownText

LOOKUP = StatementFile("lookup.sql")


class SearchTasks(NamedTuple):
    """The filters of a list. The arguments must contain ``key`` and ``needle``; for the tasks in
    ``positional``, the positional arguments must contain ``needle``.
    """

    before: str
    since: str
    statuses: Sequence[str]
    queues: Sequence[str]
    names: Sequence[str]
    error_codes: Sequence[str]
    workers: Sequence[str]
    retried_only: bool
    limit: int
    window: int
    max_bytes: int
    key: str
    needle: str
    positional: Sequence[str]


@dataclass(frozen=True, slots=True)
class FoundTask(TaskSummary):
    """A task that a search found, with its arguments as they are stored."""

    args: SearchedPayload | None
    kwargs: SearchedPayload | None


class AttemptPlace(NamedTuple):
    id: int
    finished_at: datetime


class FailureGroup(NamedTuple):
    """The failed attempts of one task that have the same reason; ``final`` is the number of them that
    were not retried. ``first_at`` is the time of the first such attempt on record.
    """

    task_name: str
    error_code: str | None
    total: int
    final: int
    first_at: datetime
    last_at: datetime
    message: ShownText | None
    newest_task_id: str
    # The names of at most five hosts; None if no worker is on record.
    hosts: list[str] | None
    # The times of all failures, in seconds since 1970, in no particular order.
    times: list[float]
    # None for attempts that were recorded by a release without fingerprints, or by another program.
    fingerprint: str | None = None
    exception_type: str | None = None
    raised_in: str | None = None
    # The releases of the workers of the first and the newest attempt, if known.
    first_release: str | None = None
    last_release: str | None = None


class ResentTask(NamedTuple):
    id: str
    status: str
    created_at: datetime


class Subject(NamedTuple):
    kind: str


class Trace(NamedTuple):
    traceparent: str


class Heartbeat(NamedTuple):
    sent_at: datetime


search_tasks = LOOKUP.declare("search_tasks", SearchTasks, FoundTask)


@LOOKUP.statement
def end_of_attempts(sample: int) -> AttemptPlace: ...
@LOOKUP.statement
def group_failures(from_id: int, limit: int, names: Sequence[str]) -> FailureGroup: ...
@LOOKUP.statement
def read_failure(fingerprint: str, limit: int) -> FailureGroup: ...
@LOOKUP.statement
def list_resent(id: str) -> ResentTask: ...
@LOOKUP.statement
def find_subject(id: str) -> Subject: ...
@LOOKUP.statement
def newest_trace(id: str) -> Trace: ...
@LOOKUP.statement
def newest_heartbeat(id: str) -> Heartbeat: ...
@LOOKUP.statement
def read_request(id: str) -> ClaimedTask: ...


LOOKUP.complete()
