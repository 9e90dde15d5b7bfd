"""The rate of a queue, kept by workers that sleep until the next start."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet

APPLICATION = "tests.support.apps.rated:app"
TASKS = 15


@pytest.fixture
def rated(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.rated")
    yield module
    module.app.close()


def send(rated: ModuleType) -> None:
    rated.call.send_many(rated.call.bind(number) for number in range(TASKS)).unwrap()
    rated.plain.send_many(rated.plain.bind(number) for number in range(TASKS)).unwrap()


def starts(connection: Database, queue: str) -> list[float]:
    query = """SELECT extract(epoch FROM claimed_at)::float8 FROM horsies_tasks
        WHERE queue_name = %s ORDER BY 1"""
    return [at for (at,) in connection.execute(query, (queue,))]


def are_completed(connection: Database) -> bool:
    found = connection.execute("SELECT FROM horsies_tasks WHERE status = 'COMPLETED'")
    return found.rowcount == 2 * TASKS


def assert_kept(connection: Database, rated: ModuleType) -> None:
    limited = starts(connection, "api")
    # The burst of two comes at once, every other task at its own time. Claims are stamped some ms late, the
    # first ones of new sessions more; the most punctual one tells when the first one was due.
    seconds = 1 / rated.PER_SECOND
    began = min(at - max(place - 1, 0) * seconds for place, at in enumerate(limited[:5]))
    assert limited[-1] - began >= (TASKS - 2) * seconds - 0.05


def test_workers_start_tasks_at_the_rate_without_polling(
    fleet: Fleet, rated: ModuleType, connection: Database
) -> None:
    workers = [fleet.start(application=APPLICATION) for _ in range(2)]
    send(rated)
    wait_until(lambda: are_completed(connection))
    assert_kept(connection, rated)
    assert starts(connection, "open")[-1] < starts(connection, "api")[-1]
    assert all(worker.process.poll() is None for worker in workers)


def test_a_burst_worker_ends_when_the_rated_queue_is_empty(
    fleet: Fleet, rated: ModuleType, connection: Database
) -> None:
    send(rated)
    worker = fleet.start("--burst", application=APPLICATION, ready=False)
    assert worker.process.wait(60) == 0
    assert are_completed(connection)
    assert_kept(connection, rated)


def test_the_rate_is_kept_when_a_worker_is_killed(
    fleet: Fleet, rated: ModuleType, connection: Database
) -> None:
    workers = [fleet.start(application=APPLICATION, config=QUICK_RECOVERY) for _ in range(3)]
    send(rated)
    wait_until(lambda: len(started(connection)) > TASKS // 3)
    workers[0].signal(signal.SIGKILL)
    ended = "SELECT FROM horsies_tasks WHERE status IN ('COMPLETED', 'FAILED')"
    wait_until(lambda: connection.execute(ended).rowcount == 2 * TASKS)
    assert_kept(connection, rated)


def started(connection: Database) -> list[float]:
    return [at for at in starts(connection, "api") if at is not None]
