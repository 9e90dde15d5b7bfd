"""PostgreSQL crashes again and again under load: every accepted task ends once, nothing else exists."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg
import pytest

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult
from horsies.result import is_err, is_ok
from tests.support.private_server import PrivateServer
from tests.support.tables import (
    WITNESS,
    assert_each_ended_once,
    attempts,
    count,
    tasks,
    wait_until_empty,
)
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Route

CYCLES = int(os.environ.get("HORSIES_CRASH_CYCLES", "6"))
QUICK = {"resilience": {"db_retry_initial_ms": 100, "db_retry_max_ms": 1_000}}


@dataclass(slots=True)
class Producer:
    """Sends without pause until it is stopped; a send in doubt is repeated until it is decided."""

    route: Route
    accepted: list[str] = field(default_factory=list)
    in_doubt: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        broker = PostgresConfig(database_url=self.route.url, **self.route.broker)
        app = Horsies(AppConfig(broker=broker))

        @app.task("sleep")
        def sleep(seconds: float, label: str = "") -> TaskResult[str, TaskError]:
            raise NotImplementedError

        while not self.stopped.wait(0.005):
            sent = sleep.send(0.01)
            while is_err(sent):
                assert sent.err_value.retryable, sent.err_value
                self.in_doubt += 1
                self.stopped.wait(0.02)
                sent = sleep.retry_send(sent.err_value)
            assert is_ok(sent)
            self.accepted.append(sent.ok_value.task_id)
        app.close()


@contextmanager
def sending(route: Route) -> Iterator[Producer]:
    """A producer in its own thread; at the end every send that it began is decided."""
    producer = Producer(route)
    thread = threading.Thread(target=producer.run)
    thread.start()
    try:
        yield producer
    finally:
        producer.stopped.set()
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.slow
def test_crashes_of_the_database_under_load_lose_nothing_and_repeat_nothing(
    own_server: PrivateServer, own_fleet: Fleet
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    dice = random.Random(seed)
    print(f"seed {seed}")
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute(WITNESS)
    workers = [own_fleet.start(config=QUICK, ready=False) for _ in range(2)]
    for worker in workers:
        worker.wait_until_ready()
    with sending(own_fleet.way) as producer:
        for _ in range(CYCLES):
            wanted = len(own_fleet.journal.lines()) + dice.randint(1, 60)
            wait_until(lambda wanted=wanted: len(own_fleet.journal.lines()) >= wanted)  # type: ignore[misc]
            own_server.crash()
            own_server.start()
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        wait_until_empty(connection)
        check_books(connection, own_fleet, producer)
    assert not any(worker.events("workers_lost") for worker in workers)
    assert [worker.stop() for worker in workers] == [0, 0]


def check_books(
    connection: psycopg.Connection[tuple[object, ...]], fleet: Fleet, producer: Producer
) -> None:
    """Compare the accepted sends, the stored rows, and the journal of the tasks."""
    rows = tasks(connection)
    print(f"{len(rows)} tasks, {producer.in_doubt} sends in doubt, {CYCLES} crashes")
    assert len(producer.accepted) == len(set(producer.accepted))
    assert {row.id for row in rows} == set(producer.accepted)
    assert count(connection, "COMPLETED") == len(rows)
    assert_each_ended_once(connection)
    recorded = Counter((one.task_id, one.attempt) for one in attempts(connection))
    for what in ("start", "end"):
        written = Counter((line.task_id, line.attempt) for line in fleet.journal.lines(what))
        assert written == recorded
