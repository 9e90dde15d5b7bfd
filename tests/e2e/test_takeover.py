"""The tasks of a worker that was killed continue within seconds, on the same host and on another."""

from __future__ import annotations

import os
import signal
import time
from types import ModuleType

import psutil
import psycopg
import pytest

from tests.support.database import Database
from tests.support.hosts import Hosts
from tests.support.private_server import PrivateServer
from tests.support.rows import insert_raw
from tests.support.tables import attempts
from tests.support.wait import wait_until
from tests.support.workers import FORKSERVER, Fleet, Journal, is_gone

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
PORT = 5432
# The process table proves the death; a look at the other workers takes place every second. While other
# tests use the machine, it is less than worker_lost_after_ms, which proves it otherwise.
SAME_HOST_SECONDS = 3.0 if IS_LONG else 9.0
# worker_lost_after_ms by default, the time until the server notices, and one look; a busy machine is
# slower, and the next threshold is five minutes.
OTHER_HOST_SECONDS = 15.0 if IS_LONG else 40.0


def seconds_until_recovered(connection: Database, task_ids: list[str], limit: float) -> float:
    """The time until an attempt of every task is recorded; a little more than the limit is waited."""
    began = time.monotonic()
    wait_until(lambda: all(attempts(connection, one) for one in task_ids), limit + 10.0)
    return time.monotonic() - began


def places(connection: Database) -> list[tuple[str, int]]:
    """The host and the process number of every worker."""
    return connection.execute("SELECT hostname, pid FROM horsies_workers ORDER BY 1").fetchall()


def test_tasks_of_a_killed_worker_are_taken_over_at_once_on_its_host(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    victim = fleet.start(*FORKSERVER, processes=2)
    failed = programs.sleep.send(600).unwrap()
    retried = programs.sleep_again.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    running = journal.lines("start")
    fleet.start(*FORKSERVER, processes=2)
    victim.signal(signal.SIGKILL)
    seconds = seconds_until_recovered(
        connection, [failed.task_id, retried.task_id], SAME_HOST_SECONDS
    )
    assert seconds < SAME_HOST_SECONDS
    assert failed.get(30_000).err_value.error_code == "WORKER_CRASHED"
    wait_until(lambda: all(is_gone(line.pid) for line in running), 30, "children outlived")
    wait_until(lambda: len(journal.lines("start", retried.task_id)) == 2)


@pytest.mark.direct("the hosts reach the server by addresses of their own")
def test_tasks_of_a_killed_worker_are_taken_over_soon_on_another_host(
    hosts: Hosts, own_server: PrivateServer, own_fleet: Fleet
) -> None:
    own_server.stop()
    own_server.start_through(hosts.through("db"), PORT)
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        victim = own_fleet.start(database_url=hosts.url(1, PORT), through=hosts.inside("w1"))
        task_ids = [insert_raw(connection, "sleep", "[600]") for _ in range(2)]
        wait_until(lambda: len(own_fleet.journal.lines("start")) == 2)
        watcher = own_fleet.start(database_url=hosts.url(2, PORT), through=hosts.inside("w2"))
        wait_until(lambda: places(connection) == [("w1", 1), ("w2", 1)], 30, "the hosts are apart")
        (worker,) = psutil.Process(victim.pid).children()
        worker.kill()
        assert (
            seconds_until_recovered(connection, task_ids, OTHER_HOST_SECONDS) < OTHER_HOST_SECONDS
        )
        for task_id in task_ids:
            (attempt,) = attempts(connection, task_id)
            assert (attempt.outcome, attempt.error_code) == ("WORKER_FAILURE", "WORKER_CRASHED")
    assert watcher.wait_for("workers_lost")
