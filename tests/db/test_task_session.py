"""The session of a task's transaction, which one task after the other uses."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from horsies.db.own_statements import OwnStatements
from horsies.db.task_transaction import SessionConnection, TaskSession

LOCK = 77
SERIALIZABLE = "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"


@pytest.fixture
def shared(migrated_url: str) -> Iterator[SessionConnection]:
    with SessionConnection.connect(migrated_url, autocommit=True) as shared:
        shared.own = OwnStatements(shared, prepared=True)
        yield shared


def begun(shared: SessionConnection) -> TaskSession:
    session = TaskSession(shared, "0198a1b2-0000-7000-8000-0123456789ab/1")
    session.begin()
    return session


def is_locked(url: str) -> bool:
    with psycopg.connect(url) as other:
        row = other.execute("SELECT NOT pg_try_advisory_xact_lock(%s)", (LOCK,)).fetchone()
    return row == (True,)


def test_a_lock_of_the_session_ends_when_the_next_task_begins(
    shared: SessionConnection, migrated_url: str
) -> None:
    for _ in range(3):
        session = begun(shared)
        assert not is_locked(migrated_url)
        session.lent.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        session.give_up()
        assert is_locked(migrated_url)


def test_every_task_of_a_session_can_choose_its_isolation_level(shared: SessionConnection) -> None:
    for _ in range(2):
        session = begun(shared)
        session.lent.execute(SERIALIZABLE)  # refused once the transaction has a snapshot
        session.give_up()
