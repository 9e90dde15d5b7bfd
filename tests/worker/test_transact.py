"""Decisions about the transaction of an attempt, without a database."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from horsies.errors import TransactionMisuse
from horsies.tasks.transaction import TaskTransaction
from horsies.worker.child.transact import AttemptRecord, AttemptTransaction

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


def test_an_unused_transaction_has_no_parts_and_no_cycle() -> None:
    """Otherwise each task that declares a transaction would leave garbage for the collector."""
    transaction = AttemptTransaction(NOTHING, NOTHING, NOTHING)
    given = TaskTransaction(1, 1, transaction)
    alive = weakref.ref(given)
    gc.disable()
    try:
        assert not transaction.is_open
        assert transaction.recorded() is None
        transaction.close()
        del given
        assert alive() is None
    finally:
        gc.enable()


def test_a_thread_that_comes_too_late_gets_no_connection() -> None:
    transactions = cast(Any, SimpleNamespace(lock=threading.Lock(), pool=None))
    transaction = AttemptTransaction(transactions, NOTHING, NOTHING)
    given = TaskTransaction(1, 1, transaction)
    transaction.close()
    with pytest.raises(TransactionMisuse, match="has ended"):
        _ = given.connection
    with pytest.raises(TransactionMisuse, match="has ended"):
        given.record_in(object(), None)
