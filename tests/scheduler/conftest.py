"""Fixtures: an application with schedules on the test database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig, CustomQueueConfig, QueueMode
from horsies.config.postgres import PostgresConfig
from horsies.config.schedules import AnySchedule, ScheduleConfig
from tests.support.database import Database
from tests.support.scheduling import MakeApp, define_tasks, define_workflows


@pytest.fixture
def make_app(process_url: str, connection: Database) -> Iterator[MakeApp]:
    """Make an application with these schedules and a few tasks, closed after the test."""
    made: list[Horsies] = []

    def make(*schedules: AnySchedule, **config: Any) -> Horsies:
        usual = PostgresConfig(database_url=process_url, pool_size=1, max_overflow=4)
        app = Horsies(
            AppConfig(
                broker=config.pop("broker", usual),
                schedule=ScheduleConfig(schedules=list(schedules)),
                queue_mode=QueueMode.CUSTOM,
                custom_queues=[
                    CustomQueueConfig(name="plain", priority=50),
                    CustomQueueConfig(name="fast", priority=3),
                ],
                **config,
            )
        )
        define_tasks(app)
        define_workflows(app)
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()
