"""Maintenance: when each job of a worker is due, and its effect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from horsies import AppConfig, PostgresConfig, RecoveryConfig, WorkerResilienceConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.queues import send_notification
from horsies.db.statements.tasks import TaskId
from horsies.db.statements.turn import find_cancel_requests, renew_claims, send_heartbeats
from horsies.db.statements.workers import (
    FindLostWorkers,
    Leads,
    Presence,
    SeenWorker,
    find_abandoned,
    find_lost_workers,
    register_worker,
    see_worker,
    store_worker_state,
    try_lead,
)
from horsies.db.statements.workflows import FindPausedRuns, find_paused_runs
from horsies.ids import new_id
from horsies.tasks.blocked import Blocked
from horsies.tasks.outcome import STOPPED_BY_CANCEL
from horsies.worker import maintenance as maintenance_module
from horsies.worker.agenda import Timer
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import WorkerConnection
from horsies.worker.in_flight import InFlight
from horsies.worker.liveness import PONG_CHANNEL_PREFIX, Identity
from horsies.worker.maintenance import LONG_SECONDS, SEEN_SECONDS, Maintenance
from horsies.worker.notifications import echo_channel
from horsies.worker.pool.pool import ChildPool
from tests.support.pool import RecordingPool, attempt, claimed

BROKER = PostgresConfig(database_url="postgresql://localhost/unused")


@dataclass(slots=True)
class RecordingDatabase:
    """Takes note of the statements and answers as an empty database would."""

    was_stopped: bool = False
    is_known: bool = True
    leads: bool = True
    failure: Exception | None = None
    cancelled: Sequence[str] = ()
    lost: Sequence[str] = ()
    steps: list[Step] = field(default_factory=list)

    def run(self, steps: Sequence[Step]) -> list[list[Any]]:
        self.steps += steps
        if self.failure is not None:
            raise self.failure
        answers: dict[Any, list[Any]] = {
            see_worker: [Presence("id", self.was_stopped)] if self.is_known else [],
            try_lead: [Leads(self.leads)],
            find_cancel_requests: [TaskId(task_id) for task_id in self.cancelled],
            find_lost_workers: [SeenWorker(worker_id) for worker_id in self.lost],
        }
        return [answers.get(statement, []) for statement, _ in steps]

    def asked(self, statement: Any) -> list[Any]:
        return [params for asked, params in self.steps if asked is statement]


class QuietPool(RecordingPool):
    """Children that do nothing and weigh little."""

    @property
    def busy(self) -> dict[str, Any]:
        return {
            task_id: SimpleNamespace(assignment=attempt(task_id, generation), assigned_at=0.0)
            for task_id, generation, _ in self.dispatched
        }

    def children_memory_mb(self) -> float:
        return 1.0


class QuietLock:
    """A session lock that is never missing."""

    def take_if_missing(self) -> None:
        pass


@dataclass(slots=True)
class QuietConnection:
    """A connection in the state that the test wants; it records calls."""

    receives: bool = True
    connected: bool = True
    unbroken: float = float("inf")
    calls: list[float] = field(default_factory=list)
    lock: QuietLock = field(default_factory=QuietLock)

    def check_notifications(self, now: float) -> bool:
        return self.receives

    def is_connected(self) -> bool:
        return self.connected

    def unbroken_seconds(self, now: float) -> float:
        return self.unbroken

    def note_call(self, now: float) -> None:
        self.calls.append(now)


@pytest.fixture
def in_flight() -> InFlight:
    return InFlight(cast(ChildPool, QuietPool({1, 2})))


def make_maintenance(
    in_flight: InFlight,
    config: AppConfig | None = None,
    connection: QuietConnection | None = None,
) -> Maintenance:
    return Maintenance(
        config or AppConfig(broker=BROKER),
        WorkerConfig("app:app", 2, ["default"]),
        Identity(new_id(), "host", 7),
        in_flight._pool,
        in_flight,
        cast(WorkerConnection, connection or QuietConnection()),
        Blocked(),
    )


def stopped(in_flight: InFlight) -> list[tuple[str, str]]:
    return cast(QuietPool, in_flight._pool).stopped


def perform(maintenance: Maintenance, database: RecordingDatabase, now: float) -> None:
    maintenance.perform(cast(Pipeline, database), now)


def test_something_regular_is_due_at_once_and_then_after_its_time() -> None:
    every = Timer(5.0)
    assert every.is_due(0.0)
    every.done(10.0)
    assert not every.is_due(14.9)
    assert every.is_due(15.0)


def test_the_sign_of_life_comes_first(in_flight: InFlight) -> None:
    database = RecordingDatabase()
    perform(make_maintenance(in_flight), database, 1.0)
    order = [statement for statement, _ in database.steps]
    assert order[:2] == [register_worker, see_worker]
    assert store_worker_state in order


def test_an_idle_worker_shows_itself_at_its_poll_and_a_busy_one_more_often(
    in_flight: InFlight,
) -> None:
    maintenance = make_maintenance(in_flight)
    perform(maintenance, RecordingDatabase(), 100.0)
    assert maintenance.next_at() == 105.0
    in_flight.hand_out([claimed("a", 1)])
    assert maintenance.next_at() == 100.0 + SEEN_SECONDS


def test_a_worker_that_hardly_polls_is_seen_often_enough_to_count_as_alive(
    in_flight: InFlight,
) -> None:
    config = AppConfig(
        broker=BROKER,
        resilience=WorkerResilienceConfig(notify_poll_interval_ms=300_000),
        recovery=RecoveryConfig(
            runner_heartbeat_interval_ms=1_000,
            claimer_heartbeat_interval_ms=1_000,
            running_stale_threshold_ms=3_000,
            claimed_stale_threshold_ms=3_000,
        ),
    )
    maintenance = make_maintenance(in_flight, config)
    perform(maintenance, RecordingDatabase(), 100.0)
    assert maintenance.next_at() == 101.0
    in_flight.hand_out([claimed("a", 1)])
    assert maintenance.next_at() == 101.0


def test_a_worker_that_others_declared_lost_recovers_no_task(in_flight: InFlight) -> None:
    maintenance, database = (
        make_maintenance(in_flight),
        RecordingDatabase(was_stopped=True, lost=["other"]),
    )
    perform(maintenance, database, 1.0)
    assert maintenance.is_lost
    assert database.asked(find_abandoned) == []
    maintenance.forget_registration()
    assert not maintenance.is_lost
    database = RecordingDatabase()
    perform(maintenance, database, 1.1)
    assert database.asked(register_worker)


def test_every_sign_of_life_stores_whether_notifications_arrive_and_sends_an_echo(
    in_flight: InFlight,
) -> None:
    connection = QuietConnection()
    maintenance, database = (
        make_maintenance(in_flight, connection=connection),
        RecordingDatabase(),
    )
    perform(maintenance, database, 100.0)
    connection.receives = False
    perform(maintenance, database, 105.0)
    first, second = database.asked(see_worker)
    assert (first.hears, second.hears) == (True, False)
    assert first.echo_channel == echo_channel(first.worker_id)
    assert connection.calls == [100.0, 105.0]


def test_a_call_of_which_nothing_was_stored_expects_no_echo(in_flight: InFlight) -> None:
    connection = QuietConnection()
    perform(
        make_maintenance(in_flight, connection=connection),
        RecordingDatabase(is_known=False),
        100.0,
    )
    assert connection.calls == []


def test_a_change_of_reception_is_shown_by_a_snapshot_at_once(in_flight: InFlight) -> None:
    connection = QuietConnection()
    maintenance, database = (
        make_maintenance(in_flight, connection=connection),
        RecordingDatabase(),
    )
    for now, receives, snapshots in (
        (100.0, True, 1),
        (105.0, False, 2),
        (110.0, False, 2),
        (115.0, True, 3),
    ):
        connection.receives = receives
        perform(maintenance, database, now)
        assert len(database.asked(store_worker_state)) == snapshots


def connected_seconds(maintenance: Maintenance, now: float) -> float:
    database = RecordingDatabase()
    perform(maintenance, database, now)
    (asked,) = database.asked(find_lost_workers)
    assert isinstance(asked, FindLostWorkers)
    return asked.connected_seconds


def test_a_reaper_says_how_long_its_own_connection_has_held(in_flight: InFlight) -> None:
    connection = QuietConnection()
    maintenance = make_maintenance(in_flight, connection=connection)
    assert connected_seconds(maintenance, 1_000.0) == LONG_SECONDS
    connection.unbroken = 3.0
    assert connected_seconds(maintenance, 1_013.0) == 3.0


def test_what_was_found_is_worth_nothing_when_our_own_lock_went_meanwhile(
    in_flight: InFlight,
) -> None:
    connection = QuietConnection()
    maintenance, database = (
        make_maintenance(in_flight, connection=connection),
        RecordingDatabase(lost=["other"]),
    )

    def lose_the_lock(steps: Sequence[Step]) -> list[list[Any]]:
        connection.connected = False
        return database.run(steps)

    cut_meanwhile = cast(Pipeline, SimpleNamespace(run=lose_the_lock))
    maintenance.perform(cut_meanwhile, 100.0)
    assert database.asked(find_lost_workers)
    assert database.asked(find_abandoned) == []
    connection.connected = True
    perform(maintenance, database, 200.0)
    assert database.asked(find_abandoned)


def test_leases_are_renewed_for_what_waits_and_nothing_else(in_flight: InFlight) -> None:
    maintenance = make_maintenance(
        in_flight, AppConfig(broker=BROKER, prefetch_buffer=2, claim_lease_ms=10_000)
    )
    database = RecordingDatabase()
    perform(maintenance, database, 0.0)
    assert database.asked(renew_claims) == []
    in_flight.hand_out([claimed("a", 1), claimed("b")])
    perform(maintenance, database, 4.9)
    assert database.asked(renew_claims) == []
    perform(maintenance, database, 5.0)
    (lease,) = database.asked(renew_claims)
    assert (lease.ids, lease.generations, lease.lease_ms) == (["b"], [1], 10_000)


def test_retention_goes_on_soon_when_there_is_more(
    in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [True, False]
    asked: list[float] = []

    def sweep(*_: object) -> bool:
        asked.append(1)
        return more.pop(0)

    monkeypatch.setattr(maintenance_module, "sweep", sweep)
    maintenance = make_maintenance(in_flight)
    for now in (0.0, 0.9, 1.0, 5.0, 3_600.0):
        perform(maintenance, RecordingDatabase(), now)
    assert len(asked) == 2


def test_paused_runs_are_looked_at_as_often_as_abandoned_tasks(in_flight: InFlight) -> None:
    recovery = RecoveryConfig(
        check_interval_ms=1_000, paused_workflow_auto_cancel_after=timedelta(hours=1)
    )
    maintenance = make_maintenance(in_flight, AppConfig(broker=BROKER, recovery=recovery))
    database = RecordingDatabase()
    for now, looks in ((100.0, 1), (100.5, 1), (101.5, 2)):
        perform(maintenance, database, now)
        assert database.asked(find_paused_runs) == [FindPausedRuns(3600.0, 50)] * looks
    silent = RecordingDatabase()
    perform(make_maintenance(in_flight), silent, 100.0)
    assert silent.asked(find_paused_runs) == []


PING = json.dumps(
    {"reply_channel": PONG_CHANNEL_PREFIX + "0123456789abcdef" * 2, "correlation_id": "1"}
)


@pytest.mark.parametrize("error", [psycopg.DataError("too long"), UnicodeError("no such letter")])
def test_a_ping_that_cannot_be_answered_harms_nobody(
    in_flight: InFlight, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    database = RecordingDatabase(failure=error)
    maintenance = make_maintenance(in_flight)
    maintenance.pings = [PING]
    maintenance.answer_pings(cast(Pipeline, database))
    assert database.asked(send_notification)
    assert maintenance.pings == []
    assert caplog.messages == [f"a ping could not be answered: {error}"]


def test_a_ping_in_an_outage_is_left_to_the_reconnect(in_flight: InFlight) -> None:
    database = RecordingDatabase(failure=psycopg.OperationalError("connection lost"))
    maintenance = make_maintenance(in_flight)
    maintenance.pings = [PING]
    with pytest.raises(psycopg.OperationalError):
        maintenance.answer_pings(cast(Pipeline, database))
    assert maintenance.pings == [PING]


def test_a_hint_is_looked_into_at_once_and_only_what_the_table_says_is_stopped(
    in_flight: InFlight,
) -> None:
    maintenance, database = make_maintenance(in_flight), RecordingDatabase()
    perform(maintenance, database, 100.0)
    in_flight.hand_out([claimed("a", 1), claimed("b", 2)])
    perform(maintenance, database, 100.1)
    assert database.asked(find_cancel_requests) == []
    maintenance.note_cancels({"a", "b"})
    assert maintenance.next_at() <= 100.1
    database.cancelled = ["a"]
    perform(maintenance, database, 100.1)
    assert stopped(in_flight) == [("a", STOPPED_BY_CANCEL)]
    assert maintenance.next_at() > 100.1
    assert database.asked(send_heartbeats) == [], "a hint must not cause a write"


def test_cancels_of_other_workers_tasks_cost_nothing(in_flight: InFlight) -> None:
    maintenance, database = make_maintenance(in_flight), RecordingDatabase()
    perform(maintenance, database, 100.0)
    in_flight.hand_out([claimed("a", 1)])
    maintenance.note_cancels({"other"})
    assert maintenance.next_at() > 100.1
    perform(maintenance, database, 100.1)
    assert database.asked(find_cancel_requests) == []


def test_a_look_for_cancels_that_failed_is_done_again(in_flight: InFlight) -> None:
    maintenance, database = make_maintenance(in_flight), RecordingDatabase()
    perform(maintenance, database, 100.0)
    in_flight.hand_out([claimed("a", 1)])
    maintenance.note_cancels({"a"})
    database.failure = psycopg.OperationalError("connection lost")
    with pytest.raises(psycopg.OperationalError):
        perform(maintenance, database, 100.1)
    database.failure, database.cancelled = None, ["a"]
    perform(maintenance, database, 100.2)
    assert stopped(in_flight) == [("a", STOPPED_BY_CANCEL)]
