"""Habits of users of other task queues: each test is one of them, and works here as they expect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    HorsiesError,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
)
from horsies.db.pipeline import Pipeline
from horsies.task_result import TaskError, TaskResult
from horsies.worker.reaper import sweep
from tests.support.database import Database
from tests.support.rows import stored_ids

QUEUES = [CustomQueueConfig(name=name) for name in ("mail", "audit", "reports")]
RETENTION: dict[str, timedelta | None] = {"mail": timedelta(hours=6), "audit": None}


def custom_app(url: str, **recovery: Any) -> Horsies:
    config = AppConfig(
        broker=PostgresConfig(database_url=url, pool_size=1, max_overflow=1),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=QUEUES,
        recovery=RecoveryConfig(**recovery),
    )
    return Horsies(config)


@pytest.mark.parametrize(
    ("queue", "options", "ended_hours_ago", "is_kept"),
    [
        ("mail", {}, 5, True),
        ("mail", {}, 7, False),
        ("audit", {}, 100_000, True),
        ("reports", {}, 700, True),
        ("reports", {}, 740, False),
        ("reports", {"retention": timedelta(minutes=1)}, 1, False),
        ("mail", {"retention": timedelta(days=90)}, 1_000, True),
    ],
)
def test_a_queue_and_a_send_have_a_retention_of_their_own(
    connection: Database,
    process_url: str,
    queue: str,
    options: Any,
    ended_hours_ago: int,
    is_kept: bool,
) -> None:
    app = custom_app(process_url, queue_retention=RETENTION)

    @app.task("work", queue_name=queue)
    def work() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    work.with_options(**options).send().unwrap()
    work.with_options(**options).send_many([work.bind()]).unwrap()
    app.close()
    connection.execute(
        "UPDATE horsies_tasks SET status = 'COMPLETED', completed_at = now() - %s, "
        # As if it had been sent then: retention finds tasks by the time in their ids.
        "id = overlay(id::text placing '000000000000' from 1 for 13)::uuid",
        (timedelta(hours=ended_hours_ago),),
    )
    with psycopg.connect(process_url, autocommit=True) as mine:
        sweep(Pipeline(mine), app.config.recovery)
    assert len(stored_ids(connection)) == (2 if is_kept else 0)


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        ({"nothing": timedelta(hours=1)}, "queue_retention names 'nothing', which is not a queue"),
        ({"mail": timedelta(0)}, "queue_retention['mail'] must be from one second"),
    ],
)
def test_a_retention_that_cannot_apply_is_refused(
    process_url: str, retention: Any, message: str
) -> None:
    with pytest.raises(HorsiesError, match=message.replace("[", r"\[").replace("]", r"\]")):
        custom_app(process_url, queue_retention=retention)
