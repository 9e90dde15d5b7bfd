"""The number of connections of a worker does not depend on the number of its children."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.rows import insert_raw
from tests.support.tables import count, held_connections
from tests.support.wait import wait_until
from tests.support.workers import FORKSERVER, Fleet

OPEN = ("PENDING", "RUNNING")
SESSIONS = """
SELECT application_name, state, now() - backend_start AS age, now() - xact_start AS in_transaction, query
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'horsies:%'
"""


def wait_until_all_are_closed(fleet: Fleet, connection: Database) -> None:
    """Wait until the server has ended the sessions of connections that were closed.

    A client does not wait for that: right after `close`, 54 of 60 applications still had a session.
    """
    wait_until(
        lambda: held_connections(fleet, connection, "horsies:") == 0,
        what=lambda: f"the end of {connection.execute(SESSIONS).fetchall()}",
    )


def test_sixteen_children_share_at_most_four_connections(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    programs.app.close()  # this test sends by SQL, so that every connection is the worker's
    wait_until_all_are_closed(fleet, connection)
    worker = fleet.start(*FORKSERVER, processes=16)
    assert len(worker.family()) >= 16
    for _ in range(200):
        insert_raw(connection, "sleep", "[0.02]")
    most = 0
    while count(connection, *OPEN):
        most = max(most, held_connections(fleet, connection, "horsies:"))
    print(f"at most {most} connections with 16 children")
    assert 1 <= most <= 4
    assert held_connections(fleet, connection, "horsies:") <= 4
    assert worker.stop() == 0
    wait_until_all_are_closed(fleet, connection)


@pytest.mark.pooled
def test_a_child_that_sends_gives_its_connections_back_when_it_leaves(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    programs.app.close()
    wait_until_all_are_closed(fleet, connection)
    worker = fleet.start(processes=2)
    for _ in range(10):
        insert_raw(connection, "send_another", "[1, 2]")
    while count(connection, *OPEN):
        assert held_connections(fleet, connection, "horsies:") <= 2 + 2 * 2
    assert count(connection, "COMPLETED") == 20
    assert worker.stop() == 0
    wait_until_all_are_closed(fleet, connection)
