"""Two worker hosts and a database host, each in a network namespace, and a cut between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from horsies import AppConfig, Horsies, PostgresConfig, RetryPolicy, TaskError, TaskResult
from tests.support.database import Database
from tests.support.hosts import Hosts
from tests.support.private_server import PrivateServer
from tests.support.rows import insert_raw
from tests.support.tables import attempts, count, task, wait_for_status, wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import Fleet, is_gone

PORT = 5432
QUICK_THRESHOLDS = {
    "recovery": {
        "runner_heartbeat_interval_ms": 1_000,
        "claimer_heartbeat_interval_ms": 1_000,
        "running_stale_threshold_ms": 5_000,
        "claimed_stale_threshold_ms": 5_000,
        "check_interval_ms": 1_000,
    },
    "resilience": {"notify_poll_interval_ms": 1_000},
}


# The server itself finds out that a host is gone, long before the thresholds.
QUICK_PROBES = {
    "broker": {
        "tcp_keepalives_idle": 1,
        "tcp_keepalives_interval": 1,
        "tcp_keepalives_count": 2,
        "tcp_user_timeout_ms": 2_000,
    },
    "recovery": {"worker_lost_after_ms": 4_000},
    "resilience": {"notify_poll_interval_ms": 1_000},
}


def send_long(database_url: str) -> str:
    """Send a task that runs for a while and again if its worker is lost."""
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=database_url)))
    policy = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"], jitter=False)

    @app.task("sleep_again", retry_policy=policy)
    def sleep_again(seconds: float, label: str = "") -> TaskResult[str, TaskError]:
        raise NotImplementedError

    task_id = sleep_again.send(12).unwrap().task_id
    app.close()
    return task_id


def pid_of_owner(connection: Database, task_id: str) -> int:
    row = connection.execute(
        "SELECT worker.pid FROM horsies_workers AS worker JOIN horsies_tasks AS task "
        "ON task.claimed_by_worker_id = worker.worker_id WHERE task.id = %s",
        (task_id,),
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize(
    ("config", "lose", "restore"),
    [
        pytest.param(QUICK_THRESHOLDS, Hosts.cut, Hosts.mend, id="thresholds"),
        pytest.param(QUICK_PROBES, Hosts.cut, Hosts.mend, id="probes"),
        pytest.param(QUICK_PROBES, Hosts.swallow, Hosts.deliver, id="packets-dropped"),
    ],
)
def test_a_host_cut_off_from_the_database_loses_its_task_to_another(
    hosts: Hosts,
    own_server: PrivateServer,
    own_fleet: Fleet,
    config: dict[str, Any],
    lose: Callable[[Hosts, int], None],
    restore: Callable[[Hosts, int], None],
) -> None:
    own_server.stop()
    own_server.start_through(hosts.through("db"), PORT)
    workers = [
        own_fleet.start(
            processes=1,
            config=config,
            database_url=hosts.url(number, PORT),
            through=hosts.through(f"w{number}"),
        )
        for number in (1, 2)
    ]
    journal = own_fleet.journal
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        for _ in range(20):
            insert_raw(connection, "sleep", "[0.05]")
        wait_until_empty(connection)
        assert len({row.worker_id for row in attempts(connection)}) == 2, "both hosts work"
        task_id = send_long(own_server.url)
        (started,) = wait_until(lambda: journal.lines("start", task_id))
        number = 1 + [worker.pid for worker in workers].index(pid_of_owner(connection, task_id))
        lose(hosts, number)
        wait_until(lambda: len(attempts(connection, task_id)) == 1)
        wait_until(lambda: len(journal.lines("start", task_id)) == 2)
        restore(hosts, number)
        wait_until(lambda: is_gone(started.pid), 60, "the attempt that was lost still runs")
        wait_for_status(connection, task_id, "COMPLETED", 30)
        crashed, done = attempts(connection, task_id)
        assert (crashed.outcome, done.outcome) == ("WORKER_FAILURE", "COMPLETED")
        assert crashed.worker_id != done.worker_id
        assert task(connection, task_id).retry_count == 1
        assert count(connection, "COMPLETED") == 21
    assert workers[2 - number].events("workers_lost")
    assert [worker.stop(60) for worker in workers] == [0, 0]
