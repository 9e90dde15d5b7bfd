"""Maintenance: when each job of a worker is due, and its effect."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from psycopg.errors import LockNotAvailable

from horsies import AppConfig, PostgresConfig, RecoveryConfig, WorkerResilienceConfig
from horsies.db.listen import Inbox
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.blocked import limit_lock_wait
from horsies.db.statements.measures import add_measures
from horsies.db.statements.queues import send_notification
from horsies.db.statements.tasks import TaskId
from horsies.db.statements.turn import (
    find_cancel_requests,
    renew_claims,
    send_heartbeats,
    store_progress,
)
from horsies.db.statements.workers import (
    Leads,
    OwnRow,
    Presence,
    WatchedWorker,
    close_lost_workers,
    find_owned,
    read_own_row,
    register_worker,
    see_worker,
    store_worker_state,
    try_lead,
    watch_workers,
)
from horsies.db.statements.workflows import find_paused_runs
from horsies.ids import new_id
from horsies.tasks.blocked import Blocked
from horsies.tasks.outcome import STOPPED_BY_CANCEL, Outcome
from horsies.worker import heartbeat
from horsies.worker import maintenance as maintenance_module
from horsies.worker.agenda import Timer
from horsies.worker.config import WorkerConfig
from horsies.worker.connection import Deliveries, WorkerConnection
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.heartbeat import SEEN_SECONDS, Heartbeat, HeartbeatClock
from horsies.worker.ledger import WAITING, Ledger
from horsies.worker.liveness import PONG_CHANNEL_PREFIX, Identity
from horsies.worker.maintenance import PROGRESS_SECONDS, Maintenance
from horsies.worker.pool.pool import ChildPool, ChildSummary
from horsies.worker.protocol import ProgressReport
from horsies.worker.tally import FLUSH_SECONDS
from tests.support.pool import RecordingPool, attempt, claimed
from tests.support.statements import named

BROKER = PostgresConfig(database_url="postgresql://localhost/unused")


@dataclass(slots=True)
class RecordingDatabase:
    """Takes note of the statements and answers as an empty database would."""

    was_stopped: bool = False
    is_known: bool = True
    leads: bool = True
    failure: Exception | None = None
    # The answer to heartbeats only.
    refusal: Exception | None = None
    cancelled: Sequence[str] = ()
    silent: Sequence[str] = ()
    owned: Sequence[str] = ()
    steps: list[Step] = field(default_factory=list)

    def run(self, steps: Sequence[Step]) -> list[list[Any]]:
        self.steps += steps
        if self.failure is not None:
            raise self.failure
        if self.refusal is not None and any(statement is see_worker for statement, _ in steps):
            raise self.refusal
        answers: dict[Any, list[Any]] = {
            see_worker: [Presence("id", self.was_stopped, datetime.now(UTC))]
            if self.is_known
            else [],
            read_own_row: [OwnRow(self.was_stopped)] if self.is_known else [],
            try_lead: [Leads(self.leads)],
            find_cancel_requests: [TaskId(task_id) for task_id in self.cancelled],
            watch_workers: [
                WatchedWorker(worker_id, "1", "host", 8, None, None, True)
                for worker_id in self.silent
            ],
            find_owned: [TaskId(task_id) for task_id in self.owned],
        }
        return [answers.get(statement, []) for statement, _ in steps]

    def asked(self, statement: Any) -> list[Any]:
        return [named(step) for step in self.steps if step[0] is statement]


class QuietPool(RecordingPool):
    """Children that do nothing and weigh little."""

    @property
    def busy(self) -> dict[str, Any]:
        return {
            task_id: SimpleNamespace(assignment=attempt(task_id, generation), assigned_at=0.0)
            for task_id, generation, _ in self.dispatched
        }

    def summaries(self) -> list[ChildSummary]:
        return []


@dataclass(slots=True)
class QuietConnection:
    """A connection in the state that the test wants; it records calls."""

    receives: bool = True
    connected: bool = True
    breaks: int = 0
    deliveries: Deliveries = field(default_factory=lambda: Deliveries(Inbox(), 5.0))
    heartbeats: list[tuple[float, bool]] = field(default_factory=list)

    def check_notifications(self, now: float) -> bool:
        return self.receives

    def is_connected(self) -> bool:
        self.breaks += not self.connected
        return self.connected

    def note_heartbeat(self, now: float, *, called: bool) -> None:
        self.heartbeats.append((round(now), called))


@pytest.fixture(autouse=True)
def exact_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers send heartbeats a little early, at random; not here."""
    monkeypatch.setattr(heartbeat, "SPREAD", 0.0)


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(cast(ChildPool, QuietPool({1, 2})), Ledger())


def make_maintenance(
    dispatcher: Dispatcher,
    config: AppConfig | None = None,
    connection: QuietConnection | None = None,
) -> Maintenance:
    return Maintenance(
        config or AppConfig(broker=BROKER),
        WorkerConfig("app:app", 2, ["default"]),
        Identity(new_id(), "host", 7),
        dispatcher,
        cast(WorkerConnection, connection or QuietConnection()),
        Blocked(),
    )


def stopped(dispatcher: Dispatcher) -> list[tuple[str, str]]:
    return cast(QuietPool, dispatcher.pool).stopped


def perform(maintenance: Maintenance, database: RecordingDatabase, now: float) -> None:
    maintenance.perform(cast(Pipeline, database), now)


def shows_itself_at(maintenance: Maintenance, at: float) -> bool:
    """Whether the next heartbeat is due at this time and not before."""
    database = RecordingDatabase()
    perform(maintenance, database, at - 0.01)
    was_early = bool(database.asked(see_worker))
    perform(maintenance, database, at)
    return not was_early and len(database.asked(see_worker)) == 1


def test_something_regular_is_due_at_once_and_then_after_its_time() -> None:
    every = Timer(5.0)
    assert every.is_due(0.0)
    every.done(10.0)
    assert not every.is_due(14.9)
    assert every.is_due(15.0)


def test_the_sign_of_life_comes_first(dispatcher: Dispatcher) -> None:
    database = RecordingDatabase()
    perform(make_maintenance(dispatcher), database, 1.0)
    order = [statement for statement, _ in database.steps]
    assert order[:3] == [limit_lock_wait, register_worker, see_worker]
    assert store_worker_state in order


def test_an_idle_worker_shows_itself_in_time_and_a_busy_one_more_often(
    dispatcher: Dispatcher,
) -> None:
    maintenance = make_maintenance(dispatcher)
    perform(maintenance, RecordingDatabase(), 100.0)
    assert maintenance.next_at() == 102.5, "four times within worker_lost_after_ms"
    dispatcher.hand_out([claimed("a", 1)])
    assert shows_itself_at(maintenance, 100.0 + SEEN_SECONDS)


def test_a_worker_that_hardly_polls_is_seen_often_enough_to_count_as_alive(
    dispatcher: Dispatcher,
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
    maintenance = make_maintenance(dispatcher, config)
    perform(maintenance, RecordingDatabase(), 100.0)
    assert maintenance.next_at() == 100.75
    dispatcher.hand_out([claimed("a", 1)])
    assert shows_itself_at(maintenance, 100.75)


def test_a_worker_that_stops_its_tasks_early_shows_itself_more_often(
    dispatcher: Dispatcher,
) -> None:
    recovery = RecoveryConfig(stop_tasks_after_silence_ms=1_000)
    maintenance = make_maintenance(dispatcher, AppConfig(broker=BROKER, recovery=recovery))
    perform(maintenance, RecordingDatabase(), 100.0)
    assert maintenance.next_at() == 100.25
    dispatcher.hand_out([claimed("a", 1)])
    assert maintenance.next_at() == 100.25


def test_a_worker_that_others_declared_lost_recovers_no_task(dispatcher: Dispatcher) -> None:
    maintenance, database = (
        make_maintenance(dispatcher),
        RecordingDatabase(was_stopped=True, silent=["other"]),
    )
    for now in range(1, 20):
        perform(maintenance, database, now)
    assert maintenance.heartbeat.is_lost
    assert database.asked(close_lost_workers) == []
    database = RecordingDatabase()
    maintenance.heartbeat.register_again(cast(Pipeline, database))
    assert not maintenance.heartbeat.is_lost
    assert database.asked(register_worker)


def test_a_heartbeat_stores_whether_notifications_arrive_and_calls_if_none_did(
    dispatcher: Dispatcher,
) -> None:
    connection = QuietConnection()
    maintenance, database = (
        make_maintenance(dispatcher, connection=connection),
        RecordingDatabase(),
    )
    perform(maintenance, database, 100.0)
    connection.receives = False
    connection.deliveries.check.note_delivery()
    perform(maintenance, database, 105.0)
    beats = [(beat.hears, beat.calls) for beat in database.asked(see_worker)]
    assert beats == [(True, True), (False, False)]
    assert connection.heartbeats == [(100, True), (105, False)]


def test_a_call_of_which_nothing_was_stored_expects_no_echo(dispatcher: Dispatcher) -> None:
    connection = QuietConnection()
    perform(
        make_maintenance(dispatcher, connection=connection),
        RecordingDatabase(is_known=False),
        100.0,
    )
    assert connection.heartbeats == []


def test_a_change_of_reception_is_shown_by_a_snapshot_at_once(dispatcher: Dispatcher) -> None:
    connection = QuietConnection()
    maintenance, database = (
        make_maintenance(dispatcher, connection=connection),
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


def test_a_worker_watched_in_silence_is_closed_as_lost(dispatcher: Dispatcher) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase(silent=["other"])
    for now in range(100, 110):
        perform(maintenance, database, now)
        assert maintenance.next_at() == now + 1, "suspects are looked at every second"
    assert database.asked(close_lost_workers) == []
    perform(maintenance, database, 110.5)
    (closed,) = database.asked(close_lost_workers)
    assert (closed.worker_ids, closed.signs) == (("other",), ("1",))


def test_a_break_of_our_own_connection_starts_the_watch_again(dispatcher: Dispatcher) -> None:
    connection = QuietConnection()
    maintenance = make_maintenance(dispatcher, connection=connection)
    database = RecordingDatabase(silent=["other"])
    for now in range(100, 110):
        perform(maintenance, database, now)
    connection.breaks += 1
    for now in range(110, 120):
        perform(maintenance, database, now)
    assert database.asked(close_lost_workers) == []
    perform(maintenance, database, 120.5)
    assert database.asked(close_lost_workers)


def test_a_look_is_worth_nothing_when_our_own_lock_went_meanwhile(dispatcher: Dispatcher) -> None:
    connection = QuietConnection()
    maintenance = make_maintenance(dispatcher, connection=connection)
    database = RecordingDatabase(silent=["other"])
    for now in range(100, 110):
        perform(maintenance, database, now)

    def lose_the_lock(steps: Sequence[Step]) -> list[list[Any]]:
        connection.connected = False
        return database.run(steps)

    maintenance.perform(cast(Pipeline, SimpleNamespace(run=lose_the_lock)), 110)
    assert len(database.asked(watch_workers)) == 11
    assert database.asked(close_lost_workers) == []


def test_after_a_break_or_a_freeze_a_heartbeat_comes_before_anything_else(
    dispatcher: Dispatcher,
) -> None:
    connection = QuietConnection()
    maintenance = make_maintenance(dispatcher, connection=connection)
    database = RecordingDatabase()
    assert maintenance.heartbeat.must_come_first, "a worker registers before it claims"
    maintenance.heartbeat.show(cast(Pipeline, database), 100.0)
    assert not maintenance.heartbeat.must_come_first
    connection.breaks += 1
    assert maintenance.heartbeat.must_come_first
    maintenance.heartbeat.show(cast(Pipeline, database), 100.1)
    assert not maintenance.heartbeat.must_come_first
    maintenance.heartbeat.note_freeze()
    assert maintenance.heartbeat.must_come_first
    assert len(database.asked(see_worker)) == 2


def registered(
    dispatcher: Dispatcher, connection: QuietConnection | None = None
) -> tuple[Heartbeat, RecordingDatabase]:
    """The heartbeat of a worker whose first one was accepted."""
    heartbeat = make_maintenance(dispatcher, connection=connection).heartbeat
    database = RecordingDatabase()
    heartbeat.show(cast(Pipeline, database), 100.0)
    return heartbeat, database


@pytest.mark.parametrize("refused", ["sent", "carried"])
def test_a_break_counts_as_noticed_only_after_an_accepted_heartbeat(
    dispatcher: Dispatcher, refused: str
) -> None:
    connection = QuietConnection()
    heartbeat, database = registered(dispatcher, connection)
    connection.connected = False  # only the heartbeat finds out
    if refused == "sent":
        database.refusal = LockNotAvailable("locked")
        heartbeat.send(cast(Pipeline, database), 103.0)
    else:
        assert heartbeat.carried_signs(103.0)
    assert heartbeat.must_come_first
    connection.connected, database.refusal = True, None
    heartbeat.show(cast(Pipeline, database), 104.0)
    assert not heartbeat.must_come_first


@pytest.mark.parametrize("way", ["send", "show"])
def test_a_worker_whose_heartbeats_are_refused_notices_that_it_was_declared_lost(
    dispatcher: Dispatcher, way: str
) -> None:
    heartbeat, database = registered(dispatcher)
    database.refusal, database.was_stopped = LockNotAvailable("locked"), True
    getattr(heartbeat, way)(cast(Pipeline, database), 103.0)
    assert heartbeat.is_lost
    asked = len(database.asked(see_worker))
    heartbeat.send_if_late(cast(Pipeline, database), 103.1)
    assert len(database.asked(see_worker)) == asked, "the loss is dealt with first"
    for attempt_to_return in (heartbeat.register_again, lambda to: heartbeat.show(to, 104.0)):
        with pytest.raises(LockNotAvailable):
            attempt_to_return(cast(Pipeline, database))
        assert heartbeat.must_come_first, "nothing is claimed before the worker is registered"
    database.refusal, database.was_stopped = None, False
    heartbeat.show(cast(Pipeline, database), 105.0)
    assert not heartbeat.must_come_first
    assert database.steps[-3][0] is register_worker


def test_the_rest_after_a_slow_refusal_ends_with_an_accepted_heartbeat() -> None:
    clock = HeartbeatClock(2.0, 2.5, 1.0, asked_at=time.monotonic() - 5.0)
    clock.note_refusal(100.0)
    assert clock.due_at(is_idle=False, has_suspects=False) >= 150.0
    clock.note_accepted(101.0)
    assert clock.due_at(is_idle=False, has_suspects=False) == 103.0


@pytest.mark.parametrize("row", ["open", "deleted", "unreadable"])
def test_a_worker_whose_heartbeats_are_refused_is_not_lost_unless_its_row_is_closed(
    dispatcher: Dispatcher, row: str
) -> None:
    heartbeat, database = registered(dispatcher)
    database.refusal, database.is_known = LockNotAvailable("locked"), row != "deleted"
    if row == "unreadable":
        database.failure = database.refusal
    heartbeat.send(cast(Pipeline, database), 103.0)
    assert not heartbeat.is_lost
    assert not heartbeat.must_come_first, "its tasks go on"
    assert len(database.asked(read_own_row)) == 1
    with pytest.raises(LockNotAvailable):
        heartbeat.show(cast(Pipeline, database), 104.0)
    assert not heartbeat.is_lost


def test_after_a_break_the_children_of_tasks_owned_elsewhere_are_killed(
    dispatcher: Dispatcher,
) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase(owned=["a"])
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2), claimed("c")])
    maintenance.heartbeat.show(cast(Pipeline, database), 100.0)
    (asked,) = database.asked(find_owned)
    assert asked.ids == ["a", "b", "c"]
    assert cast(QuietPool, dispatcher.pool).killed == ["b"]
    assert dispatcher.ledger.count(WAITING) == 0


def test_a_freeze_during_the_check_of_ownership_leads_to_another_one_at_once(
    dispatcher: Dispatcher,
) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase(owned=["a", "b"])
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])

    def freeze(steps: Sequence[Step]) -> list[list[Any]]:
        answers = database.run(steps)
        if steps[0][0] is find_owned and database.owned != ["a"]:
            database.owned = ["a"]
            maintenance.heartbeat.note_freeze()
        return answers

    maintenance.heartbeat.show(cast(Pipeline, SimpleNamespace(run=freeze)), 100.0)
    assert cast(QuietPool, dispatcher.pool).killed == ["b"]
    assert len(database.asked(see_worker)) == len(database.asked(find_owned)) == 2
    assert not maintenance.heartbeat.must_come_first


def test_idle_workers_send_heartbeats_early_by_different_times(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SPREAD", 0.1)
    due_at = set()
    for _ in range(20):
        maintenance = make_maintenance(dispatcher)
        perform(maintenance, RecordingDatabase(), 100.0)
        due_at.add(maintenance.heartbeat.due_at())
    assert len(due_at) > 1
    assert all(102.25 <= at <= 102.5 for at in due_at)


def test_a_late_heartbeat_comes_before_the_turn_that_delayed_it(dispatcher: Dispatcher) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase()
    maintenance.heartbeat.show(cast(Pipeline, database), 100.0)
    maintenance.heartbeat.send_if_late(cast(Pipeline, database), 103.4)
    assert len(database.asked(see_worker)) == 1, "due, but a turn or a look ahead may carry it"
    maintenance.heartbeat.send_if_late(cast(Pipeline, database), 103.5)
    assert len(database.asked(see_worker)) == 2


def test_a_check_of_ownership_that_failed_is_done_again(dispatcher: Dispatcher) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase(owned=["a"])
    dispatcher.hand_out([claimed("a", 1)])
    database.failure = psycopg.OperationalError("connection lost")
    with pytest.raises(psycopg.OperationalError):
        maintenance.heartbeat.show(cast(Pipeline, database), 100.0)
    assert maintenance.heartbeat.must_come_first


def test_leases_are_renewed_for_what_waits_and_nothing_else(dispatcher: Dispatcher) -> None:
    maintenance = make_maintenance(
        dispatcher, AppConfig(broker=BROKER, prefetch_buffer=2, claim_lease_ms=10_000)
    )
    database = RecordingDatabase()
    perform(maintenance, database, 0.0)
    assert database.asked(renew_claims) == []
    dispatcher.hand_out([claimed("a", 1), claimed("b")])
    perform(maintenance, database, 4.9)
    assert database.asked(renew_claims) == []
    perform(maintenance, database, 5.0)
    (lease,) = database.asked(renew_claims)
    assert (lease.ids, lease.generations, lease.lease_ms) == (["b"], [1], 10_000)


def test_retention_goes_on_soon_when_there_is_more(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [True, False]
    asked: list[float] = []

    def sweep(*_: object) -> bool:
        asked.append(1)
        return more.pop(0)

    monkeypatch.setattr(maintenance_module, "sweep", sweep)
    maintenance = make_maintenance(dispatcher)
    for now in (0.0, 0.9, 1.0, 5.0, 3_600.0):
        perform(maintenance, RecordingDatabase(), now)
    assert len(asked) == 2


def test_paused_runs_are_looked_at_as_often_as_abandoned_tasks(dispatcher: Dispatcher) -> None:
    recovery = RecoveryConfig(
        check_interval_ms=1_000, paused_workflow_auto_cancel_after=timedelta(hours=1)
    )
    maintenance = make_maintenance(dispatcher, AppConfig(broker=BROKER, recovery=recovery))
    database = RecordingDatabase()
    for now, looks in ((100.0, 1), (100.5, 1), (101.5, 2)):
        perform(maintenance, database, now)
        allowed = [one.max_paused_seconds for one in database.asked(find_paused_runs)]
        assert allowed == [3600.0] * looks
    silent = RecordingDatabase()
    perform(make_maintenance(dispatcher), silent, 100.0)
    assert silent.asked(find_paused_runs) == []


PING = json.dumps(
    {"reply_channel": PONG_CHANNEL_PREFIX + "0123456789abcdef" * 2, "correlation_id": "1"}
)


@pytest.mark.parametrize("error", [psycopg.DataError("too long"), UnicodeError("no such letter")])
def test_a_ping_that_cannot_be_answered_harms_nobody(
    dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    database = RecordingDatabase(failure=error)
    maintenance = make_maintenance(dispatcher)
    maintenance.pings = [PING]
    maintenance.answer_pings(cast(Pipeline, database))
    assert database.asked(send_notification)
    assert maintenance.pings == []
    assert caplog.messages == [f"a ping could not be answered: {error}"]


def test_a_ping_in_an_outage_is_left_to_the_reconnect(dispatcher: Dispatcher) -> None:
    database = RecordingDatabase(failure=psycopg.OperationalError("connection lost"))
    maintenance = make_maintenance(dispatcher)
    maintenance.pings = [PING]
    with pytest.raises(psycopg.OperationalError):
        maintenance.answer_pings(cast(Pipeline, database))
    assert maintenance.pings == [PING]


def test_a_hint_is_looked_into_at_once_and_only_what_the_table_says_is_stopped(
    dispatcher: Dispatcher,
) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase()
    perform(maintenance, database, 100.0)
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])
    perform(maintenance, database, 100.1)
    assert database.asked(find_cancel_requests) == []
    maintenance.note_cancels({"a", "b"})
    assert maintenance.next_at() <= 100.1
    database.cancelled = ["a"]
    perform(maintenance, database, 100.1)
    assert stopped(dispatcher) == [("a", STOPPED_BY_CANCEL)]
    assert maintenance.next_at() > 100.1
    assert database.asked(send_heartbeats) == [], "a hint must not cause a write"


def test_cancels_of_other_workers_tasks_cost_nothing(dispatcher: Dispatcher) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase()
    perform(maintenance, database, 100.0)
    dispatcher.hand_out([claimed("a", 1)])
    maintenance.note_cancels({"other"})
    assert maintenance.next_at() > 100.1
    perform(maintenance, database, 100.1)
    assert database.asked(find_cancel_requests) == []


def test_a_look_for_cancels_that_failed_is_done_again(dispatcher: Dispatcher) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase()
    perform(maintenance, database, 100.0)
    dispatcher.hand_out([claimed("a", 1)])
    maintenance.note_cancels({"a"})
    database.failure = psycopg.OperationalError("connection lost")
    with pytest.raises(psycopg.OperationalError):
        perform(maintenance, database, 100.1)
    database.failure, database.cancelled = None, ["a"]
    perform(maintenance, database, 100.2)
    assert stopped(dispatcher) == [("a", STOPPED_BY_CANCEL)]


def test_progress_is_stored_once_and_looked_for_often_while_its_task_runs(
    dispatcher: Dispatcher,
) -> None:
    maintenance, database = make_maintenance(dispatcher), RecordingDatabase()
    perform(maintenance, database, 100.0)
    assert store_progress not in [statement for statement, _ in database.steps]
    assert maintenance.next_at() > 100.0 + PROGRESS_SECONDS, (
        "an idle worker does not look for reports"
    )
    dispatcher.hand_out([claimed("a", 1)])
    assert maintenance.next_at() == 100.0 + PROGRESS_SECONDS, (
        "the first report of a task is not later"
    )
    reports = cast(QuietPool, dispatcher.pool).unstored_progress
    reports["a"] = ProgressReport("a", 1, 3.0, None, "three")
    perform(maintenance, database, 101.0)
    perform(maintenance, database, 102.0)
    stored = [params[1:] for statement, params in database.steps if statement is store_progress]
    assert stored == [(("a",), (1,), (3.0,), (None,), ("three",))]
    assert maintenance.next_at() == 102.0 + PROGRESS_SECONDS


def end_one(dispatcher: Dispatcher) -> None:
    task = claimed("a", 1)
    dispatcher.tally.note_ends([(Outcome.completed(task, "1"), task, 0.1)])


def test_an_idle_worker_stores_no_counts(dispatcher: Dispatcher) -> None:
    database, maintenance = RecordingDatabase(), make_maintenance(dispatcher)
    for seconds in range(0, 600, 10):
        perform(maintenance, database, time.monotonic() + seconds)
    assert database.asked(see_worker)
    assert not database.asked(add_measures)


def test_counts_are_stored_once_half_a_minute_after_the_first(dispatcher: Dispatcher) -> None:
    database, maintenance = RecordingDatabase(), make_maintenance(dispatcher)
    perform(maintenance, database, time.monotonic())
    end_one(dispatcher)
    end_one(dispatcher)
    perform(maintenance, database, time.monotonic() + FLUSH_SECONDS - 2)
    assert not database.asked(add_measures)
    assert maintenance.next_at() <= dispatcher.tally.flush_at
    for _ in range(2):
        perform(maintenance, database, time.monotonic() + FLUSH_SECONDS + 1)
    (counts,) = database.asked(add_measures)
    assert counts.done == [2]


@pytest.mark.parametrize(
    "failure", [psycopg.OperationalError("gone"), psycopg.errors.InsufficientPrivilege("no")]
)
def test_counts_whose_commit_is_in_doubt_are_never_stored_again(
    dispatcher: Dispatcher, failure: psycopg.Error
) -> None:
    database, maintenance = RecordingDatabase(), make_maintenance(dispatcher)
    perform(maintenance, database, time.monotonic())
    end_one(dispatcher)
    database.failure = failure
    with suppress(psycopg.OperationalError):
        maintenance._flush_tally(cast(Pipeline, database))
    assert len(database.asked(add_measures)) == 1
    database.failure = None
    perform(maintenance, database, time.monotonic() + FLUSH_SECONDS + 1)
    assert len(database.asked(add_measures)) == 1
