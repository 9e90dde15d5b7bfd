"""Task statistics for programs: rates and durations over time, by queue or task, and counts by value.

The data is the same as in the dashboard: the measures that workers store, and the task list. No query
counts all tasks on record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from horsies.db.statement import Script
from horsies.monitor.defaults import LIMIT_MAX
from horsies.monitor.measures import Series, read_measures_script, read_split_measures_script
from horsies.monitor.queries import OneOrMore, TaskFilters, TaskPage, task_filters, tasks_script
from horsies.result import Err
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
_INVALID = BrokerErrorCode.INVALID_QUERY
# The maximum retention of measures.
SINCE_MAX = timedelta(days=365)
SLOTS_MAX = 1_500


class HasBroker(Protocol):
    """The part of an application that these functions need."""

    def get_broker(self) -> PostgresBroker: ...


@dataclass(frozen=True, slots=True)
class TaskFacets:
    """How many of the newest matching tasks have each status, queue, name and error code.

    ``total`` tasks were read, at most 1,000. ``looked_back_to`` is the time of the oldest read task if
    more may match, or None if all matching tasks were counted.
    """

    statuses: Mapping[str, int]
    queues: Mapping[str, int]
    names: Mapping[str, int]
    error_codes: Mapping[str, int]
    total: int
    looked_back_to: datetime | None


def task_statistics(
    app: HasBroker,
    *,
    since: timedelta = timedelta(hours=1),
    step: timedelta = timedelta(minutes=1),
    queue: OneOrMore | None = None,
    name: OneOrMore | None = None,
) -> BrokerResult[Series]:
    """Count the attempts that ended within the last ``since`` and describe their durations, in slots of
    ``step``, which is rounded to whole minutes, or to tens of minutes beyond six hours.

    Example:
        total = task_statistics(app, since=timedelta(hours=6), queue="mail").unwrap().total
        print(total.done, total.failed, total.ran.p95)
    """
    checked = _statistics_script(since, step, queue, name)
    return checked.and_then(lambda script: app.get_broker().perform(_READING, script))


async def task_statistics_async(
    app: HasBroker,
    *,
    since: timedelta = timedelta(hours=1),
    step: timedelta = timedelta(minutes=1),
    queue: OneOrMore | None = None,
    name: OneOrMore | None = None,
) -> BrokerResult[Series]:
    """Run ``task_statistics`` without blocking the event loop."""
    return await _perform_async(app, _statistics_script(since, step, queue, name))


def task_breakdown(
    app: HasBroker,
    by: Literal["queue", "task"] = "task",
    *,
    since: timedelta = timedelta(hours=1),
    queue: OneOrMore | None = None,
) -> BrokerResult[dict[str, Series]]:
    """Count the attempts that ended within the last ``since``, for each queue or task with attempts. The
    task name '' stands for all tasks beyond a worker's first 200.

    Example:
        for name, series in task_breakdown(app, "task").unwrap().items():
            print(name, series.total.done, series.total.failed)
    """
    checked = _breakdown_script(by, since, queue)
    return checked.and_then(lambda script: app.get_broker().perform(_READING, script))


async def task_breakdown_async(
    app: HasBroker,
    by: Literal["queue", "task"] = "task",
    *,
    since: timedelta = timedelta(hours=1),
    queue: OneOrMore | None = None,
) -> BrokerResult[dict[str, Series]]:
    """Run ``task_breakdown`` without blocking the event loop."""
    return await _perform_async(app, _breakdown_script(by, since, queue))


def task_facets(app: HasBroker, **filters: Any) -> BrokerResult[TaskFacets]:
    """Count the newest 1,000 matching tasks by status, queue, name and error code.

    The filters are those of ``app.tasks_where``, without ``limit`` and ``after``.

    Example:
        task_facets(app, status="FAILED").unwrap().error_codes
    """
    checked = _facet_filters(filters)
    return checked.and_then(
        lambda found: app.get_broker().perform(_READING, tasks_script(found)).map(_facets)
    )


async def task_facets_async(app: HasBroker, **filters: Any) -> BrokerResult[TaskFacets]:
    """Run ``task_facets`` without blocking the event loop."""
    return (await _perform_async(app, _facet_filters(filters).map(tasks_script))).map(_facets)


async def _perform_async(app: HasBroker, checked: BrokerResult[Script[Any]]) -> BrokerResult[Any]:
    if isinstance(checked, Err):
        return checked
    return await app.get_broker().perform_async(_READING, checked.ok_value)


def _statistics_script(
    since: timedelta, step: timedelta, queue: OneOrMore | None, name: OneOrMore | None
) -> BrokerResult[Script[Series]]:
    if problem := _time_problem(since, step):
        return _invalid(problem)
    checked = task_filters(queue=queue, name=name)
    return checked.map(lambda one: read_measures_script(since, step, one.queues, one.names))


def _breakdown_script(
    by: str, since: timedelta, queue: OneOrMore | None
) -> BrokerResult[Script[dict[str, Series]]]:
    if by not in ("queue", "task"):
        return _invalid("by must be 'queue' or 'task'")
    if problem := _time_problem(since, since):
        return _invalid(problem)
    split: Literal["queue", "task"] = "queue" if by == "queue" else "task"
    checked = task_filters(queue=queue)
    return checked.map(lambda one: read_split_measures_script(split, since, one.queues))


def _time_problem(since: object, step: object) -> str | None:
    for name, value in (("since", since), ("step", step)):
        if not isinstance(value, timedelta) or not timedelta(minutes=1) <= value <= SINCE_MAX:
            return f"{name} must be a timedelta from one minute to {SINCE_MAX.days} days"
    assert isinstance(since, timedelta)
    assert isinstance(step, timedelta)
    if since / step > SLOTS_MAX:
        return f"since must not have more than {SLOTS_MAX:,} slots of step"
    return None


def _facet_filters(filters: dict[str, Any]) -> BrokerResult[TaskFilters]:
    known = ("status", "queue", "name", "error_code", "since", "until")
    if unknown := [name for name in filters if name not in known]:
        return _invalid(f"there is no filter {unknown[0]!r}; the filters are {', '.join(known)}")
    return task_filters(**filters, limit=LIMIT_MAX)


def _facets(page: TaskPage) -> TaskFacets:
    tasks = page.rows
    return TaskFacets(
        statuses=_counts(task.status.value for task in tasks),
        queues=_counts(task.queue_name for task in tasks),
        names=_counts(task.task_name for task in tasks),
        error_codes=_counts(task.error_code for task in tasks if task.error_code is not None),
        total=len(tasks),
        looked_back_to=tasks[-1].created_at if tasks and page.next_cursor else None,
    )


def _counts(values: Iterable[str]) -> dict[str, int]:
    """Return the values with their counts, most frequent first."""
    return dict(Counter(values).most_common())


def _invalid(problem: str) -> Err[BrokerOperationError]:
    return Err(BrokerOperationError(_INVALID, f"{problem[0].upper()}{problem[1:]}."))
