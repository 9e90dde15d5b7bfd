"""Tasks that try to get an effect twice, or an effect without a completed task."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, task, wait_for_status
from tests.support.transactions import bookings
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker

WORKER = {"application": "tests.support.apps.reckless:app", "processes": 1}
NOT_COMMITTED = "TRANSACTION_NOT_COMMITTED"
IS_OVER = "The task of this transaction has ended"


@pytest.fixture
def reckless(booking: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.reckless")


def book_next(booking: ModuleType, number: int) -> None:
    """The session serves the next task."""
    assert booking.optional.send(number).unwrap().get(30_000).ok_value == number


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_thread_writes_nothing_after_the_end_of_its_task(
    worker: RunningWorker,
    reckless: ModuleType,
    booking: ModuleType,
    effects: Database,
    journal: Journal,
    how: str,
) -> None:
    sent = reckless.write_later.send(1, f"late {how}", how).unwrap()
    assert sent.get(30_000).is_ok() is (how == "return")
    # The next task of the child has the same session.
    following = booking.book_and_rest.send(7, f"next {how}").unwrap()
    wait_until(lambda: journal.lines(f"next {how}"))
    journal.release(f"late {how}")
    (line,) = wait_until(lambda: journal.lines(f"late {how} wrote"))
    journal.release(f"next {how}")
    assert following.get(30_000).ok_value == 7
    assert IS_OVER in line.label
    assert bookings(effects) == ([1, 7] if how == "return" else [7])


def test_a_thread_inside_a_statement_keeps_the_transaction_from_its_commit(
    worker: RunningWorker, reckless: ModuleType, booking: ModuleType, effects: Database
) -> None:
    error = reckless.return_beside_a_thread.send(1).unwrap().get(30_000).err_value
    assert error.error_code == NOT_COMMITTED
    assert "a statement of another thread runs in it" in (error.message or "")
    book_next(booking, 2)
    assert bookings(effects) == [2]


@pytest.mark.parametrize("how", ["return", "raise", "write", "multiprocessing"])
def test_a_forked_process_has_no_part_in_the_transaction(
    worker: RunningWorker,
    reckless: ModuleType,
    booking: ModuleType,
    effects: Database,
    journal: Journal,
    how: str,
) -> None:
    sent = reckless.fork.send(1, how).unwrap()
    assert sent.get(30_000).ok_value == 1
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]
    if how in ("write", "multiprocessing"):
        (line,) = journal.lines("forked wrote")
        assert "a forked process" in line.label
    book_next(booking, 5)
    assert bookings(effects) == [1, 5]


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        "-- now\n /* done */ commit work",
        "END",
        "abort",
        "ROLLBACK",
        "ROLLBACK AND CHAIN",
        "PREPARE TRANSACTION 'mine'",
        "deallocate prepare all",
        "composed",
        "cursor",
    ],
)
def test_a_statement_that_ends_the_transaction_is_refused(
    worker: RunningWorker,
    reckless: ModuleType,
    booking: ModuleType,
    effects: Database,
    statement: str,
) -> None:
    error = reckless.meddle.send(1, statement).unwrap().get(30_000).err_value
    assert error.error_code == NOT_COMMITTED
    assert "is refused on tx.connection" in (error.message or "")
    book_next(booking, 2)
    assert bookings(effects) == [2]


def test_savepoints_undo_a_part(
    worker: RunningWorker, reckless: ModuleType, effects: Database
) -> None:
    assert reckless.meddle.send(1, "savepoint").unwrap().get(30_000).ok_value == 1
    assert bookings(effects) == [1]


@pytest.mark.parametrize("name", ["prepare_and_roll_back", "prepare_and_roll_back_async"])
def test_statements_of_the_library_outlive_those_that_psycopg_deallocates(
    worker: RunningWorker, reckless: ModuleType, effects: Database, name: str
) -> None:
    for number in (1, 2, 3):
        sent = getattr(reckless, name).send(number).unwrap()
        assert sent.get(30_000).ok_value == number
    assert bookings(effects) == [1, 2, 3]


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("open block", NOT_COMMITTED, "transaction():` block is still open"),
        ("raise at exit", "UNHANDLED_EXCEPTION", "at exit"),
        ("raise inside the connection", NOT_COMMITTED, "close() is refused"),
        ("close the socket", "TRANSACTION_LOST", "did not commit"),
        ("finish", "TRANSACTION_LOST", "was lost"),
        ("SET TRANSACTION READ ONLY", "UNHANDLED_EXCEPTION", "read-only transaction"),
        ("SET session_replication_role = replica", NOT_COMMITTED, "session_replication_role"),
        ("SET client_encoding = 'LATIN1'", None, ""),
        ("SET search_path = nowhere", None, ""),
        ("SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'iso_8601'", None, ""),
        ("SET standard_conforming_strings = off", None, ""),
        ("SET array_nulls = off", None, ""),
        ("SET LOCAL ROLE pg_monitor", None, ""),
        ("SET ROLE pg_monitor", None, ""),
        ("SET LOCAL statement_timeout = 1", "UNHANDLED_EXCEPTION", "did not commit"),
        ("SET plan_cache_mode = force_custom_plan", None, ""),
        ("SET enable_indexscan = off; SET enable_seqscan = off", None, ""),
        ("SET default_transaction_isolation = 'serializable'", None, ""),
        ("CREATE TEMP TABLE horsies_tasks (id integer)", None, ""),
        ("SET CONSTRAINTS ALL IMMEDIATE", None, ""),
        ("copy", None, ""),
        ("executemany", NOT_COMMITTED, "COMMIT is refused on tx.connection"),
        ("stream", NOT_COMMITTED, "COMMIT is refused on tx.connection"),
    ],
)
def test_a_task_that_meddles_with_its_session_commits_everything_or_nothing(
    worker: RunningWorker,
    reckless: ModuleType,
    booking: ModuleType,
    effects: Database,
    how: str,
    code: str | None,
    sentence: str,
) -> None:
    result = reckless.meddle.send(1, how).unwrap().get(30_000)
    if code is not None:
        assert result.err_value.error_code == code
        assert sentence in (result.err_value.message or "")
    assert result.is_ok() is (code is None)
    book_next(booking, 2)
    assert bookings(effects) == ([1, 2] if code is None else [2])


@pytest.mark.parametrize("name", ["return_unstorable", "return_unstorable_async"])
def test_a_result_that_cannot_be_stored_rolls_back(
    worker: RunningWorker, reckless: ModuleType, booking: ModuleType, effects: Database, name: str
) -> None:
    sent = getattr(reckless, name).send(1).unwrap()
    error = sent.get(30_000).err_value
    assert error.error_code == "WORKER_SERIALIZATION_ERROR"
    assert "cannot be stored" in (error.message or "")
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["FAILED"]
    book_next(booking, 2)
    assert bookings(effects) == [2]


def test_a_commit_below_psycopg_is_found(
    worker: RunningWorker, reckless: ModuleType, effects: Database
) -> None:
    error = reckless.meddle.send(1, "raw commit").unwrap().get(30_000).err_value
    assert error.error_code == NOT_COMMITTED
    assert bookings(effects) == [1]


def test_session_characteristics_of_one_task_do_not_reach_the_next(
    worker: RunningWorker, reckless: ModuleType, booking: ModuleType, effects: Database
) -> None:
    statement = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
    assert reckless.meddle.send(1, statement).unwrap().get(30_000).ok_value == 1
    book_next(booking, 2)
    assert bookings(effects) == [1, 2]


@pytest.mark.parametrize("how", ["session", "connection"])
def test_record_in_refuses_a_savepoint(
    worker: RunningWorker, reckless: ModuleType, effects: Database, how: str
) -> None:
    error = reckless.record_in_savepoint.send(1, how).unwrap().get(30_000).err_value
    assert error.error_code == NOT_COMMITTED
    assert "savepoint" in (error.message or "")
    assert bookings(effects) == []


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_coroutine_writes_nothing_after_the_end_of_its_task(
    worker: RunningWorker,
    reckless: ModuleType,
    booking: ModuleType,
    effects: Database,
    journal: Journal,
    how: str,
) -> None:
    sent = reckless.write_later_async.send(1, how).unwrap()
    assert sent.get(30_000).is_ok() is (how == "return")
    # The loop goes on with the next coroutine, which has the same session.
    assert booking.misuse_async.send(7, "SELECT pg_sleep(0.02)").unwrap().get(30_000).ok_value == 7
    (line,) = wait_until(lambda: journal.lines("coroutine wrote"))
    assert IS_OVER in line.label
    assert bookings(effects) == ([1, 7] if how == "return" else [7])


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_coroutine_that_cancels_its_own_commit_has_effects_only_if_it_is_completed(
    worker: RunningWorker, reckless: ModuleType, effects: Database, steps: int
) -> None:
    sent = reckless.cancel_own_commit.send(1, steps).unwrap()
    result = sent.get(30_000)
    row = wait_for_status(effects, sent.task_id, "COMPLETED" if result.is_ok() else "FAILED")
    assert bookings(effects) == ([1] if row.status == "COMPLETED" else [])
    assert len(attempts(effects, sent.task_id)) == 1
    assert f"outcome of task {sent.task_id} dropped" not in worker.log()
    assert task(effects, sent.task_id).status == row.status


@pytest.mark.direct("a pooler gives each transaction another session")
@pytest.mark.parametrize("name", ["leave_behind", "leave_behind_async"])
def test_a_task_finds_nothing_that_the_one_before_has_left_in_its_session(
    worker: RunningWorker, reckless: ModuleType, effects: Database, name: str
) -> None:
    first, second = (getattr(reckless, name).send().unwrap().get(30_000).ok_value for _ in range(2))
    assert first["pid"] == second.pop("pid"), "the tasks had different sessions"
    assert second == dict.fromkeys(second, 0)
