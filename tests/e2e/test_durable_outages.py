"""Durable functions without their server, without their worker, and beside attempts that were given up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from horsies import TaskHandle
from horsies.tasks.options import TaskOptions
from tests.support.database import Database
from tests.support.durable_runs import APPLICATION, WITNESS, journal_of, start
from tests.support.private_server import PrivateServer
from tests.support.rows import add_task, ago
from tests.support.tables import (
    attempts,
    recover_dead_workers,
    stop_family,
    wait_for_status,
    wait_until_empty,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, Journal

# A statement that stores no row is counted as well: that of an attempt that has lost its run.
TRIES = """
CREATE TABLE durable_tries (number integer);
CREATE FUNCTION e2e_tried() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.durable_tries VALUES (1); RETURN NULL; END $$;
CREATE TRIGGER e2e_tried AFTER INSERT ON horsies_steps FOR EACH STATEMENT EXECUTE FUNCTION e2e_tried();
"""
END_CHILDREN = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name LIKE 'horsies:child%' AND datname = current_database()"
)


@pytest.fixture
def witnessed(connection: Database) -> Iterator[Database]:
    connection.execute(WITNESS + TRIES)
    yield connection
    connection.execute(END_CHILDREN)
    connection.execute(
        "DROP FUNCTION e2e_unchanged CASCADE; DROP FUNCTION e2e_tried CASCADE; "
        "DROP TABLE durable_effects, durable_tries"
    )


def add_run(connection: Database, module: ModuleType, name: str, args: str) -> str:
    options = TaskOptions(module.AGAIN).to_json()
    return add_task(
        connection,
        task_name=name,
        args=args,
        task_options=options,
        max_retries=100,
        enqueued_at=ago(0),
    )


def calls_of(fleet: Fleet, task_id: str, step: str) -> int:
    return sum(count for (name, _), count in journal_of(fleet)[task_id].items() if name == step)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["stop", "crash"])
def test_runs_survive_the_restart_of_their_server_parked_and_in_their_steps(
    own_server: PrivateServer, own_fleet: Fleet, durable: ModuleType, end: str
) -> None:
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute(WITNESS)
        parked = add_run(connection, durable, "ask", "[]")
        in_step = add_run(connection, durable, "rest", '["step"]')
        in_tx = add_run(connection, durable, "rest_in_transaction", '["tx"]')
    start(own_fleet)
    journal = own_fleet.journal
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        waits = "SELECT count(*) FROM horsies_parked WHERE signals = '{go}'"
        wait_until(lambda: connection.execute(waits).fetchone() == (1,))
    wait_until(lambda: calls_of(own_fleet, in_step, "wait") == 1)
    wait_until(lambda: calls_of(own_fleet, in_tx, "wait") == 1)
    getattr(own_server, end)()
    own_server.start()
    journal.release("step")
    journal.release("tx")
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        answer = connection.execute(
            "SELECT horsies_signal_task_v1(%s, 'go', '\"went\"')", (parked,)
        ).fetchone()
        assert answer == ("delivered",)
        for task_id in (parked, in_step, in_tx):
            wait_for_status(connection, task_id, "COMPLETED", 60)
            assert [one.outcome for one in attempts(connection, task_id)] == ["COMPLETED"]
        effects = connection.execute(
            "SELECT task_id::text, count(*) FROM durable_effects GROUP BY 1"
        ).fetchall()
    assert calls_of(own_fleet, in_step, "wait") == 1, "its process outlives the server"
    assert calls_of(own_fleet, in_tx, "wait") == 2, "its transaction does not"
    assert dict(effects) == {in_step: 1, in_tx: 1}


@pytest.mark.timeout(180)
@pytest.mark.direct("a pooler has sessions of its own")
def test_two_frozen_attempts_record_nothing_when_they_wake_up(
    fleet: Fleet, durable: ModuleType, witnessed: Database, journal: Journal
) -> None:
    sent: TaskHandle[str] = durable.rest.enqueue("zombies")
    frozen: list[list[int]] = []
    for number in (1, 2):
        zombie = start(fleet, processes=1)
        wait_until(lambda number=number: calls_of(fleet, sent.task_id, "wait") == number, 60)  # type: ignore[misc]
        frozen.append(stop_family(zombie, witnessed, sent.task_id))
    start(fleet, processes=1)
    wait_until(lambda: calls_of(fleet, sent.task_id, "wait") == 3, 60)
    journal.release("zombies")
    token = sent.result(timeout_ms=30_000)
    before = witnessed.execute("SELECT count(*) FROM durable_tries").fetchone()
    assert before == (2,)
    for child, _ in frozen:
        os.kill(child, signal.SIGCONT)
    tried = "SELECT count(*) FROM durable_tries"
    wait_until(lambda: witnessed.execute(tried).fetchone() == (4,), 30, "both try to record")
    for _, worker_pid in frozen:
        os.kill(worker_pid, signal.SIGCONT)
    wait_until_empty(witnessed)
    recorded = witnessed.execute(
        "SELECT name, result FROM horsies_steps WHERE task_id = %s ORDER BY position",
        (sent.task_id,),
    ).fetchall()
    assert recorded == [("wait_for_release", f'"{token}"'), ("write", "1")]
    assert witnessed.execute("SELECT count(*) FROM durable_effects").fetchone() == (1,)
    assert sent.result(timeout_ms=0) == token


# Where a worker dies, and how many attempts of its run then end with it.
WORKER_POINTS = {
    "before the park": 1,
    "after the park": 0,
    "before the claim of a woken run": 0,
    "after the claim of a woken run": 1,
    "before the outcome": 1,
    "after the outcome": 0,
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_run_whose_worker_dies_at_any_boundary_continues(
    fleet: Fleet, durable: ModuleType, witnessed: Database, point: str
) -> None:
    environment = {durable.WORKER_DIES: point}
    doomed = fleet.start(
        application=APPLICATION, processes=1, config=QUICK_RECOVERY, environment=environment
    )
    sent: TaskHandle[str] = durable.nap.enqueue()
    assert doomed.wait() == -signal.SIGKILL
    assert Path(f"{fleet.journal.path}.{point.replace(' ', '-')}.died").exists()
    recover_dead_workers(witnessed)
    start(fleet, processes=1)
    token = sent.result(timeout_ms=60_000)
    tokens = [made for step, made in journal_of(fleet)[sent.task_id].elements() if step == "effect"]
    assert tokens == [token], "its step is recorded before anything happens to its worker"
    effects = witnessed.execute("SELECT count(*) FROM durable_effects").fetchone()
    assert effects == (1,)
    ends = [one.outcome for one in attempts(witnessed, sent.task_id)]
    assert ends == ["WORKER_FAILURE"] * WORKER_POINTS[point] + ["COMPLETED"]
