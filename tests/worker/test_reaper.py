"""The reaper: deletion and recovery of ended tasks, and of tasks without the name of a worker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    HorsiesError,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    TaskError,
    TaskResult,
)
from horsies.db.pipeline import Pipeline
from horsies.tasks.blocked import Blocked
from horsies.tasks.recovery import recover_stale
from horsies.worker.reaper import recover_ownerless, sweep
from tests.support.database import Database
from tests.support.rows import add_task, ago, attempts_of, row_of, stored_ids


def add_ownerless(connection: Connection[Any], status: str, age: float, **columns: Any) -> str:
    """A task that an operator set to this status without the name of a worker."""
    values = {"status": status, "claimed": status == "CLAIMED", "updated_at": ago(age), **columns}
    return add_task(connection, **values)


def statuses(connection: Connection[Any], ids: list[str]) -> list[str]:
    return [row_of(connection, task_id)["status"] for task_id in ids]


def test_tasks_without_the_name_of_a_worker_are_recovered_after_their_threshold(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    recovered = [
        add_ownerless(connection, "CLAIMED", 200),
        add_ownerless(connection, "CLAIMED", 200, claimed_at=ago(200)),
        add_ownerless(connection, "RUNNING", 400, started_at=ago(400)),
        add_ownerless(connection, "RUNNING", 400),
    ]
    kept = [
        add_ownerless(connection, "CLAIMED", 100),
        add_ownerless(connection, "CLAIMED", 900, claimed_at=ago(100)),
        add_ownerless(connection, "RUNNING", 200),
    ]
    assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == 4
    assert statuses(connection, recovered) == ["PENDING", "PENDING", "FAILED", "FAILED"]
    assert statuses(connection, kept) == ["CLAIMED", "CLAIMED", "RUNNING"]
    assert row_of(connection, recovered[0])["claimed"] is False
    assert row_of(connection, recovered[2])["error_code"] == "WORKER_CRASHED"
    assert [attempt["outcome"] for attempt in attempts_of(connection, recovered[2])] == [
        "WORKER_FAILURE"
    ]


def test_an_operator_can_recover_tasks_without_the_name_of_a_worker(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    ids = [add_ownerless(connection, status, 400) for status in ("RUNNING", "RUNNING", "CLAIMED")]
    assert recover_stale(pipeline, 300, "RUNNING") == 2
    assert recover_stale(pipeline, 300, "CLAIMED") == 1
    assert statuses(connection, ids) == ["FAILED", "FAILED", "PENDING"]


def test_retention_deletes_ended_tasks_whose_ids_have_no_time(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    def add_ended(hours: float, **columns: Any) -> str:
        values = {"status": "COMPLETED", "completed_at": ago(hours * 3_600), **columns}
        return add_task(connection, id=str(uuid4()), **values)

    for _ in range(20):
        add_ended(25)
    add_ended(0, status="FAILED", completed_at=None, failed_at=ago(90_000))
    add_ended(0, status="EXPIRED", completed_at=None, updated_at=ago(90_000))
    kept = {
        add_ended(23),
        add_ended(25, workflow_id=str(uuid4())),
        add_ended(25, status="PENDING", completed_at=None, updated_at=ago(90_000)),
    }
    sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=24))
    left = {row[0] for row in connection.execute("SELECT id::text FROM horsies_tasks").fetchall()}
    assert left == kept


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
