"""Conflicts of transactions of tasks with others: serialization failures and deadlocks, in earnest."""

from __future__ import annotations

from types import ModuleType

from tests.support.database import Database, lock_waiters
from tests.support.tables import attempts
from tests.support.transactions import APPLICATION, bookings
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker

WORKER = {"application": APPLICATION, "processes": 2}


def test_a_serialization_failure_is_tried_again_as_its_policy_says(
    worker: RunningWorker, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    sent = [booking.withdraw.send(number, "both").unwrap() for number in (1, 2)]
    wait_until(lambda: len(journal.lines("both")) == 2)
    journal.release("both")
    # Both have read an empty table; the second one to commit reads again.
    assert sorted(one.get(30_000).ok_value for one in sent) == [0, 1]
    assert len(bookings(effects)) == 1
    codes = [one.error_code for one in attempts(effects) if one.outcome == "FAILED"]
    assert codes == ["TRANSACTION_CONFLICT"]


def test_a_deadlock_is_tried_again_as_its_policy_says(
    worker: RunningWorker,
    booking: ModuleType,
    effects: Database,
    journal: Journal,
    process_url: str,
) -> None:
    sent = booking.lock_two.send(1, "deadlock").unwrap()
    wait_until(lambda: journal.lines("deadlock"))
    with effects.transaction():
        effects.execute("SET LOCAL deadlock_timeout = '60s'")
        effects.execute("SELECT pg_advisory_xact_lock(2)")
        journal.release("deadlock")
        effects.execute("SELECT pg_advisory_xact_lock(1)")
    assert sent.get(30_000).ok_value == 2
    assert bookings(effects) == [1]
    first = attempts(effects, sent.task_id)[0]
    assert (first.outcome, first.error_code) == ("FAILED", "TRANSACTION_CONFLICT")
    assert lock_waiters(effects) == 0
