"""Turns whose answers get lost, without children: owned tasks that the worker does not hold go back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.tasks.outcome import Outcome
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.ledger import ENDED, WAITING, Ledger
from horsies.worker.pool import window
from horsies.worker.pool.pool import ChildPool
from horsies.worker.pool.window import Windows
from horsies.worker.turn import Claimer, TurnRequest, release_unheld, take_turn
from tests.support.pool import MakePool, RecordingPool
from tests.support.rows import add_task
from tests.support.wait import wait_until

CLAIMER = Claimer("me", "host", ["default"], [None])


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def dispatcher(ledger: Ledger) -> Dispatcher:
    return Dispatcher(cast(ChildPool, RecordingPool({1, 2, 3})), ledger)


def owner(connection: Connection[Any], task_id: str) -> tuple[str, str | None]:
    (row,) = connection.execute(
        "SELECT status, claimed_by_worker_id FROM horsies_tasks WHERE id = %s", (task_id,)
    )
    status, worker_id = row
    return status, worker_id


def retried(task_id: str) -> Outcome:
    """The end of a first attempt that is tried again at once."""
    return Outcome(
        task_id=task_id,
        generation=1,
        workflow_id=None,
        status=TaskStatus.FAILED,
        result='{"err":{"error_code":"FLAKY"}}',
        attempt_outcome=TaskAttemptOutcome.FAILED,
        error_code="FLAKY",
        delay_seconds=0.0,
    )


def test_a_retry_claimed_in_doubt_goes_back_though_the_attempt_before_it_is_still_held(
    connection: Connection[Any], pipeline: Pipeline, ledger: Ledger, dispatcher: Dispatcher
) -> None:
    task_id = add_task(connection, max_retries=1)
    dispatcher.hand_out(take_turn(pipeline, CLAIMER, [], TurnRequest(pids=[1])).claimed)
    (first,) = ledger.tasks()
    outcome = retried(task_id)
    ledger.end(first, outcome, 0.1, 0.0)
    # Both are committed, and both answers are lost: the worker learns of neither.
    assert take_turn(pipeline, CLAIMER, [outcome], TurnRequest()).recorded
    assert take_turn(pipeline, CLAIMER, [outcome], TurnRequest(pids=[2])).claimed
    assert release_unheld(pipeline, "me", ledger.tasks()) == 1
    assert owner(connection, task_id) == ("PENDING", None)


def test_a_start_in_doubt_goes_back(
    connection: Connection[Any], pipeline: Pipeline, ledger: Ledger, dispatcher: Dispatcher
) -> None:
    task_id = add_task(connection)
    dispatcher.hand_out(take_turn(pipeline, CLAIMER, [], TurnRequest(prefetch=1)).claimed)
    (task,) = ledger.tasks(WAITING)
    starting = TurnRequest(starting=[(task, 1)])
    assert take_turn(pipeline, CLAIMER, [], starting).started, "committed, and the answer is lost"
    again = take_turn(pipeline, CLAIMER, [], starting)
    assert dispatcher.take_started([task], again.started) == []
    assert ledger.needs_release
    assert release_unheld(pipeline, "me", ledger.tasks()) == 1
    assert owner(connection, task_id) == ("PENDING", None)


def test_a_cancelled_task_of_a_window_is_cancelled_without_an_attempt(
    connection: Connection[Any],
    pipeline: Pipeline,
    make_pool: MakePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "PATIENCE_SECONDS", 60.0)
    pool = make_pool(1, has_windows=True)
    windows = Windows(32)
    for _ in range(20):
        windows.note_end("gated", 0.001)
    ledger = Ledger()
    dispatcher = Dispatcher(pool, ledger, windows=windows)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    args = json.dumps([str(tmp_path / "journal"), str(gate), "begun"])
    tasks = [add_task(connection, task_name="gated", args=args, burst=True) for _ in range(3)]
    (pid,) = pool.pids()
    request = TurnRequest(pids=[pid], ahead=[pid, pid], short_names=["gated"])
    dispatcher.hand_out(take_turn(pipeline, CLAIMER, [], request).claimed)
    wait_until((tmp_path / "journal").exists)
    connection.execute(
        "UPDATE horsies_tasks SET cancel_requested_at = now() WHERE id = %s", (tasks[1],)
    )
    dispatcher.cancel([tasks[1]])
    dispatcher.absorb(pool.collect(0))
    assert ledger.needs_release
    assert release_unheld(pipeline, "me", ledger.tasks()) == 1
    assert [owner(connection, one)[0] for one in tasks] == ["RUNNING", "CANCELLED", "RUNNING"]
    for _ in range(2):
        gate.write_bytes(b"x")
        while not ledger.count(ENDED):
            dispatcher.absorb(pool.collect(0.1))
        outcomes = ledger.to_record()
        ledger.close(outcomes, take_turn(pipeline, CLAIMER, outcomes, TurnRequest()))
    assert [owner(connection, one)[0] for one in tasks] == ["COMPLETED", "CANCELLED", "COMPLETED"]
    rows = connection.execute("SELECT task_id::text FROM horsies_task_attempts ORDER BY 1")
    assert [row for (row,) in rows] == sorted([tasks[0], tasks[2]])
