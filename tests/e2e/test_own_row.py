"""A worker whose own row cannot be changed: its tasks continue, and its heartbeats return by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psycopg
import pytest

from tests.support.database import Database
from tests.support.poison import poisoned
from tests.support.wait import wait_until
from tests.support.workers import Fleet

SEEN_AT = "SELECT seen_at FROM horsies_workers"


def status(connection: Database, task_id: str) -> str:
    ((found,),) = connection.execute(
        "SELECT status FROM horsies_tasks WHERE id = %s", (task_id,)
    ).fetchall()
    return str(found)


@contextmanager
def hindered(kind: str, url: str, connection: Database) -> Iterator[None]:
    """Refuse every change of the rows of workers: by a lock of an operator's session, or by a trigger."""
    if kind == "trigger":
        with poisoned(connection, "true", table="horsies_workers"):
            yield
        return
    with psycopg.connect(url) as operator:
        operator.execute(
            "LOCK TABLE horsies_workers"
            if kind == "table"
            else "SELECT 1 FROM horsies_workers FOR UPDATE"
        )
        yield
        operator.rollback()


@pytest.mark.parametrize("kind", ["row", "table", "trigger"])
def test_a_worker_whose_own_row_cannot_be_changed_goes_on_with_its_tasks(
    fleet: Fleet, programs: ModuleType, connection: Database, kind: str
) -> None:
    worker = fleet.start(processes=1)
    assert programs.sleep.send(0).unwrap().get(timeout_ms=30_000).is_ok()
    with hindered(kind, fleet.database_url, connection):
        worker.wait_for("heartbeat_refused")
        for _ in range(20):
            assert programs.sleep.send(0.1).unwrap().get(timeout_ms=20_000).is_ok()
    (before,) = connection.execute(SEEN_AT).fetchall()
    wait_until(lambda: connection.execute(SEEN_AT).fetchall() > [before])
    assert programs.sleep.send(0).unwrap().get(timeout_ms=30_000).is_ok()
    assert len(worker.events("heartbeat_refused")) == 1
    assert "database_lost" not in {event["event"] for event in worker.events()}


def test_a_worker_whose_heartbeats_are_refused_notices_that_it_was_declared_lost(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(processes=1)
    running = programs.sleep.send(120).unwrap()
    wait_until(lambda: status(connection, running.task_id) == "RUNNING")
    with poisoned(connection, "NEW.seen_at <> OLD.seen_at", table="horsies_workers"):
        worker.wait_for("heartbeat_refused")
        connection.execute("UPDATE horsies_workers SET stopped_at = now(), was_lost = true")
        worker.wait_for("worker_declared_lost")
        waiting = programs.sleep.send(0).unwrap()
        refused = len(worker.events("database_lost"))
        wait_until(lambda: len(worker.events("database_lost")) > refused)
        assert status(connection, waiting.task_id) == "PENDING", "it must register first"
    assert waiting.get(timeout_ms=30_000).is_ok()
    assert running.get(timeout_ms=30_000).is_err(), "its child was killed"
    assert len(worker.events("worker_declared_lost")) == 1
    assert connection.execute(
        "SELECT stopped_at IS NULL AND NOT was_lost FROM horsies_workers"
    ).fetchall() == [(True,)]
