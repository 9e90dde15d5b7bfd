"""`record_in`: refusals, conflicts and lost sessions by driver, and exceptions after the commit."""

from __future__ import annotations

import importlib
from types import ModuleType
from uuid import uuid4

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, wait_for_status
from tests.support.transactions import bookings, idle_sessions
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker

WORKER = {"application": "tests.support.apps.recording:app", "processes": 1}
OPTIONS = ("--async-children", "1", "--async-slots", "4")


@pytest.fixture
def recording(booking: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.recording")


@pytest.mark.parametrize("how", ["autocommit", "elsewhere"])
@pytest.mark.parametrize("name", ["rest_after_refusal", "rest_after_refusal_async"])
def test_a_task_that_catches_the_refusal_of_record_in_can_be_stopped(
    worker: RunningWorker,
    recording: ModuleType,
    effects: Database,
    journal: Journal,
    name: str,
    how: str,
) -> None:
    sent = getattr(recording, name).send(1, how).unwrap()
    wait_until(lambda: journal.lines("refused", sent.task_id))
    sent.cancel().unwrap()
    wait_for_status(effects, sent.task_id, "CANCELLED")
    assert journal.lines("stopped", sent.task_id), "it was killed instead"


def test_a_task_that_raises_the_exception_of_a_stop_after_its_commit_is_completed(
    worker: RunningWorker, recording: ModuleType, effects: Database
) -> None:
    sent = recording.stop_after_commit.send(1).unwrap()
    assert sent.get(30_000).ok_value == 1
    assert bookings(effects) == [1]
    wait_until(lambda: f"stop_after_commit {sent.task_id} #1 completed" in worker.log())
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]
    assert f"outcome of task {sent.task_id} dropped" not in worker.log()


DRIVERS = [
    ("withdraw_by_driver", "psycopg"),
    ("withdraw_by_driver", "psycopg2"),
    ("withdraw_by_driver_async", "psycopg"),
    ("withdraw_by_driver_async", "asyncpg"),
]


@pytest.mark.parametrize(("name", "driver"), DRIVERS)
def test_a_conflict_of_any_driver_is_tried_again(
    worker: RunningWorker,
    recording: ModuleType,
    effects: Database,
    journal: Journal,
    name: str,
    driver: str,
) -> None:
    label = f"read {name} {driver}"  # all tests of a worker share the released labels
    sent = getattr(recording, name).send(1, driver, "read", label).unwrap()
    wait_until(lambda: journal.lines(label))
    with (
        effects.transaction()
    ):  # both read an empty table, and write a row that the other one misses
        effects.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        assert bookings(effects) == []
        effects.execute("INSERT INTO bookings VALUES (0, 1, %s)", (uuid4(),))
    journal.release(label)
    assert sent.get(30_000).ok_value == 1
    codes = [one.error_code for one in attempts(effects, sent.task_id)]
    assert codes == ["TRANSACTION_CONFLICT", None]
    assert bookings(effects) == [0, 1]


@pytest.mark.direct("a pooler answers for a session that was ended")
@pytest.mark.parametrize("point", ["written", "recorded"])
@pytest.mark.parametrize(("name", "driver"), DRIVERS)
def test_a_session_of_any_driver_that_is_lost_is_tried_again(
    worker: RunningWorker,
    recording: ModuleType,
    effects: Database,
    journal: Journal,
    name: str,
    driver: str,
    point: str,
) -> None:
    """Before its outcome is recorded, or between that and the commit."""
    label = f"{point} {name} {driver}"
    sent = getattr(recording, name).send(1, driver, point, label).unwrap()
    wait_until(lambda: journal.lines(label))
    for pid in idle_sessions(effects):
        effects.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: not idle_sessions(effects))
    journal.release(label)
    assert sent.get(30_000).ok_value == 0
    codes = [one.error_code for one in attempts(effects, sent.task_id)]
    assert codes == ["TRANSACTION_LOST", None]
    assert effects.execute("SELECT number, attempt FROM bookings").fetchall() == [(1, 2)]
