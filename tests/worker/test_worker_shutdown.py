"""When a worker says goodbye: only then nobody looks for tasks of its own any more."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any

import pytest
from psycopg import Connection

from horsies.app import Horsies
from horsies.worker.config import WorkerConfig
from horsies.worker.loop import ExitCode, Worker
from tests.support.pool import MakePool


def said_goodbye(connection: Connection[Any]) -> list[bool]:
    """Of every registered worker, whether it signed itself off."""
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
        if said_goodbye(connection):
            act()

    monkeypatch.setattr(worker, "_step", step_and_act)


def test_a_worker_that_leaves_nothing_behind_says_goodbye(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    once_registered(worker, connection, monkeypatch, worker.request_stop)
    assert worker.run() is ExitCode.CLEAN
    assert said_goodbye(connection) == [True]


def test_a_worker_that_may_still_own_something_does_not_say_goodbye(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_a_claim_in_doubt() -> None:
        worker._in_flight.needs_release = True
        for _ in range(3):
            worker.request_stop()

    once_registered(worker, connection, monkeypatch, leave_a_claim_in_doubt)
    assert worker.run() is ExitCode.FORCED
    assert said_goodbye(connection) == [False]


def test_a_worker_that_breaks_down_does_not_say_goodbye(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down() -> None:
        raise ArithmeticError("between the claim and the desk")

    once_registered(worker, connection, monkeypatch, break_down)
    with pytest.raises(ArithmeticError):
        worker.run()
    assert said_goodbye(connection) == [False]


def test_a_goodbye_that_nobody_takes_does_not_hold_up_the_end_nor_break_it(
    worker: Worker, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_at_once_while_nobody_gets_in() -> None:
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE horsies_workers IN ACCESS EXCLUSIVE MODE")
        for _ in range(3):
            worker.request_stop()

    once_registered(worker, connection, monkeypatch, leave_at_once_while_nobody_gets_in)
    try:
        assert worker.run() is ExitCode.CLEAN
        assert said_goodbye(connection) == [False]
    finally:
        connection.execute("ROLLBACK")
