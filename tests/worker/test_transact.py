"""Decisions about the transaction of an attempt, without a database."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest

from horsies.worker.child.transact import AttemptRecord

NOTHING = cast(Any, None)


@pytest.mark.parametrize(
    ("error", "was_lost"),
    [
        (psycopg.OperationalError("server closed the connection unexpectedly"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (psycopg.errors.AdminShutdown("terminating connection"), True),
        (psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"), False),
        (psycopg.errors.QueryCanceled("canceling statement due to statement timeout"), False),
    ],
)
def test_a_time_limit_in_record_in_is_no_lost_session(error: psycopg.Error, was_lost: bool) -> None:
    record = AttemptRecord(NOTHING, NOTHING, NOTHING)
    assert record.misuse(error) is error
    assert record.was_lost == was_lost
