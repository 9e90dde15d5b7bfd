"""Result waiters and the end of their connection in the middle of a look."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.tasks import OutcomeRow
from horsies.waiters import Waiters
from tests.db.rows import add_task
from tests.waiting import wait_until

POLL_NEVER = 600.0


@pytest.fixture
def waiters(process_url: str, connection: Connection[Any]) -> Iterator[Waiters]:
    """Waiters that live on notifications alone."""

    def connect() -> Connection[Any]:
        return psycopg.connect(process_url, autocommit=True, application_name="test:waiters")

    waiters = Waiters(connect, poll_seconds=POLL_NEVER)
    yield waiters
    waiters.close()


def is_waiting_for_a_lock(connection: Connection[Any]) -> bool:
    found = connection.execute(
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'test:waiters' "
        "AND wait_event_type = 'Lock' AND datname = current_database()"
    )
    return found.fetchone() is not None


def status(future: Future[OutcomeRow | None]) -> str:
    row = future.result(10)
    assert row is not None
    return row.status


def test_a_connection_cut_in_the_middle_of_a_look_costs_that_look_only(
    connection: Connection[Any], process_url: str, waiters: Waiters
) -> None:
    known, fresh = add_task(connection), add_task(connection)
    waiters.watch(known, once=True).result(10)
    patient = waiters.watch(known)
    waiters.watch(known, once=True).result(10)  # now the patient one has been looked at too
    with psycopg.connect(process_url) as locker:
        locker.execute("LOCK TABLE horsies_tasks")
        unlucky = waiters.watch(fresh)
        wait_until(lambda: is_waiting_for_a_lock(connection))
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name = 'test:waiters' AND datname = current_database()"
        )
        with pytest.raises(psycopg.OperationalError):
            unlucky.result(10)
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")
    assert status(patient) == "COMPLETED", "it outlasts the cut"
    assert status(waiters.watch(fresh)) == "COMPLETED", "and the next look works"
