"""Queries: pages of tasks and workflow runs by filters, newest first.

``app.tasks_where``, ``app.runs_where`` and the command line's lists use them. A page ends with a cursor,
the position of its last row, so that added or deleted rows do not shift the next page. The filters are
checked before the query.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from operator import attrgetter
from typing import TypeAlias, TypeVar
from uuid import UUID

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.lookup import FoundTask, SearchTasks, search_tasks
from horsies.db.statements.monitor import (
    ListTasks,
    TaskSummary,
    end_of_window,
    list_live_tasks,
    list_newest_tasks,
    list_tasks_by_error,
    list_tasks_by_fingerprint,
)
from horsies.db.statements.workflows import (
    ListRuns,
    RunPosition,
    RunSummary,
    end_of_run_window,
    list_newest_runs,
    list_open_runs,
    read_run_position,
)
from horsies.error_codes import column_code
from horsies.ids import first_id_at, stored_form
from horsies.monitor import paging
from horsies.monitor.defaults import LIMIT_DEFAULT, LIMIT_MAX
from horsies.monitor.paging import ListSteps, Page, page_script, run_cursor, run_position
from horsies.result import Err, Ok
from horsies.states import TaskStatus, WorkflowStatus
from horsies.task_result import storable_text
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker

TaskPage: TypeAlias = Page[TaskSummary]
RunPage: TypeAlias = Page[RunSummary]
# One value, or several alternative values.
OneOrMore: TypeAlias = str | Iterable[str]

# The number of tasks whose texts a search reads; it parses, in portions, the texts that contain the
# needles. Larger arguments are not searched.
SEARCH_WINDOW = 20_000
CANDIDATES_MAX = 200
SEARCHED_BYTES_MAX = 65_536
PARSED_CHARACTERS_MAX = CANDIDATES_MAX * SEARCHED_BYTES_MAX

FIRST_ID = "00000000-0000-0000-0000-000000000000"
LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_FIRST_TIME = datetime(1, 1, 2, tzinfo=UTC)
_LAST_RUN = RunPosition(LAST_ID, datetime(9999, 12, 30, tzinfo=UTC))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MILLISECOND = (datetime(9999, 12, 30, tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
_FINGERPRINT = re.compile(r"[0-9a-f]{12}", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

Status = TypeVar("Status", bound=StrEnum)
Filters = TypeVar("Filters")


@dataclass(frozen=True, slots=True)
class Search:
    """A search in arguments. Candidates are stored arguments that contain ``key`` and ``needle``, and
    tasks in ``positional``, which have the key as a positional parameter; ``matches`` decides. Arguments
    of more than ``max_bytes`` are not searched.
    """

    key: str
    needle: str
    matches: Callable[[FoundTask], bool]
    positional: Sequence[str] = ()
    max_bytes: int = SEARCHED_BYTES_MAX


@dataclass(frozen=True, slots=True)
class TaskFilters:
    """Which tasks to list. An empty filter matches every task; a filter with values matches tasks that
    have any of them.

    ``since`` (inclusive) and ``until`` (exclusive) bound the send time. ``after`` is the id to continue
    from. ``workers`` are ids or host names. ``fingerprint`` is the fingerprint of the final failure. A
    ``search`` covers the arguments of the newest 20,000 tasks and ignores ``fingerprint``.
    """

    statuses: Sequence[TaskStatus] = ()
    queues: Sequence[str] = ()
    names: Sequence[str] = ()
    error_codes: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    after: str | None = None
    limit: int = LIMIT_DEFAULT
    workers: Sequence[str] = ()
    retried_only: bool = False
    search: Search | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class RunFilters:
    """Which runs to list, like ``TaskFilters`` for tasks; ``after`` is a cursor, or a run's id."""

    statuses: Sequence[WorkflowStatus] = ()
    names: Sequence[str] = ()
    workflow_keys: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    after: str | None = None
    include_children: bool = False
    limit: int = LIMIT_DEFAULT


# Checking filters


class _FilterProblem(ValueError):
    """The reason why a filter was rejected, as a sentence."""


def task_filters(
    *,
    status: OneOrMore | None = None,
    queue: OneOrMore | None = None,
    name: OneOrMore | None = None,
    error_code: OneOrMore | None = None,
    worker: OneOrMore | None = None,
    retried_only: bool = False,
    fingerprint: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int = LIMIT_DEFAULT,
    after: str | None = None,
) -> BrokerResult[TaskFilters]:
    """Check the arguments of ``tasks_where``; return Err(INVALID_QUERY) with the name of a wrong
    argument.
    """

    def check() -> TaskFilters:
        _refuse_times(since, until)
        return TaskFilters(
            _statuses(status, TaskStatus),
            _texts("queue", queue),
            _texts("name", name),
            _texts("error_code", error_code),
            since,
            until,
            None if after is None else _task_cursor(after),
            _checked_limit(limit),
            _texts("worker", worker),
            retried_only,
            fingerprint=None if fingerprint is None else checked_fingerprint(fingerprint),
        )

    return _checked(check)


def run_filters(
    *,
    status: OneOrMore | None = None,
    name: OneOrMore | None = None,
    workflow_key: OneOrMore | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    include_children: bool = False,
    limit: int = LIMIT_DEFAULT,
    after: str | None = None,
) -> BrokerResult[RunFilters]:
    """Check the arguments of ``runs_where``; return Err(INVALID_QUERY) with the name of a wrong
    argument.
    """

    def check() -> RunFilters:
        _refuse_times(since, until)
        if after is not None and run_position(after) is None:
            raise _not_a_cursor(after)
        return RunFilters(
            _statuses(status, WorkflowStatus),
            _texts("name", name),
            _texts("workflow_key", workflow_key),
            since,
            until,
            after,
            include_children,
            _checked_limit(limit),
        )

    return _checked(check)


def parse_time(text: str, now: datetime, zone: tzinfo | None = None) -> datetime:
    """Parse a duration before now, such as 15m, or a time. A time without an offset is in the given
    zone, by default local. Raises ValueError with a sentence for the user.
    """
    try:
        if found := re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII):
            return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=zone)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text[:40]!r} is neither a duration like 15m nor a time like 2026-01-31T12:00."
        ) from None


def _checked(check: Callable[[], Filters]) -> BrokerResult[Filters]:
    try:
        return Ok(check())
    except _FilterProblem as problem:
        return Err(BrokerOperationError(BrokerErrorCode.INVALID_QUERY, str(problem)))


def _texts(field: str, value: OneOrMore | None) -> list[str]:
    if value is None:
        return []
    is_many = isinstance(value, Iterable) and not isinstance(value, bytes)
    found = [value] if isinstance(value, str) else list(value) if is_many else []
    if not found or not all(isinstance(one, str) for one in found):
        raise _FilterProblem(
            f"{field} must be a text or several texts, not {value!r}; leave it out to match everything."
        )
    for one in found:
        if storable_text(one) != one:
            raise _FilterProblem(
                f"{field} must not contain NUL or a lone surrogate, which PostgreSQL cannot store, "
                f"as in {one[:100]!r}."
            )
    return found


def _statuses(value: OneOrMore | None, kind: type[Status]) -> list[Status]:
    known, wanted = [status.value for status in kind], _texts("status", value)
    for one in wanted:
        if one.upper() not in known:
            raise _FilterProblem(f"status must be one of {', '.join(known)}, not {str(one)!r}.")
    return [kind(one.upper()) for one in wanted]


def _refuse_times(since: object, until: object) -> None:
    for field, value in (("since", since), ("until", until)):
        if value is not None and not (
            isinstance(value, datetime) and value.utcoffset() is not None
        ):
            raise _FilterProblem(
                f"{field} must be a datetime with a time zone, such as datetime.now(UTC), not {value!r}."
            )
    if isinstance(since, datetime) and isinstance(until, datetime) and since >= until:
        raise _FilterProblem("since must be earlier than until.")


def _checked_limit(limit: object) -> int:
    if isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= LIMIT_MAX:
        return limit
    raise _FilterProblem(f"limit must be a whole number from 1 to {LIMIT_MAX:,}, not {limit!r}.")


def checked_fingerprint(text: object) -> str:
    """Return a fingerprint in its stored form; raise ValueError with a sentence for the user."""
    if isinstance(text, str) and _FINGERPRINT.fullmatch(text.strip().lower()):
        return text.strip().lower()
    raise _FilterProblem(
        f"fingerprint must be 12 hexadecimal digits, as `horsies failures` prints them, not {text!r}."
    )


def _task_cursor(after: object) -> str:
    if (stored := stored_form(after)) is None:
        raise _not_a_cursor(after)
    return stored


def _not_a_cursor(after: object) -> _FilterProblem:
    return _FilterProblem(f"after must be the next_cursor of a page, not {after!r}.")


# Tasks


def sent_time(task_id: str) -> datetime:
    """Return the send time, which is part of the id, to the millisecond."""
    milliseconds = UUID(task_id).int >> 80
    return _EPOCH + min(milliseconds, _LAST_MILLISECOND) * timedelta(milliseconds=1)


def list_tasks(broker: PostgresBroker, filters: TaskFilters) -> BrokerResult[TaskPage]:
    """List tasks, newest first.

    Unfinished tasks and error codes are found at any age. Other filters search the newest 50,000 tasks;
    ``next_cursor`` continues further back.
    """
    return broker.perform(_READING, tasks_script(filters))


async def list_tasks_async(broker: PostgresBroker, filters: TaskFilters) -> BrokerResult[TaskPage]:
    return await broker.perform_async(_READING, tasks_script(filters))


def tasks_script(filters: TaskFilters) -> Script[TaskPage]:
    until = first_id_at(filters.until) if filters.until else LAST_ID
    before = min(filters.after or LAST_ID, until)
    since = first_id_at(filters.since) if filters.since else FIRST_ID
    window = paging.LIST_WINDOW

    def parameters(statuses: list[str]) -> ListTasks:
        return ListTasks(
            before=before,
            since=since,
            statuses=statuses,
            queues=list(filters.queues),
            names=list(filters.names),
            error_codes=[column_code(code) or "" for code in filters.error_codes],
            workers=list(filters.workers),
            retried_only=filters.retried_only,
            limit=filters.limit,
        )

    if (search := filters.search) is not None:
        wanted = [status.value for status in filters.statuses]
        return _search_script(search, parameters(wanted))

    if filters.fingerprint is not None:
        return _fingerprint_script(filters, parameters)

    steps = ListSteps(
        unfinished=lambda statuses: (list_live_tasks, parameters(statuses)),
        newest=lambda statuses: list_newest_tasks(*parameters(statuses), window=window),
        window_edge=end_of_window(before, since, window),
        position=attrgetter("id"),
        cursor=attrgetter("id"),
        by_index=(lambda statuses: (list_tasks_by_error, parameters(statuses)))
        if filters.error_codes
        else None,
    )
    return page_script(steps, filters.statuses, filters.limit)


def _fingerprint_script(
    filters: TaskFilters, parameters: Callable[[list[str]], ListTasks]
) -> Script[TaskPage]:
    """Read one page from the index on fingerprints, at any age."""
    listed = parameters([status.value for status in filters.statuses])
    rows: list[TaskSummary] = yield list_tasks_by_fingerprint(*listed, filters.fingerprint or "")
    return Page(rows, rows[-1].id if len(rows) == filters.limit else None)


def _search_script(search: Search, listed: ListTasks) -> Script[TaskPage]:
    """Read the candidates of one window in portions, until the page is full.

    The end of a page must not depend on candidates that do not match, because that would reveal which
    masked values are stored.
    """
    edges = yield end_of_window(listed.before, listed.since, SEARCH_WINDOW)
    has_more = len(edges) == 2
    asked = SearchTasks(
        *listed._replace(limit=CANDIDATES_MAX),
        window=SEARCH_WINDOW,
        max_bytes=search.max_bytes,
        key=search.key,
        needle=search.needle,
        positional=search.positional,
    )
    if has_more:
        asked = asked._replace(since=edges[0].id)
    found: list[FoundTask] = []
    left = PARSED_CHARACTERS_MAX
    while True:
        candidates: list[FoundTask] = yield search_tasks, asked
        found += filter(search.matches, candidates)
        rows: list[TaskSummary] = list(found[: listed.limit])
        if len(found) > listed.limit:
            return Page(rows, rows[-1].id)
        if len(candidates) < CANDIDATES_MAX:
            return Page(rows, edges[0].id, False) if has_more else Page(rows)
        left -= sum(len(one.args or "") + len(one.kwargs or "") for one in candidates)
        if left < 0:
            return Page(rows, candidates[-1].id, looked_at_all=False)
        asked = asked._replace(before=candidates[-1].id)


# Runs of workflows


def list_runs(broker: PostgresBroker, filters: RunFilters) -> BrokerResult[RunPage | None]:
    """List runs, newest first; return None if ``after`` is the id of an unknown run.

    Unfinished runs are found at any age. Other filters search the newest 50,000 runs;
    ``next_cursor`` continues further back.
    """
    return broker.perform(_READING, runs_script(filters))


async def list_runs_async(
    broker: PostgresBroker, filters: RunFilters
) -> BrokerResult[RunPage | None]:
    return await broker.perform_async(_READING, runs_script(filters))


def page_or_empty(page: RunPage | None) -> RunPage:
    """Return the page; for a checked cursor it is never None."""
    return Page([]) if page is None else page


def runs_script(filters: RunFilters) -> Script[RunPage | None]:
    before: RunPosition | None = _LAST_RUN
    if filters.after is not None:
        before = run_position(filters.after)
        if before is None and (stored := stored_form(filters.after)):
            before = one_or_none((yield read_run_position(stored)))
    if before is None:
        return None
    if filters.until is not None and filters.until <= before.created_at:
        before = RunPosition(FIRST_ID, filters.until)
    return (yield from page_script(_run_steps(filters, before), filters.statuses, filters.limit))


def _run_steps(filters: RunFilters, before: RunPosition) -> ListSteps:
    since, window = filters.since or _FIRST_TIME, paging.LIST_WINDOW

    def parameters(statuses: list[str]) -> ListRuns:
        return ListRuns(
            before_at=before.created_at,
            before_id=before.id,
            since=since,
            statuses=statuses,
            names=list(filters.names),
            workflow_keys=list(filters.workflow_keys),
            include_children=filters.include_children,
            limit=filters.limit,
        )

    return ListSteps(
        unfinished=lambda statuses: (list_open_runs, parameters(statuses)),
        newest=lambda statuses: list_newest_runs(*parameters(statuses), window=window),
        window_edge=end_of_run_window(before.created_at, before.id, since, window),
        position=attrgetter("created_at", "id"),
        cursor=run_cursor,
    )
