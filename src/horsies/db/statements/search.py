"""Statements for the search over names, ids, keys of runs and error messages."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.encryption import ShownText

SEARCH = StatementFile("search.sql")


class FoundRow(NamedTuple):
    """A task or run whose id begins with a given text."""

    kind: str
    id: str
    name: str
    status: str


class FoundName(NamedTuple):
    """The name of a task with the number of its attempts in a day, or the name of a schedule with the
    number of slots that have fired.
    """

    name: str
    total: int


class FoundRun(NamedTuple):
    """One run that was found; the total counts all runs that were found, including those beyond the limit."""

    id: str
    name: str
    key: str | None
    status: str
    total: int


class FoundError(NamedTuple):
    """Failures of one task with the same reason; the message and the task id are from the newest failure."""

    name: str
    error_code: str | None
    total: int
    message: ShownText | None
    task_id: str
    fingerprint: str | None
    exception_type: str | None


@SEARCH.statement
def find_by_prefix(first: str, last: str, limit: int) -> FoundRow: ...
@SEARCH.statement
def search_task_names(text: str, limit: int) -> FoundName: ...
@SEARCH.statement
def search_schedules(text: str, limit: int) -> FoundName: ...
@SEARCH.statement
def search_runs(text: str, window: int, limit: int) -> FoundRun: ...
@SEARCH.statement
def search_errors(text: str, window: int, limit: int) -> FoundError: ...


SEARCH.complete()
