"""The scheduler as a service: how long it sleeps, and its reaction to database failures."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from horsies.app import Horsies
from horsies.config.app import WorkerResilienceConfig
from horsies.db.pipeline import Pipeline
from horsies.scheduler import service as service_module
from horsies.scheduler.service import Scheduler, SchedulerGaveUpError
from horsies.timetable.patterns import IntervalSchedule
from tests.support.database import Database
from tests.support.scheduling import (
    OWNER,
    MakeApp,
    ago,
    database_now,
    enter,
    make_due,
    schedule,
    state,
    tasks,
)
from tests.support.wait import wait_until


class Line:
    """Connections for a scheduler, which can be cut and refused."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.refuses = False
        self.refusal: psycopg.Error = psycopg.OperationalError("connection refused")
        self.opened: list[psycopg.Connection[Any]] = []

    def connect(self) -> Pipeline:
        if self.refuses:
            raise self.refusal
        self.opened.append(psycopg.connect(self.url, autocommit=True))
        return Pipeline(self.opened[-1])


@pytest.fixture
def line(process_url: str) -> Iterator[Line]:
    line = Line(process_url)
    yield line
    for connection in line.opened:
        connection.close()


def serving(app: Horsies, line: Line) -> Scheduler:
    return Scheduler(app.config, app.definitions(), OWNER, line.connect)


def step(scheduler: Scheduler) -> tuple[float, float]:
    """Step; return the bounds between which the length of the sleep after it lies."""
    before = time.monotonic()
    scheduler.step()
    return scheduler.next_at() - time.monotonic(), scheduler.next_at() - before


def test_a_scheduler_sleeps_for_its_interval(make_app: MakeApp, line: Line) -> None:
    shortest, longest = step(serving(make_app(schedule()), line))
    assert shortest <= 1
    assert longest >= 1


def test_a_longer_interval_makes_longer_sleeps_and_slots_stay_exact(
    connection: Database, make_app: MakeApp, line: Line
) -> None:
    app = make_app(schedule(pattern=IntervalSchedule(seconds=20)))
    patient = app.config.model_copy(
        update={"schedule": app.config.schedule.model_copy(update={"check_interval_seconds": 60})}  # type: ignore[union-attr]
    )
    scheduler = Scheduler(patient, app.definitions(), OWNER, line.connect)
    shortest, longest = step(scheduler)
    assert shortest < 20.1
    assert longest > 19
    make_due(connection, database_now(connection) + timedelta(seconds=10))
    scheduler.wake()
    shortest, longest = step(scheduler)
    assert shortest < 10.1
    assert longest > 0
    assert tasks(connection) == []


def test_a_step_before_its_time_does_nothing(
    connection: Database, make_app: MakeApp, line: Line
) -> None:
    scheduler = serving(make_app(schedule()), line)
    scheduler.step()
    make_due(connection, ago(connection, 1))
    scheduler.step()
    assert tasks(connection) == []
    scheduler.wake()
    scheduler.step()
    assert len(tasks(connection)) == 1


def test_a_database_that_is_away_is_waited_for(
    connection: Database, make_app: MakeApp, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(schedule(), resilience=WorkerResilienceConfig(db_retry_initial_ms=100))
    scheduler = serving(app, line)
    line.refuses = True
    shortest, longest = step(scheduler)
    assert "cannot schedule anything" in caplog.text
    assert shortest < 0.2
    assert longest > 0
    # Being called does not make it knock at a closed door.
    planned = scheduler.next_at()
    scheduler.wake()
    assert scheduler.next_at() == planned
    line.refuses = False
    _step_when_due(scheduler)
    assert state(connection)["run_count"] == 0
    make_due(connection, ago(connection, 1))
    line.opened[-1].close()
    scheduler.wake()
    scheduler.step()
    assert tasks(connection) == []
    _step_when_due(scheduler)
    assert len(tasks(connection)) == 1


def _step_when_due(scheduler: Scheduler) -> None:
    """Wait for the moment the scheduler asked for, and be there."""
    while (left := scheduler.next_at() - time.monotonic()) > 0:
        time.sleep(left)
    scheduler.step()


def test_a_scheduler_gives_up_when_it_is_told_to(make_app: MakeApp, line: Line) -> None:
    resilience = WorkerResilienceConfig(db_retry_initial_ms=100, db_retry_max_attempts=1)
    scheduler = serving(make_app(schedule(), resilience=resilience), line)
    line.refuses = True
    scheduler.step()
    with pytest.raises(SchedulerGaveUpError, match="connection refused"):
        _step_when_due(scheduler)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (psycopg.ProgrammingError("invalid percent-encoded token"), "database_url cannot be read"),
        (psycopg.OperationalError("password authentication failed"), "PostgreSQL refused the user"),
        (psycopg.OperationalError('database "shop" does not exist'), "The database does not exist"),
        (psycopg.errors.InsufficientPrivilege("permission denied for schema"), "permission denied"),
    ],
)
@pytest.mark.parametrize("was_connected", [False, True])
def test_a_database_that_will_never_let_it_in_is_not_waited_for(
    connection: Database,
    make_app: MakeApp,
    line: Line,
    refusal: psycopg.Error,
    reason: str,
    was_connected: bool,
) -> None:
    resilience = WorkerResilienceConfig(db_retry_initial_ms=100)
    scheduler = serving(make_app(schedule(), resilience=resilience), line)
    if was_connected:
        scheduler.step()
        line.opened[-1].close()
        scheduler.wake()
        scheduler.step()
    line.refuses, line.refusal = True, refusal
    with pytest.raises(SchedulerGaveUpError, match=reason):
        _step_when_due(scheduler)


def test_a_scheduler_in_a_worker_waits_while_its_login_is_refused(
    connection: Database, make_app: MakeApp, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(schedule(), resilience=WorkerResilienceConfig(db_retry_initial_ms=100))
    scheduler = Scheduler(app.config, app.definitions(), OWNER, line.connect, is_in_worker=True)
    line.refusal = psycopg.OperationalError("password authentication failed")
    line.refuses = True
    with pytest.raises(SchedulerGaveUpError, match="PostgreSQL refused the user"):
        scheduler.step()  # at the start it is a mistake
    assert not scheduler.is_connected
    line.refuses = False
    scheduler.step()
    assert scheduler.is_connected
    make_due(connection, ago(connection, 1))
    line.opened[-1].close()
    line.refuses = True
    scheduler.wake()
    scheduler.step()
    caplog.set_level(logging.INFO, "horsies.scheduler")
    caplog.clear()
    _step_when_due(scheduler)
    assert tasks(connection) == []
    assert not scheduler.is_connected
    (message,) = caplog.messages
    assert re.fullmatch(
        r"cannot schedule anything; next try in \d+\.\d s: PostgreSQL refused the user name or "
        r"password; correct database_url \(password authentication failed\)\.",
        message,
    )
    line.refuses = False
    _step_when_due(scheduler)
    assert len(tasks(connection)) == 1
    assert scheduler.is_connected
    assert "the scheduler is connected again" in caplog.messages


def test_a_tick_that_fails_for_reasons_of_its_own_does_not_end_the_loop(
    connection: Database,
    make_app: MakeApp,
    line: Line,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = serving(make_app(schedule()), line)
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(service_module, "tick", lambda *_: 1 / 0)
        shortest, longest = step(scheduler)
    assert "the tick failed" in caplog.text
    assert shortest <= 1
    assert longest >= 1
    make_due(connection, ago(connection, 1))
    _step_when_due(scheduler)
    assert len(tasks(connection)) == 1


def test_a_record_that_is_missing_comes_back_at_the_next_refresh(
    connection: Database, make_app: MakeApp, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "REFRESH_SECONDS", 0.0)
    scheduler = serving(make_app(schedule()), line)
    scheduler.step()
    connection.execute("DELETE FROM horsies_schedule_state")
    scheduler.wake()
    scheduler.step()
    assert state(connection)["run_count"] == 0


def test_a_schedule_of_another_release_is_taken_over_by_the_second_refresh_of_a_connection(
    connection: Database, make_app: MakeApp, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "REFRESH_SECONDS", 0.0)
    scheduler = serving(make_app(schedule(pattern=IntervalSchedule(seconds=10))), line)
    scheduler.step()
    older = serving(make_app(schedule()), line)
    older.step()
    older_hash = state(connection)["config_hash"]
    connection.execute(
        "UPDATE horsies_schedule_state SET next_run_at = now() - interval '2 min', "
        "updated_at = now() - interval '2 min'"
    )
    scheduler._back_off(psycopg.OperationalError("cut"))
    _step_when_due(scheduler)
    assert state(connection)["config_hash"] == older_hash
    scheduler.wake()
    scheduler.step()
    assert state(connection)["config_hash"] != older_hash
    assert len(tasks(connection)) == 1


def test_a_scheduler_gives_the_others_time_after_the_database_stood_still(
    connection: Database,
    make_app: MakeApp,
    line: Line,
    process_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(service_module, "STALL_SECONDS", 0.2)
    scheduler = serving(make_app(schedule(pattern=IntervalSchedule(seconds=10))), line)
    scheduler.step()
    enter(connection, make_app(schedule()))
    of_others = state(connection)["config_hash"]
    connection.execute(
        "UPDATE horsies_schedule_state SET next_run_at = now() - interval '90 s', "
        "updated_at = now() - interval '90 s'"
    )
    with psycopg.connect(process_url) as still:
        still.execute("LOCK TABLE horsies_schedule_state")
        scheduler.wake()
        step = threading.Thread(target=scheduler.step)
        step.start()
        wait_until(lambda: not scheduler._is_on_time())
    step.join()
    assert state(connection)["config_hash"] == of_others
    monkeypatch.setattr(service_module, "STALL_SECONDS", 60.0)
    scheduler.wake()
    scheduler.step()
    assert state(connection)["config_hash"] != of_others, "nothing serves it after the next look"
