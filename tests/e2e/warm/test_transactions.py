"""What a task writes through `tx` commits with its outcome, or not at all."""

from __future__ import annotations

from types import ModuleType

import psycopg
import pytest

from horsies import TaskStatus, from_node
from tests.support.database import Database, backends
from tests.support.explained import Doors, codes, the
from tests.support.tables import attempts, task, tasks, wait_for_status, wait_until_empty
from tests.support.transactions import (
    APPLICATION,
    TX_ROLE,
    assert_map_books,
    bookings,
    closed_gate,
    open_gate,
    waits_at_gate,
    waits_for_row,
)
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker

WORKER = {"application": APPLICATION, "processes": 1}
ENDED_IT = "the task has ended it"


@pytest.mark.pooled
def test_effects_sends_outcome_and_attempt_commit_together(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    sent = booking.book.send(7, 0.0).unwrap()
    assert sent.get(30_000).ok_value == 7
    assert bookings(effects) == [7]
    row, (attempt,) = task(effects, sent.task_id), attempts(effects, sent.task_id)
    assert (row.status, row.result) == ("COMPLETED", '{"ok":7}')
    assert (attempt.outcome, attempt.attempt) == ("COMPLETED", 1)
    assert attempt.worker_id == row.claimed_by_worker_id
    assert row.started_at <= row.completed_at
    (receipt,) = [one for one in tasks(effects) if one.id != sent.task_id]
    assert wait_for_status(effects, receipt.id, "COMPLETED").result == '{"ok":7}'
    assert f"{sent.task_id} dropped" not in worker.log()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("raise", "UNHANDLED_EXCEPTION"),
        ("refuse", "REFUSED"),
        ("return", "RETURNED"),
    ],
)
def test_a_failure_rolls_back_and_is_recorded_alone(
    worker: RunningWorker, booking: ModuleType, effects: Database, how: str, code: str
) -> None:
    sent = booking.fail_after_booking.send(1, how).unwrap()
    assert sent.get(30_000).err_value.error_code == code
    assert bookings(effects) == []
    (attempt,) = attempts(effects, sent.task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", code)


@pytest.mark.parametrize("how", ["return", "raise"])
@pytest.mark.parametrize("name", ["book_and_start", "book_and_start_async"])
def test_a_run_starts_with_the_commit_of_its_task_or_not_at_all(
    worker: RunningWorker, booking: ModuleType, effects: Database, name: str, how: str
) -> None:
    sent = getattr(booking, name).send(1, how).unwrap()
    assert sent.get(30_000).is_ok() is (how == "return")
    wait_until_empty(effects)
    statuses = effects.execute("SELECT status FROM horsies_workflows").fetchall()
    assert (bookings(effects), statuses) == (
        ([1], [("COMPLETED",)]) if how == "return" else ([], [])
    )


@pytest.mark.parametrize("name", ["tell_token", "tell_token_async"])
def test_the_fencing_token_rises_with_every_attempt(
    worker: RunningWorker, booking: ModuleType, effects: Database, journal: Journal, name: str
) -> None:
    sent = getattr(booking, name).send(3).unwrap()
    assert sent.get(30_000).is_ok()
    lines = journal.lines("token", sent.task_id)
    assert [one.attempt for one in lines] == [1, 2, 3]
    tokens = [int(one.label) for one in lines]
    assert tokens == sorted(set(tokens))


def test_a_transaction_that_is_not_used_opens_no_connection(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    before = set(backends(effects, TX_ROLE))
    sent = booking.unused.send(4).unwrap()
    assert sent.get(30_000).ok_value == 4
    assert set(backends(effects, TX_ROLE)) <= before
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]


def test_the_parameter_may_be_optional(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    assert booking.optional.send(3).unwrap().get(30_000).ok_value == 3
    assert bookings(effects) == [3]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("commit", "commit() is refused on tx.connection"),
        ("rollback", "rollback() is refused on tx.connection"),
        ("close", "close() is refused on tx.connection"),
        ("with", "commit() is refused on tx.connection"),
        ("autocommit", "tx.connection has no autocommit"),
        ("two-phase", "tx.connection has no two-phase commit"),
        ("pipeline", "it is in pipeline mode"),
        ("swallow", "a statement in it failed"),
        ("ROLLBACK", "ROLLBACK is refused on tx.connection"),
        ("SELECT 1; ROLLBACK", ENDED_IT),
        ("SELECT 1; ROLLBACK AND CHAIN", ENDED_IT),
    ],
)
def test_a_task_that_ends_its_transaction_fails_and_writes_nothing(
    worker: RunningWorker, booking: ModuleType, effects: Database, how: str, sentence: str
) -> None:
    error = booking.misuse.send(5, how).unwrap().get(30_000).err_value
    assert error.error_code == "TRANSACTION_NOT_COMMITTED"
    assert sentence in (error.message or "")
    assert bookings(effects) == []
    # The session is clean for the next task.
    assert booking.optional.send(6).unwrap().get(30_000).ok_value == 6
    assert bookings(effects) == [6]


def test_a_task_that_commits_behind_another_statement_fails_although_its_rows_are_there(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    error = booking.misuse.send(5, "SELECT 1; COMMIT").unwrap().get(30_000).err_value
    assert error.error_code == "TRANSACTION_NOT_COMMITTED"
    assert ENDED_IT in (error.message or "")
    assert bookings(effects) == [5]


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_a_conflict_has_its_own_code(
    worker: RunningWorker, booking: ModuleType, effects: Database, state: str
) -> None:
    error = booking.conflict.send(2, state).unwrap().get(30_000).err_value
    assert error.error_code == "TRANSACTION_CONFLICT"
    assert bookings(effects) == []


def test_a_constraint_that_refuses_the_commit_fails_the_task(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    assert booking.optional.send(8).unwrap().get(30_000).ok_value == 8
    sent = booking.optional.send(8).unwrap()
    error = sent.get(30_000).err_value
    assert error.error_code == "UNHANDLED_EXCEPTION"
    assert "did not commit" in (error.message or "")
    assert bookings(effects) == [8]
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["FAILED"]


def test_a_part_is_undone_by_a_savepoint(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    assert booking.undo_a_part.send(9).unwrap().get(30_000).ok_value == 9
    assert bookings(effects) == [9]


def test_the_task_chooses_its_isolation_level(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    assert booking.serializable.send(1).unwrap().get(30_000).ok_value == "serializable"
    assert bookings(effects) == [1]


@pytest.mark.direct("a pooler gives each transaction another session")
def test_the_next_task_has_the_same_session_without_the_changes_of_this_one(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    first, second = (booking.leave_traces.send().unwrap().get(30_000).ok_value for _ in range(2))
    assert first == second
    assert first.startswith("4MB ")


def test_a_time_limit_inside_a_statement_rolls_back(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    sent = booking.book_and_sleep.send(1).unwrap()
    assert sent.get(30_000).err_value.error_code == "TASK_TIMEOUT"
    wait_until(lambda: not _asleep(effects), what="the end of the statement")
    assert bookings(effects) == []


def _asleep(connection: Database) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' "
        "AND datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_cancelled_task_is_rolled_back(
    worker: RunningWorker, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    sent = booking.book_and_rest.send(1, "cancelled").unwrap()
    wait_until(lambda: journal.lines("cancelled"))
    sent.cancel().unwrap()
    wait_for_status(effects, sent.task_id, TaskStatus.CANCELLED.value)
    assert bookings(effects) == []


@pytest.mark.pooled
@pytest.mark.parametrize("how", ["commit", "raise after"])
def test_the_outcome_commits_with_the_transaction_of_a_framework(
    worker: RunningWorker, booking: ModuleType, effects: Database, how: str
) -> None:
    sent = booking.book_in_session.send(4, how).unwrap()
    assert sent.get(30_000).ok_value == 4
    assert bookings(effects) == [4]
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("roll back", "TRANSACTION_NOT_COMMITTED", "rolled back or is still open"),
        ("forget", "TRANSACTION_NOT_COMMITTED", "rolled back or is still open"),
        ("raise", "UNHANDLED_EXCEPTION", "before the commit"),
        ("twice", "TRANSACTION_NOT_COMMITTED", "either tx.connection or record_in"),
        ("wrong type", "TRANSACTION_NOT_COMMITTED", "cannot store this result"),
    ],
)
def test_an_outcome_whose_transaction_does_not_commit_is_a_failure(
    worker: RunningWorker,
    booking: ModuleType,
    effects: Database,
    how: str,
    code: str,
    sentence: str,
) -> None:
    error = booking.book_in_session.send(4, how).unwrap().get(30_000).err_value
    assert error.error_code == code
    assert sentence in (error.message or "")
    assert bookings(effects) == []


def test_record_in_takes_a_psycopg_connection(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    assert booking.book_with_psycopg.send(4, "commit").unwrap().get(30_000).ok_value == 4
    assert bookings(effects) == [4]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("autocommit", "commits every statement by itself"),
        ("elsewhere", "a transaction of the application's database"),
        ("two-phase", "a two-phase transaction"),
        ("pipeline", "pipeline mode"),
    ],
)
def test_record_in_refuses_a_transaction_that_cannot_hold_the_outcome(
    worker: RunningWorker, booking: ModuleType, effects: Database, how: str, sentence: str
) -> None:
    error = booking.book_with_psycopg.send(4, how).unwrap().get(30_000).err_value
    assert error.error_code == "TRANSACTION_NOT_COMMITTED"
    assert sentence in (error.message or "")
    # In autocommit, the row is committed before the call.
    assert bookings(effects) == ([4] if how == "autocommit" else [])


@pytest.mark.parametrize(
    ("name", "how", "sentence"),
    [
        ("book_with_psycopg", "commit before", None),
        ("book_with_psycopg", "commit before, roll back", "rolled back or is still open"),
        ("book_in_session", "commit before", "no open transaction"),
    ],
)
def test_rows_that_the_task_commits_before_record_in_stay(
    worker: RunningWorker,
    booking: ModuleType,
    effects: Database,
    name: str,
    how: str,
    sentence: str | None,
) -> None:
    result = getattr(booking, name).send(4, how).unwrap().get(30_000)
    if sentence is None:
        assert result.ok_value == 4
    else:
        assert result.err_value.error_code == "TRANSACTION_NOT_COMMITTED"
        assert sentence in (result.err_value.message or "")
    assert bookings(effects) == [4]


@pytest.mark.pooled
@pytest.mark.parametrize("name", ["book_next", "book_next_async"])
def test_a_workflow_of_transactions_advances_with_their_commits(
    worker: RunningWorker, booking: ModuleType, effects: Database, name: str
) -> None:
    book_next = getattr(booking, name)
    nodes = [book_next.node()(before=0)]
    for _ in range(4):
        nodes.append(book_next.node()(before=from_node(nodes[-1])))
    spec = booking.app.workflow("chain", nodes, output=nodes[-1], definition_key="booking.chain")
    assert spec.start().unwrap().get(30_000).ok_value == 5
    assert bookings(effects) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["book_next", "book_next_async"])
def test_a_node_locks_its_run_before_its_own_row(
    worker: RunningWorker, booking: ModuleType, effects: Database, name: str
) -> None:
    """As a worker's turn does, which would deadlock with a node that locks them in another order."""
    node = getattr(booking, name).node()(before=0)
    spec = booking.app.workflow("one", [node], output=node, definition_key="booking.one")
    with closed_gate(effects, "write"):
        handle = spec.start().unwrap()
        wait_until(lambda: waits_at_gate(effects))
        with psycopg.connect(effects.info.dsn) as holder:
            holder.execute("SELECT FROM horsies_workflows FOR UPDATE")
            open_gate(effects)
            wait_until(lambda: waits_for_row(effects))
            holder.execute("SELECT FROM horsies_tasks FOR UPDATE NOWAIT")
    assert handle.get(30_000).ok_value == 1
    assert bookings(effects) == [1]


@pytest.mark.parametrize("name", ["book_next", "book_next_async"])
def test_a_map_of_transactions_writes_every_item_once(
    worker: RunningWorker, booking: ModuleType, effects: Database, name: str
) -> None:
    assert_map_books(booking, effects, name, 5)


def test_a_coroutine_in_a_child_for_one_task_commits_too(
    worker: RunningWorker, booking: ModuleType, effects: Database
) -> None:
    assert booking.book_async.send(3, 0.0).unwrap().get(30_000).ok_value == 3
    error = booking.misuse_async.send(4, "raise").unwrap().get(30_000).err_value
    assert error.error_code == "UNHANDLED_EXCEPTION"
    assert bookings(effects) == [3]


def test_an_open_transaction_is_explained_and_shown(
    worker: RunningWorker, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    doors = Doors(booking.app)
    sent = booking.book_and_rest.send(1, "explained").unwrap()
    wait_until(lambda: journal.lines("explained"))
    (pid,) = backends(effects, TX_ROLE)
    explanation = doors.task(sent.task_id)
    reason = the(explanation, "IN_TRANSACTION")
    assert "commit together" in reason.sentence
    assert reason.subjects == (f"pid {pid}",)
    assert "ROW_LOCKED" not in codes(explanation)
    assert f"pid {pid}" in doors.shown(sent.task_id)["transaction"]
    journal.release("explained")
    assert sent.get(30_000).ok_value == 1
    # The outcome is recorded, and the commit waits.
    with closed_gate(effects):
        other = booking.book.send(2, 0.0).unwrap()
        wait_until(lambda: waits_at_gate(effects))
        explanation = doors.task(other.task_id)
        assert "has not committed yet" in the(explanation, "IN_TRANSACTION").sentence
        assert "ROW_LOCKED" not in codes(explanation)
    assert other.get(30_000).ok_value == 2
    assert doors.shown(sent.task_id)["transaction"] is None
    assert "commit together (tx)" in doors.task_page(sent.task_id)
