"""Which tasks a worker claims, and how many."""

from __future__ import annotations

from types import ModuleType

import psycopg
import pytest

from horsies.db.migrate import apply_migrations
from tests.support.database import Database
from tests.support.rows import insert_raw
from tests.support.tables import attempts, count, tasks, wait_for_status, wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal


def test_a_small_claim_batch_does_not_wait_for_the_poll(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    programs.noop.send_many(programs.noop.bind() for _ in range(40)).unwrap()
    fleet.start("--max-claim-batch", "1", processes=4, config=HARDLY_POLLS)
    wait_until_empty(connection)
    assert count(connection, "COMPLETED") == 40


def test_a_worker_holds_no_more_than_its_limit(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    programs.sleep.send_many(programs.sleep.bind(0.02) for _ in range(20)).unwrap()
    fleet.start("--max-claim-per-worker", "1", processes=4, config=HARDLY_POLLS)
    most = 0
    while count(connection, "PENDING", "RUNNING"):
        most = max(most, count(connection, "RUNNING"))
    assert most == 1


def test_tasks_start_by_priority_and_then_in_the_order_they_were_sent(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    for label, priority in [("c", 50), ("d", 50), ("e", 100), ("a", 1), ("b", 1)]:
        programs.sleep.with_options(priority=priority).send(0, label).unwrap()
    fleet.start(processes=1)
    wait_until_empty(connection)
    assert [line.label for line in journal.lines("start")] == ["a", "b", "c", "d", "e"]


@pytest.mark.pooled
def test_two_workers_share_the_queue_and_run_everything_once(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    fleet.start()
    fleet.start()
    programs.sleep.send_many(programs.sleep.bind(0.01) for _ in range(200)).unwrap()
    wait_until_empty(connection)
    assert len(journal.lines("start")) == len(journal.lines("end")) == 200
    assert {row.generation for row in tasks(connection)} == {1}
    assert len({one.worker_id for one in attempts(connection)}) == 2


def test_a_worker_with_a_backlog_and_no_idle_child_sleeps(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(processes=1)
    programs.sleep.send(1.0).unwrap()
    wait_until(lambda: journal.lines("start"))
    programs.noop.send_many(programs.noop.bind() for _ in range(50)).unwrap()
    before = worker.cpu_seconds()
    wait_until(lambda: journal.lines("end"))
    assert worker.cpu_seconds() - before < 0.2
    wait_until_empty(connection)


@pytest.mark.pooled
def test_large_arguments_and_results_pass(fleet: Fleet, programs: ModuleType) -> None:
    fleet.start()
    size = 4_000_000
    sent = [programs.repeat_text.send("x" * size, 2).unwrap() for _ in range(4)]
    for one in sent:
        assert len(one.get(30_000).ok_value) == 2 * size


def test_an_empty_database_is_made_ready_by_the_first_worker(
    fleet: Fleet, database_url: str
) -> None:
    workers = [fleet.start(database_url=database_url, ready=False) for _ in range(2)]
    for worker in workers:
        worker.wait_until_ready()
    with psycopg.connect(database_url, autocommit=True) as connection:
        task_id = insert_raw(connection, "add", "[20, 22]")
        wait_for_status(connection, task_id, "COMPLETED")
    assert [worker.stop() for worker in workers] == [0, 0]


def test_a_schema_from_a_newer_release_is_refused(fleet: Fleet, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        apply_migrations(connection)
        connection.execute("INSERT INTO horsies_migrations (version, name) VALUES (9999, 'later')")
    worker = fleet.start(database_url=database_url, ready=False)
    assert worker.wait() == 1
    assert "The database schema is version 9999" in worker.log()
    assert "Traceback" not in worker.log()
