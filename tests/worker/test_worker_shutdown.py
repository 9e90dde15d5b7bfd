"""When a worker records its stop: only then other workers do not look for its tasks."""

from __future__ import annotations

import logging
import re
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from psycopg import Connection
from psycopg.errors import QueryCanceled

from horsies.app import Horsies
from horsies.tasks.blocked import Change
from horsies.tasks.outcome import Outcome
from horsies.worker import agenda
from horsies.worker.config import WorkerConfig
from horsies.worker.ledger import ENDED, REFUSED
from horsies.worker.loop import ExitCode, Worker
from horsies.worker.turn import Claimer, TurnRequest, take_turn
from tests.support.poison import poisoned
from tests.support.pool import MakePool
from tests.support.rows import add_task, ago, row_of


def recorded_stops(connection: Connection[Any]) -> list[bool]:
    """Of every registered worker, whether it recorded its stop."""
    rows = connection.execute("SELECT stopped_at IS NOT NULL FROM horsies_workers")
    return [row[0] for row in rows]


@pytest.fixture
def worker(app: Horsies, make_pool: MakePool, selector: selectors.BaseSelector) -> Worker:
    return Worker(app, WorkerConfig("app:app", 1, ["default"]), make_pool(1), selector)


def once_registered(
    worker: Worker,
    connection: Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], None],
) -> None:
    """Have the worker's loop do this as soon as the worker is known to others."""
    step = worker._step

    def step_and_act() -> None:
        step()
        if recorded_stops(connection):
            act()

    monkeypatch.setattr(worker, "_step", step_and_act)


def test_a_worker_that_owns_no_task_records_its_stop(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    once_registered(worker, connection, monkeypatch, worker.request_stop)
    assert worker.run() is ExitCode.CLEAN
    assert recorded_stops(connection) == [True]


def test_a_worker_that_may_still_own_a_task_does_not_record_its_stop(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_a_claim_in_doubt() -> None:
        with suppress(ArithmeticError), worker._dispatcher.ledger.claim_in_doubt():
            raise ArithmeticError("its answer was lost")
        for _ in range(3):
            worker.request_stop()

    once_registered(worker, connection, monkeypatch, leave_a_claim_in_doubt)
    assert worker.run() is ExitCode.FORCED
    assert recorded_stops(connection) == [False]


def test_a_worker_that_fails_does_not_record_its_stop(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down() -> None:
        raise ArithmeticError("between the claim and the children")

    once_registered(worker, connection, monkeypatch, break_down)
    with pytest.raises(ArithmeticError):
        worker.run()
    assert recorded_stops(connection) == [False]


def test_a_stop_that_cannot_be_recorded_neither_delays_nor_breaks_the_end(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_at_once_while_the_table_is_locked() -> None:
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE horsies_workers IN ACCESS EXCLUSIVE MODE")
        for _ in range(3):
            worker.request_stop()

    once_registered(worker, connection, monkeypatch, stop_at_once_while_the_table_is_locked)
    try:
        assert worker.run() is ExitCode.CLEAN
        assert recorded_stops(connection) == [False]
    finally:
        connection.execute("ROLLBACK")


def test_a_stop_ends_although_a_reachable_database_refuses_every_turn(
    worker: Worker,
    connection: Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(agenda, "REFUSED_PATIENCE_SECONDS", 0.5)
    claimer = Claimer(worker.worker_id, "host", ["elsewhere"], [None])
    task_id = add_task(connection, queue_name="elsewhere")

    def hold_an_outcome_and_stop() -> None:
        pipeline = worker._connection.pipeline
        if worker._dispatcher.ledger.is_empty and pipeline is not None:
            (task,) = take_turn(pipeline, claimer, [], TurnRequest(pids=[1])).claimed
            worker._dispatcher.ledger.put(task, ENDED, Outcome.completed(task, '{"ok":1}'))
            worker.request_stop()

    once_registered(worker, connection, monkeypatch, hold_an_outcome_and_stop)
    with poisoned(connection, "NEW.status = 'COMPLETED'", state="53100"):
        assert worker.run() is ExitCode.FORCED
    assert "the database still refuses the outcomes of 1 task(s)" in caplog.text
    assert re.search(rf"the outcome of \w+ {task_id} is lost", caplog.text)
    assert row_of(connection, task_id)["status"] == "RUNNING"
    assert recorded_stops(connection) == [False]


SLEEP = """
CREATE FUNCTION test_sleep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_sleep(1.5); RETURN NEW; END $$;
CREATE TRIGGER test_sleep BEFORE UPDATE ON horsies_tasks FOR EACH ROW
WHEN (NEW.status = 'COMPLETED' AND NEW.task_name = 'slow') EXECUTE FUNCTION test_sleep()
"""


def test_a_stop_records_refused_outcomes_that_take_long_to_store(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    claimer = Claimer(worker.worker_id, "host", ["elsewhere"], [None])
    ids = [add_task(connection, task_name=name, queue_name="elsewhere") for name in ("slow", "a")]

    def hold_refused_outcomes_and_stop() -> None:
        pipeline, ledger = worker._connection.pipeline, worker._dispatcher.ledger
        if not ledger.is_empty or pipeline is None:
            return
        for task in take_turn(pipeline, claimer, [], TurnRequest(pids=[1, 2])).claimed:
            ledger.put(task, REFUSED, Outcome.completed(task, '{"ok":1}'))
        # The worker has just waited for one of them in vain.
        error = QueryCanceled("no answer for 10 s")
        worker._work._blocked.note(pipeline, Change("record", ids[0]), error, taken_seconds=10.0)
        worker.request_stop()

    once_registered(worker, connection, monkeypatch, hold_refused_outcomes_and_stop)
    connection.execute(SLEEP)
    try:
        assert worker.run() is ExitCode.CLEAN
    finally:
        connection.execute("DROP FUNCTION test_sleep() CASCADE")
    assert {row_of(connection, one)["status"] for one in ids} == {"COMPLETED"}


def test_a_burst_reports_the_due_tasks_of_paused_queues(
    app: Horsies,
    make_pool: MakePool,
    selector: selectors.BaseSelector,
    connection: Connection[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at)"
        " VALUES ('mail', now()), ('empty', now()), ('unserved', now()), ('open', NULL)"
    )
    for delay_seconds in (0, 0, 0, 3600):
        add_task(connection, queue_name="mail", enqueued_at=ago(-delay_seconds))
    config = WorkerConfig("app:app", 1, ["open", "mail", "empty"], burst=True)
    with caplog.at_level(logging.INFO, "horsies.worker"):
        assert Worker(app, config, make_pool(1), selector).run() is ExitCode.CLEAN
    assert "paused queues were not served; due tasks left: mail 3, empty 0" in caplog.messages


def test_a_burst_without_paused_queues_reports_none(
    app: Horsies,
    make_pool: MakePool,
    selector: selectors.BaseSelector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = WorkerConfig("app:app", 1, ["default"], burst=True)
    with caplog.at_level(logging.INFO, "horsies.worker"):
        assert Worker(app, config, make_pool(1), selector).run() is ExitCode.CLEAN
    assert "nothing more is due: 0 attempt(s) ran" in caplog.messages
    assert not [one for one in caplog.messages if "paused" in one]
