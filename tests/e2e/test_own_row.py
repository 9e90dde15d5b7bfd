"""A worker whose own row cannot be changed: its tasks go on, and its heartbeats return by themselves."""

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
