"""A living worker keeps its tasks through outages, locks, wrong clocks and refused passwords.

Every test compares the tables with the journal of the tasks. The figures are scaled down by settings;
HORSIES_TEST_OUTAGES=long takes the default settings and the times that go with them, minutes each.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql

from horsies import RecoveryConfig
from tests.support.clocks import settable_clock
from tests.support.database import Database, terminate_others
from tests.support.private_server import LOCKED_ROLE, PASSWORD, PrivateServer
from tests.support.proxy import Proxy
from tests.support.rows import insert_raw
from tests.support.schedulers import every
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker, is_gone

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"

pytestmark = [
    pytest.mark.direct("a pooler has outages of its own"),
    pytest.mark.timeout(900 if IS_LONG else 120),
]


def quick_recovery(seconds: int) -> dict[str, Any]:
    """All thresholds at so many seconds, so that an outage that is a little longer exceeds them all."""
    recovery = {
        "check_interval_ms": 1_000,
        "runner_heartbeat_interval_ms": 1_000,
        "claimer_heartbeat_interval_ms": 1_000,
        "running_stale_threshold_ms": seconds * 1_000,
        "claimed_stale_threshold_ms": seconds * 1_000,
    }
    if "worker_lost_after_ms" in RecoveryConfig.model_fields:
        recovery["worker_lost_after_ms"] = seconds * 1_000
    return {"recovery": recovery}


CONFIG: dict[str, Any] = {} if IS_LONG else quick_recovery(2)
# Longer than every threshold: the default of the longest is 300 s.
OUTAGE_SECONDS = 330.0 if IS_LONG else 5.0
# A worker waits five seconds for a locked row before it goes on without it.
ROW_LOCK_CONFIG: dict[str, Any] = {} if IS_LONG else quick_recovery(7)
ROW_LOCK_SECONDS = 330.0 if IS_LONG else 9.0
# Shorter than worker_lost_after_ms by default, longer than three attempts to reconnect.
BLIP_SECONDS = 9.0 if IS_LONG else 6.0
SIDECAR_SECONDS = 8.0 if IS_LONG else 6.0
# Hours that the server's clock is wrong, one after the other; workers look at each other every few seconds.
STEPS = (3, -3, 0)
STEP_SECONDS = 60.0 if IS_LONG else 3.0


def let_pass(seconds: float) -> None:
    """Let a fault last: the one thing here that is waited for by the clock."""
    time.sleep(seconds)


@contextmanager
def proxies(url: str, count: int) -> Iterator[list[Proxy]]:
    """A way to the database for each worker."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(url)) for _ in range(count)]


@contextmanager
def away(ways: Sequence[Proxy], seconds: float) -> Iterator[None]:
    """Cut these ways off, run the block, and open them again when the seconds have passed."""
    began = time.monotonic()
    for way in ways:
        way.stop()
    yield
    let_pass(max(0.0, began + seconds - time.monotonic()))
    for way in ways:
        way.start()


@dataclass(frozen=True, slots=True)
class Load:
    """Long tasks, one per worker, and short ones that end during a fault."""

    fleet: Fleet
    workers: list[RunningWorker]
    task_ids: list[str]

    @classmethod
    def on(
        cls, connection: Database, fleet: Fleet, workers: list[RunningWorker], seconds: float
    ) -> Load:
        """Occupy both children of every worker: one until after the fault, one until its midst."""
        lengths = [seconds + 2.0, 2.0]
        ids = [insert_raw(connection, "sleep", f"[{length}]") for length in lengths * len(workers)]
        wait_until(lambda: len(fleet.journal.lines("start")) == len(ids))
        return cls(fleet, workers, ids)

    def check(self, connection: Database, seconds: float = 30.0) -> None:
        """Every task ran once and is recorded once, and no worker was declared lost or has ended."""
        for task_id in self.task_ids:
            wait_until(lambda one=task_id: has_ended(connection, one), seconds)  # type: ignore[misc]
            row = task(connection, task_id)
            assert (row.status, row.generation, row.retry_count) == ("COMPLETED", 1, 0), row
            assert len(attempts(connection, task_id)) == 1
            assert len(self.fleet.journal.lines("start", task_id)) == 1
            assert len(self.fleet.journal.lines("end", task_id)) == 1
        for worker in self.workers:
            assert not worker.events("workers_lost"), worker.log()
            assert not worker.events("worker_declared_lost"), worker.log()
            assert not worker.events("worker_failed"), worker.log()
            assert worker.process.poll() is None, worker.log()


@contextmanager
def stopped(worker: RunningWorker) -> Iterator[None]:
    """Stop a worker and all its processes like a suspended host, and let them continue."""
    pids = [worker.pid, *worker.family()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def has_ended(connection: Database, task_id: str) -> bool:
    return task(connection, task_id).status in ("COMPLETED", "FAILED")


def start_all(
    fleet: Fleet, urls: Sequence[str | None], config: dict[str, Any] = CONFIG, *options: str
) -> list[RunningWorker]:
    """Start a worker for each address, side by side; None is the fleet's own."""
    workers = [fleet.start(*options, config=config, database_url=url, ready=False) for url in urls]
    for worker in workers:
        worker.wait_until_ready()
    return workers


def test_an_outage_beyond_all_thresholds_costs_no_worker_and_no_task(
    fleet: Fleet, connection: Database
) -> None:
    with proxies(fleet.database_url, 3) as ways:
        workers = start_all(fleet, [way.url for way in ways])
        load = Load.on(connection, fleet, workers, OUTAGE_SECONDS)
        with away(ways, OUTAGE_SECONDS):
            wait_until(lambda: len(fleet.journal.lines("end")) >= 3)
        load.check(connection)


def test_a_worker_that_starts_during_a_blip_declares_no_living_worker_lost(
    fleet: Fleet, connection: Database
) -> None:
    with proxies(fleet.database_url, 2) as ways:
        workers = start_all(fleet, [ways[0].url])
        load = Load.on(connection, fleet, workers, BLIP_SECONDS + 4.0)
        with away(ways, BLIP_SECONDS):
            fresh = fleet.start(config=CONFIG, database_url=ways[1].url, ready=False)
            fresh.wait_for("database_lost")
        fresh.wait_until_ready()
        workers.append(fresh)
        load.check(connection)


def test_a_worker_whose_own_way_is_cut_for_seconds_keeps_its_tasks(
    fleet: Fleet, connection: Database
) -> None:
    with proxies(fleet.database_url, 1) as ways:
        # By default a worker may be out of touch for ten seconds.
        cut = fleet.start(database_url=ways[0].url)
        load = Load.on(connection, fleet, [cut], SIDECAR_SECONDS + 4.0)
        watcher = fleet.start()
        load.workers.append(watcher)
        with away(ways, SIDECAR_SECONDS):
            cut.wait_for("database_lost")
        load.check(connection)


def test_a_locked_table_makes_no_worker_look_dead(fleet: Fleet, connection: Database) -> None:
    workers = start_all(fleet, [None] * 3)
    load = Load.on(connection, fleet, workers, OUTAGE_SECONDS)
    with psycopg.connect(fleet.database_url) as other:
        other.execute("LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE")
        let_pass(OUTAGE_SECONDS)
        other.rollback()
    load.check(connection)


def test_a_locked_row_costs_no_other_task(fleet: Fleet, connection: Database) -> None:
    workers = start_all(fleet, [None] * 2, ROW_LOCK_CONFIG)
    load = Load.on(connection, fleet, workers, ROW_LOCK_SECONDS)
    short = load.task_ids[1]
    with psycopg.connect(fleet.database_url) as other:
        other.execute("SELECT 1 FROM horsies_tasks WHERE id = %s FOR UPDATE", (short,))
        wait_until(lambda: fleet.journal.lines("end", short))
        let_pass(ROW_LOCK_SECONDS)
        other.rollback()
    load.check(connection)


REGISTERED = "SELECT FROM horsies_workers WHERE stopped_at IS NULL"


def test_a_worker_stopped_beyond_all_thresholds_takes_up_its_work_again(
    fleet: Fleet, connection: Database
) -> None:
    """Others recover its tasks; when it goes on, it ends their processes and records nothing for them."""
    frozen, *others = start_all(fleet, [None] * 2)
    lost = insert_raw(connection, "sleep", f"[{OUTAGE_SECONDS + 600}]")
    (begun,) = wait_until(lambda: fleet.journal.lines("start", lost))
    if begun.pid not in frozen.family():
        frozen, *others = others[0], frozen
    with stopped(frozen):
        let_pass(OUTAGE_SECONDS)
        wait_until(lambda: attempts(connection, lost))
        assert not is_gone(begun.pid)
    wait_until(lambda: is_gone(begun.pid), 60, "the attempt that was lost still runs")
    frozen.wait_for("worker_declared_lost")
    wait_until(lambda: connection.execute(REGISTERED).rowcount == 2)
    (crashed,) = attempts(connection, lost)
    assert (crashed.outcome, crashed.error_code) == ("WORKER_FAILURE", "WORKER_CRASHED")
    short = [insert_raw(connection, "sleep", "[0.3]") for _ in range(8)]
    wait_until(lambda: all(has_ended(connection, one) for one in short))
    workers = {attempts(connection, one)[0].worker_id for one in short}
    assert len(workers) == 2, "the worker that was stopped works again"
    assert task(connection, lost).status == "FAILED"
    assert len(fleet.journal.lines("start", lost)) == 1
    assert all(one.process.poll() is None for one in (frozen, *others))


def test_steps_of_the_databases_clock_make_no_worker_look_dead(
    own_server: PrivateServer, own_fleet: Fleet
) -> None:
    with settable_clock(own_server) as clock:
        workers = start_all(own_fleet, [None] * 3)
        with psycopg.connect(own_server.url, autocommit=True) as connection:
            load = Load.on(connection, own_fleet, workers, len(STEPS) * STEP_SECONDS)
            for hours in STEPS:
                clock.write_text(f"{hours:+}h")
                wait_until(lambda hours=hours: is_ahead(connection, hours))  # type: ignore[misc]
                let_pass(STEP_SECONDS)
            load.check(connection)


def is_ahead(connection: Database, hours: int) -> bool:
    """Whether the server's clock is ahead by these hours."""
    row = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
    assert row is not None
    return abs(float(row[0]) - time.time() - hours * 3_600) < 60


def test_a_password_that_is_refused_for_a_while_costs_no_running_task(
    own_server: PrivateServer, own_fleet: Fleet
) -> None:
    fleet = own_fleet
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute(sql.SQL("ALTER ROLE {} SUPERUSER").format(sql.Identifier(LOCKED_ROLE)))
        url = locked_address(own_server)
        # A scheduler has its own connection, which is refused as well.
        config = CONFIG | {"schedule": {"schedules": [every(86_400, "daily")]}}
        workers = start_all(fleet, [url] * 2, config, "--with-scheduler")
        for worker in workers:
            worker.wait_for("scheduler_ready")
        load = Load.on(connection, fleet, workers, OUTAGE_SECONDS)
        set_password(connection, "another horse")
        terminate_others(connection)
        for event in ("database_lost", "scheduler_database_lost"):
            wait_until(lambda event=event: all(one.events(event) for one in workers))  # type: ignore[misc]
        let_pass(OUTAGE_SECONDS)
        set_password(connection, PASSWORD)
        load.check(connection)


def locked_address(server: PrivateServer) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(server.locked_url(PASSWORD))
    password = PASSWORD.replace(" ", "%20")
    return f"postgresql://{LOCKED_ROLE}:{password}@/{parts['dbname']}?host={parts['host']}"


def set_password(connection: Database, password: str) -> None:
    connection.execute(
        sql.SQL("ALTER ROLE {} PASSWORD {}").format(
            sql.Identifier(LOCKED_ROLE), sql.Literal(password)
        )
    )
