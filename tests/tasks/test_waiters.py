"""Result waiters: answers read too early, a connection cut in the middle of a read, idle threads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.db.statement import Script
from horsies.db.statements.tasks import OutcomeRow, read_outcomes
from horsies.findings import Finding, finding
from horsies.ids import new_id
from horsies.monitor.diagnose.explain import obstacle_script
from horsies.tasks import waiters as waiters_module
from horsies.tasks.waiters import FindObstacle, Subject, Waiters
from tests.support.rows import add_task
from tests.support.wait import wait_until

POLL_NEVER = 600.0


@pytest.fixture
def waiters(process_url: str, connection: Connection[Any]) -> Iterator[Waiters]:
    """Waiters that live on notifications alone."""
    waiters = Waiters(lambda: connect(process_url), poll_seconds=POLL_NEVER)
    yield waiters
    waiters.close()


@pytest.fixture
def restless(process_url: str, connection: Connection[Any]) -> Iterator[Waiters]:
    """Waiters whose thread ends as soon as it has no waiter."""
    waiters = Waiters(lambda: connect(process_url), spare_seconds=0.0)
    yield waiters
    waiters.close()


def connect(process_url: str) -> Connection[Any]:
    return psycopg.connect(process_url, autocommit=True, application_name="test:waiters")


class SlowRead:
    """The first read brings what it found only when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_read, self.may_answer = threading.Event(), threading.Event()
        self._read = waiters_module._read
        monkeypatch.setattr(waiters_module, "_read", self)

    def __call__(self, pipeline: Pipeline, subject: Subject, ids: list[str]) -> dict[str, Any]:
        found = self._read(pipeline, subject, ids)
        self.has_read.set()
        assert self.may_answer.wait(30)
        return found


def backends(connection: Connection[Any]) -> int:
    found = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'test:waiters' "
        "AND datname = current_database()"
    ).fetchone()
    assert found is not None
    return int(found[0])


def is_waiting_for_a_lock(connection: Connection[Any]) -> bool:
    found = connection.execute(
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'test:waiters' "
        "AND wait_event_type = 'Lock' AND datname = current_database()"
    )
    return found.fetchone() is not None


def rows_scanned(connection: Connection[Any]) -> int:
    """How many rows of tasks were read without an index."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    found = connection.execute(
        "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'horsies_tasks'"
    ).fetchone()
    assert found is not None
    return int(found[0])


def status(future: Future[OutcomeRow | None]) -> str:
    row = future.result(30)
    assert row is not None
    return row.status


def test_a_connection_cut_in_the_middle_of_a_look_costs_that_look_only(
    connection: Connection[Any], process_url: str, waiters: Waiters
) -> None:
    known, fresh = add_task(connection), add_task(connection)
    waiters.watch(known, once=True).result(30)
    patient = waiters.watch(known)
    waiters.watch(known, once=True).result(30)  # now the patient one has been looked at too
    with psycopg.connect(process_url) as locker:
        locker.execute("LOCK TABLE horsies_tasks")
        unlucky, first = waiters.watch(fresh, once=True), waiters.watch(fresh)
        wait_until(lambda: is_waiting_for_a_lock(connection))
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name = 'test:waiters' AND datname = current_database()"
        )
        with pytest.raises(psycopg.OperationalError):
            unlucky.result(30)
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")
    for waiting in (patient, first):
        assert status(waiting) == "COMPLETED", "it outlasts the cut"
    assert status(waiters.watch(fresh)) == "COMPLETED", "and the next look works"


def test_a_notification_that_comes_with_the_answer_of_a_read_is_not_left_lying(
    connection: Connection[Any], waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = add_task(connection), add_task(connection)
    first = waiters.watch(early)
    waiters.watch(early, once=True).result(30)
    slow = SlowRead(monkeypatch)
    look = waiters.watch(late, once=True)
    assert slow.has_read.wait(30)
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED' WHERE id = %s", (early,))
    waiters._pipeline.run([read_outcomes([late])])  # type: ignore[union-attr]
    slow.may_answer.set()
    assert look.result(30) is not None
    assert status(first) == "COMPLETED"


def test_a_read_planned_on_an_almost_empty_table_uses_the_index_of_a_full_one(
    connection: Connection[Any], waiters: Waiters
) -> None:
    task_id = add_task(connection)
    waiters.watch(task_id, once=True).result(30)
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha) "
        "SELECT gen_random_uuid(), 'work', 'default', 'sha' FROM generate_series(1, 5000)"
    )
    before = rows_scanned(connection)
    for _ in range(8):
        waiters.watch(task_id, once=True).result(30)
    waiters.close()  # the last thing a session does is to report its counts
    wait_until(lambda: backends(connection) == 0)
    assert rows_scanned(connection) == before


@pytest.mark.parametrize("once", [True, False], ids=["look", "wait"])
def test_who_comes_after_a_read_began_is_not_told_that_nothing_was_there(
    connection: Connection[Any], waiters: Waiters, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    task_id = new_id()
    read = SlowRead(monkeypatch)
    early = waiters.watch(task_id, once=True)
    assert read.has_read.wait(30)
    add_task(connection, id=task_id, status="COMPLETED")
    late = waiters.watch(task_id, once=once)
    read.may_answer.set()
    assert early.result(30) is None
    assert status(late) == "COMPLETED"


def test_a_look_after_a_read_began_is_not_answered_with_what_it_found(
    connection: Connection[Any], waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = add_task(connection)
    read = SlowRead(monkeypatch)
    early = waiters.watch(task_id, once=True)
    assert read.has_read.wait(30)
    connection.execute("UPDATE horsies_tasks SET status = 'CANCELLED'")
    late = waiters.watch(task_id, once=True)
    read.may_answer.set()
    assert [status(early), status(late)] == ["PENDING", "CANCELLED"]


def test_a_thread_nobody_needs_ends_with_its_connection_and_another_serves_who_comes_then(
    connection: Connection[Any], restless: Waiters
) -> None:
    task_id = add_task(connection)
    for _ in range(2):
        assert status(restless.watch(task_id, once=True)) == "PENDING"
        wait_until(lambda: backends(connection) == 0)
    assert restless._thread is None


def test_nobody_falls_between_two_threads(connection: Connection[Any], restless: Waiters) -> None:
    task_id = add_task(connection)
    for _ in range(100):
        assert status(restless.watch(task_id, once=True)) == "PENDING"


def test_the_thread_stays_for_one_who_waits(connection: Connection[Any], restless: Waiters) -> None:
    task_id = add_task(connection)
    patient = restless.watch(task_id)
    assert status(restless.watch(task_id, once=True)) == "PENDING"
    serving = restless._thread
    assert status(restless.watch(task_id, once=True)) == "PENDING"
    assert restless._thread is serving
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")
    assert status(patient) == "COMPLETED"


UNREADABLE = """
ALTER TABLE horsies_tasks RENAME TO test_tasks;
CREATE VIEW horsies_tasks AS SELECT id, task_name, status, failed_reason, error_code,
    CASE WHEN task_name = 'unreadable' AND status = 'COMPLETED' THEN (1 / (generation - 7))::text
         ELSE result END AS result
FROM test_tasks
"""


@pytest.fixture
def unreadable(connection: Connection[Any]) -> Iterator[str]:
    """A running task whose result cannot be read once there is one."""
    task_id = add_task(connection, task_name="unreadable", status="RUNNING", generation=7)
    connection.execute(UNREADABLE)
    yield task_id
    connection.execute("DROP VIEW horsies_tasks")
    connection.execute("ALTER TABLE test_tasks RENAME TO horsies_tasks")


def test_a_result_that_cannot_be_read_fails_its_own_waiters_at_once_and_no_others(
    connection: Connection[Any], process_url: str, unreadable: str
) -> None:
    other = new_id()
    connection.execute(
        "INSERT INTO test_tasks (id, task_name, queue_name, enqueue_sha) VALUES (%s, 'work', 'q', '')",
        (other,),
    )
    waiters = Waiters(lambda: connect(process_url), poll_seconds=0.05)
    try:
        patient, fine = waiters.watch(unreadable), waiters.watch(other)
        for task_id in (unreadable, other):  # both have been read while they were running
            waiters.watch(task_id, once=True).result(30)
        connection.execute("UPDATE test_tasks SET status = 'COMPLETED', result = '1'")
        with pytest.raises(psycopg.errors.DivisionByZero):
            patient.result(30)
        assert status(fine) == "COMPLETED"
    finally:
        waiters.close()


# Explanations


def obstacle_of(task_id: str) -> Finding:
    return finding("SENT_FOR_LATER", f"It was sent for later, as {task_id}.")


def explains(task_id: str) -> Script[Finding | None]:
    yield from ()
    return obstacle_of(task_id)


def fails(task_id: str) -> Script[Finding | None]:
    yield from ()
    raise ArithmeticError(task_id)


@contextmanager
def explaining(url: str, find_obstacle: FindObstacle) -> Iterator[Waiters]:
    waiters = Waiters(lambda: connect(url), poll_seconds=POLL_NEVER, find_obstacle=find_obstacle)
    yield waiters
    waiters.close()


def test_obstacles_asked_for_at_once_are_all_found(
    connection: Connection[Any], process_url: str
) -> None:
    with explaining(process_url, explains) as waiters:
        task_ids = [new_id() for _ in range(20)]
        asked = [waiters.ask_obstacle(task_id) for task_id in task_ids]
        assert [one.result(30) for one in asked] == [obstacle_of(one) for one in task_ids]
        text = waiters.obstacle(task_ids[0], asked[0])
    assert text == f": it was sent for later, as {task_ids[0]} (SENT_FOR_LATER)"


def test_a_failed_explanation_costs_only_the_reason(
    connection: Connection[Any], process_url: str
) -> None:
    task_id = add_task(connection)
    with explaining(process_url, fails) as waiters:
        patient = waiters.watch(task_id)
        asked = waiters.ask_obstacle(task_id)
        with pytest.raises(ArithmeticError):
            asked.result(30)
        assert waiters.obstacle(task_id, asked) == ""
        connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")
        assert status(patient) == "COMPLETED"


def test_an_explanation_that_is_given_up_costs_no_result(
    connection: Connection[Any], process_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late answer is not taken for that of a later read."""
    monkeypatch.setattr(waiters_module, "OBSTACLE_SECONDS", 0.5)
    task_id = add_task(connection)
    pids = (
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'test:waiters' "
        "AND datname = current_database()"
    )
    frozen: list[int] = []

    def freezes(_: str) -> Script[Finding | None]:
        (row,) = connection.execute(pids).fetchall()
        frozen.append(row[0])
        os.kill(row[0], signal.SIGSTOP)
        yield read_outcomes([task_id])
        return None

    with explaining(process_url, freezes) as waiters:
        patient = waiters.watch(task_id)
        waiters.watch(task_id, once=True).result(30)
        try:
            with pytest.raises(psycopg.OperationalError):
                waiters.ask_obstacle(task_id).result(30)
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")
        assert status(waiters.watch(task_id)) == "COMPLETED"
        assert status(patient) == "COMPLETED"


def test_an_explanation_waits_only_briefly_for_a_lock(
    connection: Connection[Any], process_url: str
) -> None:
    task_id = add_task(connection)
    with explaining(process_url, obstacle_script) as waiters, connection.transaction():
        connection.execute("LOCK TABLE horsies_workers")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            waiters.ask_obstacle(task_id).result(30)
