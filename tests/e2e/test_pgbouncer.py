"""Workers behind PgBouncer in transaction mode; what single tasks do there is in test_outcomes."""

from __future__ import annotations

import signal
from collections import Counter
from types import ModuleType

from tests.support.database import Database, backends, terminate
from tests.support.pooled_workers import pooled, pooler_before
from tests.support.proxy import outage
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    task,
    wait_until_empty,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal

SILENCE = "interval '5 seconds'"


def test_a_worker_that_cannot_listen_is_refused_and_told_what_to_set(fleet: Fleet) -> None:
    with pooled(fleet.database_url) as (pooled_url, broker):
        # Not the same text, but the same way: through the pooler.
        disguised = f"{pooled_url}?connect_timeout=9"
        config = {"broker": broker | {"session_database_url": disguised}}
        worker = fleet.start(database_url=pooled_url, config=config, ready=False)
        assert worker.wait(30) == 1
    assert "session_database_url" in worker.log()


def test_a_pooled_worker_without_a_session_url_is_refused_before_it_starts(fleet: Fleet) -> None:
    with pooled(fleet.database_url) as (pooled_url, _):
        config = {"broker": {"pgbouncer_transaction_mode": True}}
        worker = fleet.start(database_url=pooled_url, config=config, ready=False)
        assert worker.wait(30) == 1
    assert "session_database_url" in worker.log()


def test_pooled_workers_share_the_load_wake_up_and_cancel(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with pooled(fleet.database_url) as (pooled_url, broker), witnessed(connection):
        config = HARDLY_POLLS | {"broker": broker}
        workers = [
            fleet.start(database_url=pooled_url, config=config, ready=False) for _ in range(2)
        ]
        for worker in workers:
            worker.wait_until_ready()
        programs.sleep.send_many(programs.sleep.bind(0.005) for _ in range(300)).unwrap()
        wait_until_empty(connection)
        assert count(connection, "COMPLETED") == 300
        long = programs.sleep_and_clean_up.send(600).unwrap()
        wait_until(lambda: journal.lines("start", long.task_id))
        assert programs.app.cancel_task(long.task_id).unwrap()
        assert long.get(30_000).err_value.error_code == "TASK_CANCELLED"
        assert_each_ended_once(connection)
        assert len(backends(connection, "horsies:listener")) == 2
        assert [worker.stop() for worker in workers] == [0, 0]
        fleet.destroy()


def test_an_outage_that_the_pooler_hides_makes_nobody_look_dead(
    fleet: Fleet,
    journal: Journal,
    programs: ModuleType,
    connection: Database,
    server_url: str,
) -> None:
    with pooled(fleet.database_url) as (pooled_url, broker):
        config = {
            "broker": broker | {"tcp_user_timeout_ms": 30_000},
            "resilience": {"db_retry_max_ms": 500},
        }
        workers = [
            fleet.start(processes=1, database_url=pooled_url, config=config) for _ in range(2)
        ]
        sent = [programs.sleep.send(10).unwrap() for _ in workers]
        wait_until(lambda: len(journal.lines("start")) == 2)
        with outage(server_url, connection):
            # The locks of both are free, and both are silent for longer than the living may be.
            silence = (
                f"SELECT 1 WHERE (SELECT max(seen_at) FROM horsies_workers) < now() - {SILENCE}"
            )
            wait_until(lambda: connection.execute(silence).fetchone())
        for one in sent:
            assert one.get(30_000).ok_value == "done"
            assert task(connection, one.task_id).generation == 1
        assert len(journal.lines("start")) == 2
        assert not any(one.events("workers_lost") for one in workers)
        fleet.destroy()


def test_a_killed_pooled_worker_is_found_by_its_session_lock(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with pooled(fleet.database_url) as (pooled_url, broker):
        # A server that has only just been started must not keep the dead waiting.
        config = {"broker": broker, "resilience": {"db_retry_max_ms": 500}}
        victim = fleet.start(database_url=pooled_url, config=config)
        left = programs.sleep.send(600).unwrap()
        wait_until(lambda: journal.lines("start"))
        fleet.start(database_url=pooled_url, config=config)
        victim.signal(signal.SIGKILL)
        assert left.get(30_000).err_value.error_code == "WORKER_CRASHED"
        assert [one.outcome for one in attempts(connection)] == ["WORKER_FAILURE"]
        fleet.destroy()


def test_kills_of_workers_of_the_pooler_and_of_its_sessions_lose_and_repeat_nothing(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    with pooler_before(fleet.database_url) as (pooler, broker), witnessed(connection):
        resilience = {"db_retry_initial_ms": 100, "db_retry_max_ms": 500}
        config = {"broker": broker, "resilience": resilience}
        workers = [fleet.start(database_url=pooler.url, config=config) for _ in range(2)]
        programs.sleep_again.send_many([programs.sleep_again.bind(0.02)] * 300).unwrap()
        for number in range(1, 5):
            goal = number * 50
            wait_until(lambda goal=goal: count(connection, "COMPLETED") >= goal)  # type: ignore[misc]
            if number % 2:
                pooler.kill()
                pooler.start()
            else:
                terminate(connection, "horsies:turn")
        victim, survivor = workers
        victim.signal(signal.SIGKILL)
        wait_until_empty(connection)
        assert count(connection, "COMPLETED") == 300
        assert_each_ended_once(connection)
        starts = Counter((line.task_id, line.attempt) for line in journal.lines("start"))
        assert set(starts.values()) == {1}, "an attempt began twice"
        lost = [one for one in attempts(connection) if one.outcome != "COMPLETED"]
        # One per child of the killed worker, and none for the pooler or its sessions.
        assert len(lost) <= 2
        assert survivor.stop() == 0
        fleet.destroy()
