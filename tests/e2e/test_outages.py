"""Connections break at the worst moments; nothing is lost and nothing happens twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psycopg
import pytest

from horsies.logs import EventName
from tests.support.database import (
    Database,
    backends,
    new_sessions_with,
    terminate,
    terminate_others,
)
from tests.support.proxy import Proxy, outage
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    task,
    tasks,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, is_gone

QUICK_RETRIES = {"resilience": {"db_retry_initial_ms": 100, "notify_poll_interval_ms": 300_000}}
# A proxy that waits for an answer to swallow holds notifications back as well.
QUICK_POLLS = {"resilience": {"db_retry_initial_ms": 100, "notify_poll_interval_ms": 1_000}}


@pytest.mark.pooled
@pytest.mark.parametrize("sessions", [1, 2])
def test_broken_connections_under_load_lose_nothing_and_repeat_nothing(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, sessions: int
) -> None:
    worker = fleet.start(processes=4, config=QUICK_RETRIES | fleet.sessions(sessions))
    with witnessed(connection):
        programs.sleep.send_many(programs.sleep.bind(0.01) for _ in range(400)).unwrap()
        for number in range(1, 8):
            goal = number * 50
            wait_until(lambda goal=goal: count(connection, "COMPLETED") >= goal)  # type: ignore[misc]
            terminate(connection, "horsies:turn")
            if number % 2:
                terminate(connection, "horsies:listener")
        wait_until_empty(connection)
        assert_each_ended_once(connection)
        assert count(connection, "COMPLETED") == 400
    starts = [line.task_id for line in journal.lines("start")]
    assert len(starts) == len(set(starts)) == 400
    # A pooler mends a server connection that is cut while it rests without a word.
    assert fleet.is_pooled or len(worker.events("database_back")) >= 3
    assert worker.stop() == 0


@pytest.mark.parametrize("sessions", [1, 2])
def test_wake_ups_work_again_after_the_session_that_listens_was_cut(
    fleet: Fleet, programs: ModuleType, connection: Database, sessions: int
) -> None:
    worker = fleet.start(config=QUICK_RETRIES | fleet.sessions(sessions))
    name = fleet.listening(sessions)
    back: EventName = "database_back" if name == "horsies:turn" else "notifications_back"
    assert programs.noop.send().unwrap().get(30_000).is_ok()
    for times in (1, 2):
        assert len(terminate(connection, name)) == 1
        worker.wait_for(back, times=times)
        sent = programs.noop.send().unwrap()
        assert sent.get(30_000).is_ok(), "the next poll is five minutes away"


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_task_sent_while_the_worker_was_deaf_is_found_without_the_poll(
    fleet: Fleet, programs: ModuleType, connection: Database, sessions: int
) -> None:
    fleet.start(config=QUICK_RETRIES | fleet.sessions(sessions))
    assert len(terminate(connection, fleet.listening(sessions))) == 1
    sent = programs.noop.send().unwrap()
    assert sent.get(30_000).is_ok()


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_transaction_that_fails_costs_no_session_and_no_running_task(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, sessions: int
) -> None:
    resilience = {**QUICK_RETRIES["resilience"], "statement_timeout_ms": 1_000}
    worker = fleet.start(config={"resilience": resilience} | fleet.sessions(sessions))
    sent = programs.sleep.send(1.5).unwrap()
    wait_until(lambda: journal.lines("start"))
    before = backends(connection, fleet.listening(sessions))
    with connection.transaction():
        connection.execute("LOCK TABLE horsies_tasks")
        wait_until(lambda: worker.log().count("statement timeout") >= 3, 30, worker.log)
    assert sent.get(30_000).is_ok()
    assert backends(connection, fleet.listening(sessions)) == before
    assert len(attempts(connection, sent.task_id)) == 1
    assert worker.stop() == 0


def test_a_worker_waits_for_a_server_that_is_read_only(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(config=QUICK_RETRIES)
    assert programs.noop.send().unwrap().get(30_000).is_ok()
    with new_sessions_with(connection, "default_transaction_read_only", "on"):
        terminate_others(connection)
        wait_until(lambda: worker.log().count("takes only reads") >= 2, 30, worker.log)
    # A turn that has nothing to write succeeds now and then, and the database counts as back.
    known = len(worker.events("database_back"))
    terminate_others(connection)  # a pooler would go on with sessions that may only read
    worker.wait_for("database_back", times=known + 1)
    programs.app.close()  # its own connection was cut twice within a moment, which it tells
    assert programs.noop.send().unwrap().get(30_000).is_ok()
    assert worker.stop() == 0


@pytest.mark.pooled
def test_results_wait_for_a_database_that_is_away(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, server_url: str
) -> None:
    worker = fleet.start(config=QUICK_RETRIES)
    sent = [programs.rest_until_released.send("outage").unwrap() for _ in range(2)]
    wait_until(lambda: len(journal.lines("start")) == 2)
    with outage(server_url, connection):
        journal.release("outage")
        wait_until(lambda: len(journal.lines("end")) == 2)
        worker.wait_for("database_lost", times=3)
        assert count(connection, "RUNNING") == 2
    for one in sent:
        assert one.get(30_000).ok_value == "done"
        assert len(attempts(connection, one.task_id)) == 1
    assert len(journal.lines("start")) == 2


def test_a_worker_that_starts_before_its_database_waits_for_it(
    fleet: Fleet, programs: ModuleType, connection: Database, server_url: str
) -> None:
    with outage(server_url, connection):
        worker = fleet.start(config=QUICK_RETRIES, ready=False)
        worker.wait_for("database_lost", times=2)
    worker.wait_until_ready()
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3


def test_a_worker_told_to_give_up_gives_up(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, server_url: str
) -> None:
    limits = {"db_retry_initial_ms": 100, "db_retry_max_attempts": 2}
    worker = fleet.start(config={"resilience": limits | {"notify_poll_interval_ms": 1_000}})
    with outage(server_url, connection):
        assert worker.wait() == 1
    assert "the database cannot be used" in worker.log()
    assert all(map(is_gone, worker.seen_pids))


@pytest.mark.pooled
def test_a_claim_whose_answer_got_lost_goes_back_and_is_claimed_again(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with Proxy(fleet.way.url) as proxy:
        config = QUICK_POLLS | {"broker": fleet.way.broker}
        worker = fleet.start(config=config, database_url=proxy.url)
        proxy.swallow_answer_with(b"marked")
        with witnessed(connection):
            sent = programs.sleep.send(0.05, "marked").unwrap()
            assert sent.get(30_000).ok_value == "done"
            assert proxy.swallowed.is_set()
            assert_each_ended_once(connection)
        row = task(connection, sent.task_id)
        assert (row.status, row.generation, row.retry_count) == ("COMPLETED", 2, 0)
        assert [line.attempt for line in journal.lines("start")] == [1]
        assert worker.stop() == 0


def test_an_outcome_whose_answer_got_lost_is_recorded_once(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with Proxy(fleet.way.url) as proxy:
        config = QUICK_POLLS | {"broker": fleet.way.broker}
        worker = fleet.start(config=config, database_url=proxy.url)
        with witnessed(connection):
            sent = programs.rest_until_released.send("swallow").unwrap()
            wait_until(lambda: journal.lines("start"))
            proxy.swallow_answer_with(sent.task_id.encode())
            journal.release("swallow")
            assert sent.get(30_000).ok_value == "done"
            wait_until(proxy.swallowed.is_set)
            assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
            assert_each_ended_once(connection)
        assert task(connection, sent.task_id).generation == 1
        assert worker.stop() == 0


@contextmanager
def claim_cut_under_way(fleet: Fleet, connection: Database) -> Iterator[None]:
    """Cut the connection of a worker's claim while it waits for the table; a pooler would hide it else."""
    with connection.transaction(), psycopg.connect(fleet.database_url, autocommit=True) as other:
        connection.execute("LOCK TABLE horsies_tasks")
        yield
        wait_until(lambda: cut_what_waits(other))


def cut_what_waits(connection: Database) -> bool:
    """Wake the worker and cut the turns that wait for the table; tell whether one was a claim."""
    connection.execute("NOTIFY task_queue_default")
    waiting = connection.execute(
        "SELECT query LIKE '%horsies_claim%', pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'horsies:turn' "
        "AND wait_event_type = 'Lock'"
    )
    return any(is_claim for is_claim, _ in waiting.fetchall())


def test_a_claim_nobody_remembers_is_released_when_the_connection_comes_back(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    fleet.start(config=QUICK_RETRIES)
    first = programs.noop.send().unwrap()
    assert first.get(30_000).is_ok()
    worker_id = task(connection, first.task_id).claimed_by_worker_id
    kept = programs.noop.schedule(600).unwrap()
    stopped = programs.noop.schedule(600).unwrap()
    with claim_cut_under_way(fleet, connection):
        connection.execute(
            "UPDATE horsies_tasks SET status = 'RUNNING', generation = 1, claimed_by_worker_id = %s, "
            "enqueued_at = now(), cancel_requested_at = CASE WHEN id = %s THEN now() END "
            "WHERE id = ANY(%s::uuid[])",
            (worker_id, stopped.task_id, [kept.task_id, stopped.task_id]),
        )
    assert kept.get(30_000).is_ok()
    assert task(connection, kept.task_id).generation == 2
    assert stopped.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert attempts(connection, stopped.task_id) == []


# An index that cannot read the text.
REFUSE_POISON = (
    "CREATE INDEX e2e_refuse ON horsies_tasks "
    "((CASE WHEN result LIKE '%poison%' THEN result::integer END))"
)


def test_an_outcome_the_database_refuses_costs_only_its_own_text(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    connection.execute(REFUSE_POISON)
    try:
        worker = fleet.start(processes=4)
        poison = [programs.explode.send("poison").unwrap() for _ in range(3)]
        good = [programs.noop.send().unwrap() for _ in range(20)]
        assert all(one.get(30_000).is_ok() for one in good)
        for one in poison:
            assert one.get(30_000).err_value.error_code == "WORKER_SERIALIZATION_ERROR"
            (attempt,) = attempts(connection, one.task_id)
            assert (attempt.outcome, attempt.error_code) == ("FAILED", "WORKER_SERIALIZATION_ERROR")
        assert {row.status for row in tasks(connection)} == {"COMPLETED", "FAILED"}
        assert worker.stop() == 0
    finally:
        connection.execute("DROP INDEX e2e_refuse")
