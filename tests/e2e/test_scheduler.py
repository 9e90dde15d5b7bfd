"""Schedulers as processes: every slot fires once, even when schedulers are killed or frozen."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies import IntervalSchedule, TaskSchedule
from tests.support.database import Database, backends, database_on, terminate
from tests.support.proxy import outage
from tests.support.schedulers import (
    APPLICATION,
    check_books,
    config_of,
    enter,
    every,
    next_slots,
    sent,
    slots,
    start_scheduler,
    wait_until_serving,
)
from tests.support.tables import attempts, held_connections
from tests.support.wait import wait_until
from tests.support.workers import AHEAD, BEHIND, Fleet, Journal, RunningWorker, skew

# The whole hour of truth is a minute; a shorter one will do for every day.
SOAK_SECONDS = float(os.environ.get("HORSIES_SCHEDULER_SOAK_SECONDS", "6"))
GATE_KEY = 4_242

# Blocks every commit of a scheduled task until the test lets go of the lock.
GATE = f"""
CREATE FUNCTION e2e_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({GATE_KEY});
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER e2e_gate AFTER INSERT ON horsies_tasks DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.schedule_name IS NOT NULL) EXECUTE FUNCTION e2e_gate();
"""
NO_GATE = "DROP TRIGGER e2e_gate ON horsies_tasks; DROP FUNCTION e2e_gate;"


def wait_for_slots(connection: Database, name: str, count: int, seconds: float = 30.0) -> None:
    """Wait until that many slots of a schedule have become tasks."""
    wait_until(
        lambda: len(slots(connection, name)) >= count,
        seconds,
        lambda: f"{name}: {slots(connection, name)}",
    )


def wait_until_nothing_is_due(connection: Database, seconds: float = 30.0) -> None:
    """Wait until every schedule's next slot is ahead."""
    query = "SELECT count(*) FROM horsies_schedule_state WHERE next_run_at <= clock_timestamp()"
    wait_until(lambda: connection.execute(query).fetchone() == (0,), seconds)


# A closed terminal sends its signal twice: from the kernel and from the shell.
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP] * 2])
def test_a_scheduler_sends_what_is_due_and_stops_in_order(
    fleet: Fleet, connection: Database, numbers: list[int]
) -> None:
    scheduler = start_scheduler(fleet, config_of(every(1, "often")))
    wait_for_slots(connection, "often", 2)
    for number in numbers:
        scheduler.signal(number)
    assert scheduler.wait() == 0
    assert scheduler.events("scheduler_stopped")
    assert "Traceback" not in scheduler.log()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_schedulers_killed_at_random_send_every_slot_exactly_once(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    dice = random.Random(seed)
    print(f"seed {seed}")
    seconds = {f"schedule {number}": dice.randint(1, 3) for number in range(50)}
    config = config_of(*(every(length, name) for name, length in seconds.items()))
    first = enter(connection, programs.app, config)
    alive = [start_scheduler(fleet, config, ready=False) for _ in range(3)]
    wait_until_serving(alive[0])
    killed = at_work = 0
    deadline = time.monotonic() + SOAK_SECONDS
    while time.monotonic() < deadline or at_work < 5:
        _hold_on(
            dice.uniform(0.0, 0.6), lambda: any(one.process.poll() is not None for one in alive)
        )
        # Mostly one that is at work, sometimes one that may still be starting.
        if dice.random() < 0.8:
            wait_until(lambda: any(one.events("slots_sent") for one in alive), 30)
        working = [one for one in alive if one.events("slots_sent")]
        victim = dice.choice(working or alive)
        alive.remove(victim)
        victim.signal(signal.SIGKILL)
        victim.wait()
        killed += 1
        at_work += victim in working
        alive.append(start_scheduler(fleet, config, ready=False))
    wait_until_serving(alive[-1])
    wait_until_nothing_is_due(connection)
    for one in alive:
        wait_until_serving(one)
        assert one.stop() == 0
    total = check_books(connection, first, seconds)
    print(f"{total} slots of {len(seconds)} schedules, {killed} killed, {at_work} of them at work")
    assert total > 50 * SOAK_SECONDS / 3


def _hold_on(seconds: float, is_over: Any) -> None:
    """Let that much time pass; a scheduler that ended by itself is a failure."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert not is_over(), "a scheduler ended by itself"
        time.sleep(0.01)


@contextmanager
def closed_gate(connection: Database, url: str) -> Iterator[psycopg.Connection[Any]]:
    """Let no scheduled task be committed until the connection that is returned is closed."""
    connection.execute(GATE)
    try:
        with psycopg.connect(url, autocommit=True) as keeper:
            keeper.execute("SELECT pg_advisory_lock(%s)", (GATE_KEY,))
            yield keeper
    finally:
        connection.execute(NO_GATE)


def blocked_backends(connection: Database) -> list[int]:
    rows = connection.execute(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        (GATE_KEY,),
    )
    return [row[0] for row in rows]


def test_a_crash_between_insert_and_commit_sends_the_slot_once(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    seconds = {"often": 1, "seldom": 3}
    config = config_of(*(every(length, name) for name, length in seconds.items()))
    first = enter(connection, programs.app, config)
    with closed_gate(connection, fleet.database_url) as keeper:
        scheduler = start_scheduler(fleet, config, ready=False)
        (backend,) = wait_until(lambda: blocked_backends(connection), 30, scheduler.log)
        # All is inserted and noted, nothing committed: now the server ends it.
        connection.execute("SELECT pg_terminate_backend(%s)", (backend,))
        wait_until(lambda: backend not in blocked_backends(connection))
        assert sent(connection) == []
        assert next_slots(connection) == first
        # Now the scheduler itself dies there, and the server finishes what it was told.
        (backend,) = wait_until(lambda: blocked_backends(connection), 30, scheduler.log)
        scheduler.signal(signal.SIGKILL)
        scheduler.wait()
        second = start_scheduler(fleet, config, ready=False)
        wait_until(lambda: len(backends(connection, "horsies:scheduler")) == 2, 30, second.log)
        keeper.close()
        wait_until(lambda: blocked_backends(connection) == [])
    wait_for_slots(connection, "seldom", 2)
    wait_until_nothing_is_due(connection)
    assert second.stop() == 0
    assert check_books(connection, first, seconds) >= 8


def test_a_scheduler_paused_across_slots_neither_repeats_nor_loses_any(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    seconds = {"often": 1, "seldom": 2}
    config = config_of(*(every(length, name) for name, length in seconds.items()))
    first = enter(connection, programs.app, config)
    frozen = start_scheduler(fleet, config)
    other = start_scheduler(fleet, config)
    for _ in range(3):
        frozen.signal(signal.SIGSTOP)
        wait_for_slots(connection, "often", len(slots(connection, "often")) + 3)
        frozen.signal(signal.SIGCONT)
        wait_for_slots(connection, "often", len(slots(connection, "often")) + 1)
    # No scheduler runs for a while; missed slots are caught up.
    other.signal(signal.SIGSTOP)
    frozen.signal(signal.SIGSTOP)
    before = len(slots(connection, "often"))
    missed = datetime.now(UTC) + timedelta(seconds=3)
    wait_until(lambda: datetime.now(UTC) > missed)
    other.signal(signal.SIGCONT)
    frozen.signal(signal.SIGCONT)
    wait_for_slots(connection, "often", before + 3)
    wait_until_nothing_is_due(connection)
    assert (frozen.stop(), other.stop()) == (0, 0)
    assert check_books(connection, first, seconds) > 15


def test_a_lone_scheduler_paused_across_slots_explains_what_it_drops(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    config = config_of(every(1, "often", catch_up_missed=False))
    first = enter(connection, programs.app, config)["often"]
    scheduler = start_scheduler(fleet, config)
    wait_for_slots(connection, "often", 1)
    scheduler.signal(signal.SIGSTOP)
    missed = datetime.now(UTC) + timedelta(seconds=4)
    wait_until(lambda: datetime.now(UTC) > missed)
    scheduler.signal(signal.SIGCONT)
    scheduler.wait_for("slots_dropped")
    assert scheduler.stop() == 0
    found = slots(connection, "often")
    steps = [(slot - first).total_seconds() for slot in found]
    assert all(step == round(step) for step in steps)
    assert len(set(steps)) == len(steps)
    # On a busy machine slots may have passed before the scheduler was there.
    gaps = [later - earlier for earlier, later in pairwise([-1.0, *steps])]
    assert sum(gap > 1 for gap in gaps) == len(scheduler.events("slots_dropped"))
    row = connection.execute(
        "SELECT skip_reason, skipped_at FROM horsies_schedule_state"
    ).fetchone()
    assert row is not None
    assert (row[0], row[1].astimezone(UTC) in found) == ("MISSED", True)


@pytest.mark.parametrize("offsets", [(AHEAD, BEHIND), (BEHIND,)])
def test_a_clock_ten_minutes_wrong_changes_nothing(
    fleet: Fleet, programs: ModuleType, connection: Database, offsets: tuple[str, ...]
) -> None:
    seconds = {"often": 1, "seldom": 2}
    config = config_of(*(every(length, name) for name, length in seconds.items()))
    first = enter(connection, programs.app, config)
    schedulers = [start_scheduler(fleet, config, skew(fleet, offset)) for offset in offsets]
    for scheduler, offset in zip(schedulers, offsets, strict=True):
        assert _wrong_by(scheduler) * (1 if offset == AHEAD else -1) > 500, "the clock was right"
    wait_for_slots(connection, "seldom", 4)
    wait_until_nothing_is_due(connection)
    for scheduler in schedulers:
        assert scheduler.stop() == 0
        assert not scheduler.events("slots_dropped")
    assert check_books(connection, first, seconds) >= 12


def _wrong_by(scheduler: RunningWorker) -> float:
    """How many seconds a process is ahead, by the time of its events."""
    (ready,) = scheduler.events("scheduler_ready")
    return (datetime.fromisoformat(ready["time"]) - datetime.now(UTC)).total_seconds()


@pytest.mark.pooled
def test_a_scheduler_that_loses_its_connections_goes_on_and_leaves_none_behind(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    config = config_of(every(1, "often"))
    first = enter(connection, programs.app, config)
    scheduler = start_scheduler(fleet, config)
    wait_for_slots(connection, "often", 2)
    for _ in range(2):
        assert terminate(connection, "horsies:scheduler")
        terminate(connection, "horsies:listener")
        wait_for_slots(connection, "often", len(slots(connection, "often")) + 2)
    # A pooler mends its server connections without a word.
    assert fleet.is_pooled or scheduler.events("scheduler_database_lost")
    assert scheduler.stop() == 0
    wait_until(lambda: held_connections(fleet, connection, "horsies:scheduler") == 0)
    check_books(connection, first, {"often": 1})


def test_a_scheduler_outlasts_an_outage_and_stops_during_one(
    fleet: Fleet, programs: ModuleType, connection: Database, server_url: str
) -> None:
    config = config_of(every(1, "often"))
    first = enter(connection, programs.app, config)
    scheduler = start_scheduler(fleet, config)
    with outage(server_url, connection):
        scheduler.wait_for("scheduler_database_lost")
        before = len(slots(connection, "often"))
    wait_for_slots(connection, "often", before + 3)
    wait_until_nothing_is_due(connection)
    with outage(server_url, connection):
        assert scheduler.stop() == 0
    check_books(connection, first, {"often": 1})


def test_a_scheduler_ends_at_once_when_its_database_will_never_let_it_in(fleet: Fleet) -> None:
    missing = database_on(fleet.database_url, "horsies_nowhere")
    config = config_of(every(1, "often"))
    scheduler = start_scheduler(fleet, config, fleet.environment(missing, config), ready=False)
    assert scheduler.wait() == 1
    assert "The database does not exist; create it or correct database_url" in scheduler.log()
    assert "Traceback" not in scheduler.log()


@pytest.mark.pooled
def test_a_sleeping_scheduler_is_woken_by_changes(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    scheduler = start_scheduler(fleet, config_of(interval=60))
    wait_until(lambda: backends(connection, "horsies:listener"))
    added = TaskSchedule(name="added", task_name="noop", pattern=IntervalSchedule(seconds=1))
    programs.app.schedules.add(added).unwrap()
    wait_for_slots(connection, "added", 2)
    programs.app.schedules.pause("added").unwrap()
    paused = len(slots(connection, "added"))
    programs.app.schedules.resume("added").unwrap()
    wait_for_slots(connection, "added", paused + 2)
    assert scheduler.stop() == 0


def test_a_worker_with_a_scheduler_sends_runs_and_retries(
    fleet: Fleet, journal: Journal, connection: Database
) -> None:
    config = config_of(
        every(1, "slots", task_name="note_slot", args=["hello"]),
        every(3_600, "flaky", task_name="fail_then_work", start_at="2020-01-01T00:00:00Z"),
    )
    worker = fleet.start("--with-scheduler", application=APPLICATION, config=config)
    assert worker.wait_for("scheduler_ready")["schedules"] == 2
    connection.execute(
        "UPDATE horsies_schedule_state SET next_run_at = date_trunc('hour', now()) "
        "WHERE schedule_name = 'flaky'"
    )
    wait_for_slots(connection, "slots", 3)
    wait_until(lambda: len(journal.lines("slot")) >= 3, 30, worker.log)
    labels = [line.label for line in journal.lines("slot")]
    expected = [f"hello {slot.isoformat()}" for slot in slots(connection, "slots")]
    assert sorted(labels) == expected[: len(labels)]
    wait_until(lambda: [one.status for one in sent(connection, "flaky")] == ["COMPLETED"])
    assert sorted(one.attempt for one in attempts(connection) if one.error_code) == [1]
    assert worker.stop() == 0


def test_workers_with_schedulers_and_a_scheduler_beside_them_agree(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    seconds = {f"schedule {number}": 1 for number in range(5)}
    config = config_of(*(every(1, name) for name in seconds))
    first = enter(connection, programs.app, config)
    workers = [
        fleet.start("--with-scheduler", processes=1, application=APPLICATION, config=config)
        for _ in range(2)
    ]
    scheduler = start_scheduler(fleet, config)
    wait_for_slots(connection, "schedule 0", 5)
    wait_until_nothing_is_due(connection)
    assert [one.stop() for one in (*workers, scheduler)] == [0, 0, 0]
    check_books(connection, first, seconds)
