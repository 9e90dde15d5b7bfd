"""Schedulers as processes, and checks of their fired slots. A schedule's slots are counted from the slot
stored before any scheduler starts, so that all slots are known in advance; each must be fired exactly
once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.db.statement import run_script
from horsies.scheduler.registry import Registry, store_configured
from tests.support.database import Database
from tests.support.workers import Fleet, RunningWorker

APPLICATION = "tests.support.apps.scheduled:app"
# The variable with the name of a file; while the file exists, the slow workflow is not built.
GATE_VARIABLE = "HORSIES_TEST_BUILD_GATE"

# The number of schedules and their interval; sending ten thousand tasks takes seconds.
MANY = int(os.environ.get("HORSIES_TEST_SCHEDULES", "300"))
MANY_SECONDS = 2 if MANY <= 1_000 else 30


def every(seconds: int, name: str, **fields: Any) -> dict[str, Any]:
    """Return a schedule as JSON; it sends a no-op task at this interval and catches up on missed slots."""
    defaults = {"name": name, "task_name": "noop", "catch_up_missed": True}
    return defaults | {"pattern": {"type": "interval", "seconds": seconds}} | fields


def config_of(*schedules: Mapping[str, Any], interval: int = 1) -> dict[str, Any]:
    """Return the configuration of an application with these schedules."""
    return {
        "schedule": {"schedules": list(schedules), "check_interval_seconds": interval},
        "resilience": {"db_retry_initial_ms": 100, "db_retry_max_ms": 500},
    }


def start_scheduler(
    fleet: Fleet,
    config: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    ready: bool = True,
) -> RunningWorker:
    """Start a scheduler as one of the fleet's processes, so that the fleet shows its log and ends it."""
    command = [sys.executable, "-m", "horsies", "scheduler", APPLICATION]
    scheduler = fleet.launch(
        "scheduler", command, fleet.environment(config=config) | dict(environment or {})
    )
    if ready:
        wait_until_serving(scheduler)
    return scheduler


def wait_until_serving(scheduler: RunningWorker, seconds: float = 60.0) -> None:
    """Wait until the scheduler serves its schedules."""
    scheduler.wait_until_ready("scheduler_ready", seconds)


@dataclass(frozen=True)
class Sent:
    """A task of a schedule."""

    schedule_name: str
    slot: datetime
    created_at: datetime
    status: str


def sent(connection: Database, name: str | None = None) -> list[Sent]:
    """Return the tasks that schedules have sent, by schedule and slot."""
    rows = connection.execute(
        "SELECT schedule_name, scheduled_for, created_at, status FROM horsies_tasks "
        "WHERE scheduled_for IS NOT NULL AND (%(name)s::text IS NULL OR schedule_name = %(name)s) "
        "ORDER BY schedule_name, scheduled_for, id",
        {"name": name},
    )
    return [Sent(row[0], row[1].astimezone(UTC), row[2], row[3]) for row in rows]


def slots(connection: Database, name: str) -> list[datetime]:
    """Return the slots of one schedule for which a task exists."""
    return [one.slot for one in sent(connection, name)]


def enter(connection: Database, app: Horsies, config: Mapping[str, Any]) -> dict[str, datetime]:
    """Store the schedules as the first scheduler would; return the first slot of each schedule."""
    settings = AppConfig(broker=app.config.broker, schedule=config["schedule"])
    registry = Registry.of(settings, app.definitions(), APPLICATION, app)
    run_script(connection, store_configured(registry, at_start=True))
    return next_slots(connection)


def next_slots(connection: Database) -> dict[str, datetime]:
    """Return the next slot of every stored schedule."""
    rows = connection.execute("SELECT schedule_name, next_run_at FROM horsies_schedule_state")
    return {name: moment.astimezone(UTC) for name, moment in rows}


def check_books(
    connection: Database, first: Mapping[str, datetime], seconds: Mapping[str, int]
) -> int:
    """Check that every slot from the first to the next stored slot has one task; return the number of
    slots.
    """
    following = next_slots(connection)
    counts = dict(
        connection.execute("SELECT schedule_name, run_count FROM horsies_schedule_state").fetchall()
    )
    total = 0
    for name, start in first.items():
        step = timedelta(seconds=seconds[name])
        number = round((following[name] - start) / step)
        assert slots(connection, name) == [start + place * step for place in range(number)], name
        assert counts[name] == number, name
        total += number
    for one in sent(connection):
        assert one.created_at >= one.slot, "sent before its time"
    return total
