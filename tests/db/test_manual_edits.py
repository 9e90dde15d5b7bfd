"""Rows that were written or changed by hand are recovered and deleted like any others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection

from horsies import RecoveryConfig
from horsies.db.pipeline import Pipeline
from horsies.tasks.blocked import Blocked
from horsies.tasks.recovery import fail_stale, requeue_stale
from horsies.worker.reaper import recover_ownerless, sweep
from tests.support.rows import add_task, ago, attempts_of, row_of


@pytest.fixture
def pipeline(connection: Connection[Any], process_url: str) -> Iterator[Pipeline]:
    """A reaper's connection."""
    with psycopg.connect(process_url, autocommit=True) as mine:
        yield Pipeline(mine)


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
    assert fail_stale(pipeline, 300) == 2
    assert requeue_stale(pipeline, 300) == 1
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
