"""What a worker takes, and how much of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psycopg

from tests.e2e.fleet import Fleet, Journal
from tests.e2e.tables import attempts, count, tasks, wait_until_empty

Database = psycopg.Connection[Any]

HARDLY_POLLS = {"resilience": {"notify_poll_interval_ms": 300_000}}


def test_a_small_claim_batch_does_not_wait_for_the_poll(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    programs.noop.send_many(programs.noop.bind() for _ in range(40)).unwrap()
    fleet.start("--max-claim-batch", "1", processes=4, config=HARDLY_POLLS)
    wait_until_empty(connection, 5)
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
