"""Schedules of durable functions: each slot starts a run, which a worker parks and continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import AsyncDurable, Durable, Horsies, IntervalSchedule
from horsies.testing import clock_of, run_pending
from tests.support.database import Database
from tests.support.scheduling import MakeApp, ago, enter, make_due, schedule, tasks, tick

# The clock passes days, in which no other slot comes.
DAY, MONTH = timedelta(days=1), timedelta(days=30)


def day_of(slot: datetime) -> str:
    return slot.astimezone(UTC).isoformat()


def define_sync(app: Horsies) -> None:
    @app.durable("close_books", queue_name="plain")
    def close_books(ctx: Durable, label: str, scheduled_for: datetime | None = None) -> list[str]:
        assert scheduled_for is not None
        slot = ctx.step(day_of, scheduled_for)
        ctx.sleep(DAY)
        return [label, slot, ctx.wait_signal("approved", str)]


def define_async(app: Horsies) -> None:
    @app.durable("close_books", queue_name="plain")
    async def close_books(
        ctx: AsyncDurable, label: str, scheduled_for: datetime | None = None
    ) -> list[str]:
        assert scheduled_for is not None
        slot = await ctx.step(day_of, scheduled_for)
        await ctx.sleep(DAY)
        return [label, slot, await ctx.wait_signal("approved", str)]


@pytest.mark.parametrize("define", [define_sync, define_async])
def test_each_slot_of_a_durable_function_starts_a_run_that_waits_and_continues(
    connection: Database, make_app: MakeApp, define: Callable[[Horsies], None]
) -> None:
    one = schedule(
        task_name="close_books",
        kwargs={"label": "books"},
        pattern=IntervalSchedule(days=MONTH.days),
        catch_up_missed=True,
    )
    app = make_app(one)
    define(app)
    registry = enter(connection, app)
    first = ago(connection, MONTH.total_seconds() + 60)
    make_due(connection, first)
    tick(connection, registry)
    runs = tasks(connection)
    slots = [first, first + MONTH]
    assert [row["scheduled_for"] for row in runs] == slots
    run_pending(app)
    assert [steps_of(app, row) for row in runs] == [["day_of", "sleep"]] * 2
    clock_of(app).advance(2 * DAY)
    run_pending(app)
    assert [row["status"] for row in tasks(connection)] == ["PENDING"] * 2
    for row in runs:
        app.signal(row["id"], "approved", "by ada").unwrap()
    run_pending(app)
    results = [json.loads(row["result"])["ok"] for row in tasks(connection)]
    assert results == [["books", slot.isoformat(), "by ada"] for slot in slots]


def steps_of(app: Horsies, row: dict[str, Any]) -> list[str]:
    info = app.durable_handle(row["id"]).info().unwrap()
    return [step.name for step in info.steps]
