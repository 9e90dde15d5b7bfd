"""No lost wake-up: a signal or the end of a child at any point of a park makes the run due."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from horsies.db.statements.durable import ParkTasks, park_tasks, signal_task
from horsies.db.statements.turn import CompleteTasks, complete_tasks
from horsies.parking import ParkRequest
from tests.support.database import Database
from tests.support.keys import limit
from tests.support.rows import add_run, add_task

ROUNDS = 10_000 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 150
# A run of a fifo key keeps its place, and waits in next_retry_at.
NEVER = "SELECT greatest(enqueued_at, next_retry_at) > clock_timestamp() FROM horsies_tasks WHERE id = %s"


@contextmanager
def session(url: str) -> Iterator[Database]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def running(connection: Database, **columns: Any) -> str:
    owned = {"status": "RUNNING", "claimed_by_worker_id": "w", "generation": 1}
    return add_task(connection, **owned, **columns)


def park(connection: Database, task_id: str, request: ParkRequest, generation: int = 1) -> bool:
    columns = ParkTasks("w", [task_id], [generation], [request.to_json()])
    return bool(park_tasks.run(connection, columns))


def end(connection: Database, child: str) -> None:
    assert complete_tasks.run(connection, CompleteTasks("w", [child], [1], ['{"ok":1}'], [1000]))


def end_flow(connection: Database, child: str) -> None:
    connection.execute("UPDATE horsies_workflows SET status = 'COMPLETED' WHERE id = %s", (child,))


def coming(
    event: str, connection: Database, other: Database, run: str
) -> tuple[str, Callable[[], object]]:
    """Return the child of a run, and the call that wakes the run from another session."""
    if event == "workflow":
        flow = add_run(connection, wakes_task_id=run)
        return flow, lambda: end_flow(other, flow)
    child = running(connection, wakes_task_id=run)
    if event == "signal":
        return child, lambda: signal_task.fetch(other, run, "go", "1")
    return child, lambda: end(other, child)


def is_due(connection: Database, task_id: str) -> bool:
    row = connection.execute(NEVER, (task_id,)).fetchone()
    return row == (False,)


def race(first: Callable[[], object], second: Callable[[], object], dice: random.Random) -> None:
    """Run two calls in two threads, one of them later by a random part of a transaction."""
    barrier = threading.Barrier(2)

    def run(call: Callable[[], object], seconds: float) -> None:
        barrier.wait()
        time.sleep(seconds)
        call()

    late = dice.uniform(-0.002, 0.002)
    thread = threading.Thread(target=run, args=(first, max(late, 0.0)))
    thread.start()
    run(second, max(-late, 0.0))
    thread.join()


@pytest.mark.timeout(1800 if ROUNDS > 1000 else 60)
@pytest.mark.parametrize("is_fifo", [False, True])
@pytest.mark.parametrize("event", ["signal", "child", "workflow"])
def test_an_event_at_any_point_of_a_park_makes_the_run_due(
    connection: Database, process_url: str, event: str, is_fifo: bool
) -> None:
    keyed: dict[str, Any] = {}
    if is_fifo:
        limit(connection, is_fifo=True)
        lane = sql.SQL("horsies_lane_v1('default', 'acme')")
        keyed = {"held": True, "lane_key": "acme", "lane": lane}
    seed = random.SystemRandom().randint(0, 1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with session(process_url) as other:
        for _ in range(ROUNDS // 2):
            run = running(connection, **keyed)
            child, comes = coming(event, connection, other, run)
            request = ParkRequest(seconds=3600, signals=("go",), children=(child,))
            parks = lambda run=run, request=request: park(connection, run, request)  # noqa: E731
            race(parks, comes, dice)
            assert is_due(connection, run), "a lost wake-up"


def test_a_signal_that_is_not_committed_when_the_run_parks_wakes_it(
    connection: Database, process_url: str
) -> None:
    run = running(connection)
    with session(process_url) as other:
        with other.transaction():
            signal_task.fetch(other, run, "go", "1")
            parked = threading.Thread(
                target=lambda: park(connection, run, ParkRequest(signals=("go",)))
            )
            parked.start()
            other.execute("SELECT pg_sleep(0.05)")
            assert parked.is_alive(), "the park waits for the row of its run"
        parked.join()
        assert is_due(connection, run)


def test_only_awaited_events_wake_a_run(connection: Database) -> None:
    run = running(connection)
    other, awaited = (running(connection, wakes_task_id=run) for _ in range(2))
    assert park(connection, run, ParkRequest(seconds=3600, signals=("go",), children=(awaited,)))
    end(connection, other)
    assert signal_task.fetch(connection, run, "stop", "1")[0].answer == "stored"
    assert not is_due(connection, run)
    end(connection, awaited)
    assert is_due(connection, run)


def test_the_end_of_a_workflow_wakes_its_run_and_a_pause_does_not(connection: Database) -> None:
    run = running(connection)
    flow = add_run(connection, wakes_task_id=run)
    assert park(connection, run, ParkRequest(children=(flow,)))
    connection.execute("UPDATE horsies_workflows SET status = 'PAUSED' WHERE id = %s", (flow,))
    assert not is_due(connection, run)
    end_flow(connection, flow)
    assert is_due(connection, run)


def test_a_deleted_child_does_not_keep_its_run_waiting(connection: Database) -> None:
    run = running(connection)
    child = running(connection, wakes_task_id=run)
    connection.execute("DELETE FROM horsies_tasks WHERE id = %s", (child,))
    assert park(connection, run, ParkRequest(children=(child,)))
    assert is_due(connection, run)


def test_only_the_owner_of_an_attempt_parks_its_run(connection: Database) -> None:
    run = running(connection)
    assert not park(connection, run, ParkRequest(seconds=5), generation=2)
    connection.execute("UPDATE horsies_tasks SET claimed_by_worker_id = 'x' WHERE id = %s", (run,))
    assert not park(connection, run, ParkRequest(seconds=5))


def test_a_run_with_an_accepted_cancel_is_not_parked(connection: Database) -> None:
    run = running(connection, cancel_requested_at="now")
    assert not park(connection, run, ParkRequest(seconds=5))


def test_a_parked_run_holds_nothing(connection: Database) -> None:
    run = running(connection, worker_pid=7, worker_hostname="h", worker_process_name="worker-7")
    assert park(connection, run, ParkRequest(seconds=5))
    row = connection.execute(
        "SELECT status, claimed_by_worker_id, claim_expires_at, worker_pid, worker_hostname, started_at, "
        "retry_count, held, (SELECT count(*) FROM horsies_task_attempts) FROM horsies_tasks WHERE id = %s",
        (run,),
    ).fetchone()
    assert row == ("PENDING", None, None, None, None, None, 0, False, 0)
