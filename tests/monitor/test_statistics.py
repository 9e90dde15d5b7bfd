"""Statistics, breakdown and facets of tasks, from Python."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.monitoring import (
    task_breakdown,
    task_breakdown_async,
    task_facets,
    task_facets_async,
    task_statistics,
    task_statistics_async,
)
from horsies.tasks.broker import BrokerErrorCode
from tests.support.database import Database
from tests.support.measures import add
from tests.support.rows import add_task

HOUR = timedelta(hours=1)


def both(app: Horsies, function: Any, function_async: Any, *args: Any, **options: Any) -> Any:
    """Return the value of a call, which is that of its asynchronous twin."""

    async def main() -> Any:
        try:
            return await function_async(app, *args, **options)
        finally:
            await app.close_async()

    found = function(app, *args, **options)
    assert type(found) is type(asyncio.run(main()))
    return found


def test_statistics_count_attempts_and_describe_their_durations(
    app: Horsies, connection: Database
) -> None:
    add(connection, [(1, "mail", "send", 3), (2, "mail", "draw", 4), (3, "web", "send", 5)])
    all_of_them = both(app, task_statistics, task_statistics_async).unwrap()
    assert (all_of_them.total.done, all_of_them.total.ran.count) == (12, 12)
    mail = both(app, task_statistics, task_statistics_async, since=HOUR, queue="mail").unwrap()
    assert mail.total.done == 7
    send = both(app, task_statistics, task_statistics_async, name=["send"], step=HOUR).unwrap()
    assert (send.total.done, send.step) == (8, HOUR)


def test_a_breakdown_has_a_series_per_task_or_queue(app: Horsies, connection: Database) -> None:
    add(connection, [(1, "mail", "send", 3), (2, "mail", "draw", 4), (3, "web", "send", 5)])
    by_task = both(app, task_breakdown, task_breakdown_async).unwrap()
    assert {name: series.total.done for name, series in by_task.items()} == {"send": 8, "draw": 4}
    by_queue = both(app, task_breakdown, task_breakdown_async, "queue", queue="web").unwrap()
    assert {name: series.total.done for name, series in by_queue.items()} == {"web": 5}


def test_facets_count_tasks_by_their_values(app: Horsies, connection: Database) -> None:
    for queue, status, code in (
        ("mail", "PENDING", None),
        ("mail", "FAILED", "DOWN"),
        ("web", "FAILED", "DOWN"),
        ("web", "FAILED", "BUSY"),
    ):
        add_task(connection, queue_name=queue, status=status, error_code=code, task_name="send")
    found = both(app, task_facets, task_facets_async).unwrap()
    assert found.statuses == {"FAILED": 3, "PENDING": 1}
    assert found.queues == {"mail": 2, "web": 2}
    assert found.names == {"send": 4}
    assert list(found.error_codes.items()) == [("DOWN", 2), ("BUSY", 1)]
    assert (found.total, found.looked_back_to) == (4, None)
    mail = both(app, task_facets, task_facets_async, status="failed", queue="mail").unwrap()
    assert (mail.total, mail.error_codes) == (1, {"DOWN": 1})


def test_facets_of_many_tasks_say_how_far_they_looked(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.monitor.statistics.LIMIT_MAX", 2)
    for _ in range(3):
        add_task(connection)
    found = task_facets(app).unwrap()
    assert found.total == 2
    assert found.looked_back_to is not None


@pytest.mark.parametrize(
    ("function", "twin", "options", "problem"),
    [
        (task_statistics, task_statistics_async, {"since": 60}, "Since must be a timedelta"),
        (
            task_statistics,
            task_statistics_async,
            {"step": timedelta(0)},
            "Step must be a timedelta",
        ),
        (
            task_statistics,
            task_statistics_async,
            {"since": timedelta(days=300)},
            "more than 1,500 slots",
        ),
        (task_breakdown, task_breakdown_async, {"by": "worker"}, "By must be 'queue' or 'task'."),
        (task_breakdown, task_breakdown_async, {"since": None}, "Since must be a timedelta"),
        (task_facets, task_facets_async, {"limit": 3}, "There is no filter 'limit'; the filters"),
        (task_facets, task_facets_async, {"status": "LOST"}, "LOST"),
    ],
)
def test_a_wrong_question_is_an_error_value(
    app: Horsies, function: Any, twin: Any, options: dict[str, Any], problem: str
) -> None:
    error = both(app, function, twin, **options).unwrap_err()
    assert error.code is BrokerErrorCode.INVALID_QUERY
    assert problem in error.message
