"""`record_in` that was refused, and exceptions after its commit."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, wait_for_status
from tests.support.transactions import bookings
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
