"""`tx` of coroutines: in an async child, several at a time, and in a child that runs one task at a time."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.database import Database, backends
from tests.support.tables import attempts, wait_for_status, wait_until_empty
from tests.support.transactions import (
    APPLICATION,
    TX_ROLE,
    assert_effects_match,
    assert_map_books,
    bookings,
)
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker

WORKER = {"application": APPLICATION, "processes": 1}
OPTIONS = ("--async-children", "1", "--async-slots", "8")


@pytest.mark.pooled
def test_coroutines_commit_their_effects_with_their_outcomes(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    calls = [booking.book_async.bind(number, 0.01) for number in range(20)]
    handles = booking.book_async.send_many(calls).unwrap()
    assert [one.get(30_000).ok_value for one in handles] == list(range(20))
    assert bookings(effects) == list(range(20))
    wait_until_empty(effects)
    assert_effects_match(effects, "book_async")
    assert {one.outcome for one in attempts(effects)} == {"COMPLETED"}
    assert len(backends(effects, TX_ROLE)) <= 4
    log = worker.log()  # other tests share the worker
    assert [one.task_id for one in handles if f"{one.task_id} dropped" in log] == []


@pytest.mark.pooled
def test_nodes_of_one_run_commit_beside_each_other_in_an_async_child(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    """Each of them locks the run before it records its outcome."""
    assert_map_books(booking, effects, "book_next_async", 12)
    assert {one.outcome for one in attempts(effects)} == {"COMPLETED"}


def test_a_coroutine_that_does_not_use_its_transaction_opens_no_connection(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    before = set(backends(effects, TX_ROLE))
    assert booking.unused_async.send(4).unwrap().get(30_000).ok_value == 4
    assert set(backends(effects, TX_ROLE)) <= before


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("raise", "UNHANDLED_EXCEPTION"),
        ("commit", "TRANSACTION_NOT_COMMITTED"),
        ("ROLLBACK", "TRANSACTION_NOT_COMMITTED"),
        ("SELECT 1 / 0", "UNHANDLED_EXCEPTION"),
    ],
)
def test_a_coroutine_that_fails_writes_nothing(
    worker: RunningWorker, booking: ModuleType, effects: Database, how: str, code: str
) -> None:
    error = booking.misuse_async.send(5, how).unwrap().get(30_000).err_value
    assert error.error_code == code
    assert bookings(effects) == []
    assert booking.book_async.send(6, 0.0).unwrap().get(30_000).ok_value == 6
    assert bookings(effects) == [6]


def test_a_cancelled_coroutine_is_rolled_back(
    worker: RunningWorker, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    sent = booking.misuse_async.send(1, "sleep").unwrap()
    wait_until(lambda: journal.lines("sleeping"))
    sent.cancel().unwrap()
    wait_for_status(effects, sent.task_id, "CANCELLED")
    assert bookings(effects) == []


@pytest.mark.parametrize("how", ["commit", "raise after"])
def test_the_outcome_commits_with_an_async_session(
    worker: RunningWorker, booking: ModuleType, effects: Database, how: str
) -> None:
    sent = booking.book_in_async_session.send(1, how).unwrap()
    assert sent.get(30_000).ok_value == 1
    assert bookings(effects) == [1]
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("roll back", "TRANSACTION_NOT_COMMITTED", "rolled back or is still open"),
        ("forget", "TRANSACTION_NOT_COMMITTED", "rolled back or is still open"),
        ("raise", "UNHANDLED_EXCEPTION", "before the commit"),
        ("commit before", "TRANSACTION_NOT_COMMITTED", "no open transaction"),
    ],
)
def test_an_async_session_that_does_not_commit_the_outcome_fails_the_task(
    worker: RunningWorker,
    booking: ModuleType,
    effects: Database,
    how: str,
    code: str,
    sentence: str,
) -> None:
    error = booking.book_in_async_session.send(2, how).unwrap().get(30_000).err_value
    assert error.error_code == code
    assert sentence in (error.message or "")
    assert bookings(effects) == ([2] if how == "commit before" else [])
