"""Statements of the search over names, ids, keys of runs and error messages."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.encryption import ShownText

SEARCH = StatementFile("search.sql")


class FoundRow(NamedTuple):
    """A task or run by the beginning of its id."""

    kind: str
    id: str
    name: str
    status: str


class FoundName(NamedTuple):
    """A task's name with its attempts of a day, or a schedule's with the slots that it has fired."""

    name: str
    total: int


class FoundRun(NamedTuple):
    """A run; the total counts all runs that were found, those beyond the limit included."""

    id: str
    name: str
    key: str | None
    status: str
    total: int


class FoundError(NamedTuple):
    """Failures of one task for one reason; the message and the task are those of the newest one."""

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
