"""Explanations of obstacles made for real: workers, caps, pauses, locks and a kill."""

from __future__ import annotations

import json
import signal
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies.monitor.actions import QueueOrder, switch_queue
from horsies.tasks.recording import acting_as
from tests.support.database import Database
from tests.support.explained import Doors, codes, the
from tests.support.rows import add_task, ago
from tests.support.tables import wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

APPLICATION = "tests.support.apps.queued:app"


def sleeping(connection: Database, queue_name: str, **columns: Any) -> str:
    call: dict[str, Any] = {
        "task_name": "tests.support.apps.queued.sleep",
        "args": "[]",
        "kwargs": json.dumps({"seconds": 600}),
        "enqueued_at": ago(0),
    }
    return add_task(connection, queue_name=queue_name, **call | columns)


def running(connection: Database, queue_name: str, **columns: Any) -> str:
    """A task that runs for long, started by the worker."""
    task_id = sleeping(connection, queue_name, **columns)
    wait_until(lambda: status(connection, task_id) == "RUNNING", what="the task runs")
    return task_id


def status(connection: Database, task_id: str) -> str:
    (row,) = connection.execute("SELECT status FROM horsies_tasks WHERE id = %s", (task_id,))
    return str(row[0])


@pytest.fixture
def worker(fleet: Fleet, connection: Database) -> RunningWorker:
    """A worker with two children and a snapshot of its caps."""
    worker = fleet.start("--name", "shop-1", processes=2, application=APPLICATION)
    wait_until(
        lambda: connection.execute("SELECT FROM horsies_worker_states").fetchone() is not None,
        what="the first snapshot",
    )
    return worker


def test_real_obstacles_are_named(
    worker: RunningWorker, connection: Database, programs: ModuleType, process_url: str
) -> None:
    doors = Doors(programs.app)

    # Nothing to run for this worker: an unknown task, a queue that it does not serve, a cap of zero.
    not_there = sleeping(connection, "mail", task_name="not_there")
    worker.wait_for("unknown_task")
    wait_for_status(connection, not_there, "PENDING")  # the worker has given the task back
    unknown = doors.task(not_there)
    assert codes(unknown) == ["TASK_UNKNOWN"]
    assert the(unknown, "TASK_UNKNOWN").subjects == ("shop-1",)
    assert "after 10 min" in the(unknown, "TASK_UNKNOWN").sentence
    unfit = sleeping(connection, "mail", kwargs=json.dumps({"seconds": 0, "note": 1}))
    worker.wait_for("unknown_task", times=2)
    wait_for_status(connection, unfit, "PENDING")
    explained = doors.task(unfit)
    assert codes(explained) == ["CALL_DOES_NOT_FIT", "BEHIND"]
    fit = the(explained, "CALL_DOES_NOT_FIT")
    assert fit.subjects == ("shop-1",)
    assert "there is no parameter 'note'" in fit.sentence
    assert "after 10 min" in fit.sentence
    unserved = doors.task(sleeping(connection, "letters"))
    assert codes(unserved) == ["QUEUE_UNSERVED"]
    assert "served are: capped, first, mail, zero" in the(unserved, "QUEUE_UNSERVED").sentence
    assert codes(doors.task(sleeping(connection, "zero"))) == ["QUEUE_CAP_ZERO"]

    # A cap that a running task has reached.
    holder = running(connection, "capped", timeout_ms=900_000)
    runs = doors.task(holder)
    assert codes(runs) == ["RUNS"]
    assert "of worker shop-1" in the(runs, "RUNS").sentence
    capped = doors.task(sleeping(connection, "capped"))
    assert codes(capped) == ["QUEUE_CAP"]
    assert the(capped, "QUEUE_CAP").subjects == (holder,)

    # A paused queue, and a send for later.
    with acting_as("anna"):
        pause_queue(doors, "first")
    paused = sleeping(connection, "first")
    explained = doors.task(paused)
    assert codes(explained) == ["QUEUE_PAUSED"]
    assert "paused by anna" in the(explained, "QUEUE_PAUSED").sentence
    later = sleeping(connection, "mail", enqueued_at=ago(-3_600))
    with psycopg.connect(process_url, application_name="console") as other:
        other.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (later,))
        locked = doors.task(later)
        assert codes(locked) == ["SENT_FOR_LATER", "ROW_LOCKED"]
        assert f"pid {other.info.backend_pid} (console" in the(locked, "ROW_LOCKED").sentence

    # Both children busy, and a row that another transaction holds.
    stopped = running(connection, "mail")
    resume_queue(doors, "first")
    waiting = sleeping(connection, "mail")
    explained = doors.task(waiting)
    assert codes(explained) == ["CHILDREN_BUSY", "BEHIND", "BETTER_QUEUES_FIRST"]
    assert the(explained, "CHILDREN_BUSY").subjects == ("shop-1",)
    queue = doors.queue("mail")
    assert codes(queue) == [
        "TASK_UNKNOWN",
        "CALL_DOES_NOT_FIT",
        "CHILDREN_BUSY",
        "BETTER_QUEUES_FIRST",
        "TASKS_DUE",
    ]
    with psycopg.connect(process_url) as other:
        other.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (waiting,))
        assert "ROW_LOCKED" in codes(doors.task(waiting))

    # A cancel that has not reached the worker yet, whose next heartbeat would find it.
    worker.signal(signal.SIGSTOP)
    connection.execute(
        "UPDATE horsies_tasks SET cancel_requested_at = now() WHERE id = %s", (stopped,)
    )
    assert codes(doors.task(stopped)) == ["STOPPING", "RUNS"]

    # The worker dies; its lock is free, and 15 seconds later it counts as lost.
    worker.signal(signal.SIGKILL)
    worker.wait()
    connection.execute("UPDATE horsies_workers SET seen_at = now() - interval '20 seconds'")
    wait_until(lambda: codes(doors.app.explain(holder).unwrap()) == ["RUNNER_LOST"])
    lost = doors.task(holder)
    assert codes(lost) == ["RUNNER_LOST"]
    assert "no live worker is there to recover it" in the(lost, "RUNNER_LOST").sentence
    assert codes(doors.task(paused)) == ["QUEUE_UNSERVED"]


def pause_queue(doors: Doors, name: str) -> None:
    order = QueueOrder(name, paused=True)
    switch_queue(doors.app.get_broker(), order).unwrap()


def resume_queue(doors: Doors, name: str) -> None:
    order = QueueOrder(name, paused=False)
    switch_queue(doors.app.get_broker(), order).unwrap()
