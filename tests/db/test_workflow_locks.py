"""Transactions that end tasks of workflows lock the root of the run first, so there are no deadlocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement
from horsies.db.statements.tasks import cancel_tasks
from horsies.db.statements.turn import (
    ClaimTasks,
    CompleteTasks,
    ExpireTasks,
    ReleaseUnstarted,
    claim_tasks,
    complete_tasks,
    expire_tasks,
    release_unstarted,
)
from horsies.db.statements.workflows import (
    cancel_run,
    lock_runs,
    pause_run,
    resume_run,
    start_runs,
)
from horsies.ids import new_id
from horsies.task_result import TaskError, TaskResult
from horsies.worker.connection import TURN_SETTINGS
from horsies.workflow.build.plan import plan
from horsies.workflow.nodes.nodes import TaskNode
from tests.support.database import lock_waiters
from tests.support.runs import deadlocks
from tests.support.wait import wait_until

REASON = '{"error_code":"STOPPED","message":"enough","data":null,"exception":null}'
EXPIRED = '{"err":{"error_code":{"__builtin_task_code__":"TASK_EXPIRED"}}}'
PAST = datetime(2000, 1, 1, tzinfo=UTC)
Connect = Callable[[], Connection[Any]]
Ending = Callable[[Connection[Any], list[str]], object]


@pytest.fixture
def connect(process_url: str) -> Iterator[Connect]:
    opened: list[Connection[Any]] = []

    def connect() -> Connection[Any]:
        opened.append(psycopg.connect(process_url, autocommit=True, options=TURN_SETTINGS))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def start(app: Horsies, connection: Connection[Any]) -> Callable[..., tuple[str, list[str]]]:
    @app.task("work")
    def work() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    def start(size: int = 1, good_until: datetime | None = None) -> tuple[str, list[str]]:
        until = good_until and datetime.now(UTC) + timedelta(days=1)
        spec = app.workflow(
            "run", [TaskNode(work, good_until=until) for _ in range(size)], definition_key="run"
        )
        run_id = new_id()
        start_runs.fetch(connection, f"[{plan(spec, run_id)}]")
        if good_until is not None:
            connection.execute(
                "UPDATE horsies_tasks SET good_until = %s WHERE workflow_id = %s",
                (good_until, run_id),
            )
        rows = connection.execute(
            "SELECT id::text FROM horsies_tasks WHERE workflow_id = %s", (run_id,)
        )
        return run_id, [row[0] for row in rows]

    return start


def claim(connection: Connection[Any], count: int) -> None:
    pids = list(range(1, count + 1))
    claim_tasks.run(connection, ClaimTasks("worker-1", "host", pids, ["default"], [count]))


def cancel_all(connection: Connection[Any], task_ids: list[str]) -> object:
    return [cancel_tasks.fetch(connection, [task_id], True) for task_id in task_ids]


def expire_all(connection: Connection[Any], _task_ids: list[str]) -> object:
    return expire_tasks.run(connection, ExpireTasks(EXPIRED, 500))


def release_all(connection: Connection[Any], _task_ids: list[str]) -> object:
    return release_unstarted.run(connection, ReleaseUnstarted("worker-1", [], []))


def statuses(connection: Connection[Any], run_id: str) -> tuple[str, set[str], set[str]]:
    (run,) = connection.execute("SELECT status FROM horsies_workflows WHERE id = %s", (run_id,))
    nodes = connection.execute(
        "SELECT DISTINCT status FROM horsies_workflow_tasks WHERE workflow_id = %s", (run_id,)
    )
    tasks = connection.execute(
        "SELECT DISTINCT status FROM horsies_tasks WHERE workflow_id = %s", (run_id,)
    )
    return run[0], {row[0] for row in nodes}, {row[0] for row in tasks}


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


@pytest.mark.parametrize("ending", [cancel_all, expire_all, release_all])
def test_an_ending_waits_for_the_run_with_no_task_in_its_hands(
    connection: Connection[Any], connect: Connect, start: Any, ending: Ending
) -> None:
    run_id, task_ids = start(1, PAST if ending is expire_all else None)
    if ending is release_all:
        claim(connection, 1)
        connection.execute("UPDATE horsies_tasks SET cancel_requested_at = now()")
    steering, ender = connect(), connect()
    with steering.transaction():
        lock_runs.fetch(steering, [run_id])
        with in_background(lambda: ending(ender, task_ids)) as ended:
            wait_until(lambda: lock_waiters(connection, ender.info.backend_pid))
            # The session that controls the run can lock its tasks while the other one waits.
            steering.execute("SELECT id FROM horsies_tasks FOR UPDATE NOWAIT").fetchall()
            steering.execute("COMMIT")
            ended.result(30)
    status, nodes, tasks = statuses(connection, run_id)
    expected = "EXPIRED" if ending is expire_all else "CANCELLED"
    assert (status, nodes, tasks) == ("FAILED", {"FAILED"}, {expected})


@pytest.mark.parametrize("ending", [cancel_all, expire_all])
def test_what_a_steered_run_took_first_is_left_alone(
    connection: Connection[Any], connect: Connect, start: Any, ending: Ending
) -> None:
    run_id, task_ids = start(3, PAST if ending is expire_all else None)
    steering, ender = connect(), connect()
    with steering.transaction():
        cancel_run.fetch(steering, run_id, REASON, False)
        with in_background(lambda: ending(ender, task_ids)) as ended:
            wait_until(lambda: lock_waiters(connection, ender.info.backend_pid))
            steering.execute("COMMIT")
            ended.result(30)
    assert statuses(connection, run_id) == ("CANCELLED", {"SKIPPED"}, {"CANCELLED"})


def test_tasks_outside_of_workflows_are_cancelled_and_expired_as_ever(
    connection: Connection[Any], app: Horsies
) -> None:
    @app.task("plain")
    def plain() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    cancelled, late = plain.send().unwrap(), plain.send().unwrap()
    connection.execute(
        "UPDATE horsies_tasks SET good_until = %s WHERE id = %s", (PAST, late.task_id)
    )
    (row,) = cancel_tasks.fetch(connection, [cancelled.task_id], True)
    assert row.applied
    assert [row.id for row in expire_tasks.run(connection, ExpireTasks(EXPIRED, 10))] == [
        late.task_id
    ]


ROUNDS = 12
SIZE = 20


def together_with(connect: Connect, *works: Callable[[Connection[Any]], object]) -> None:
    """Run the works at the same moment, each on its own connection; none may fail."""
    barrier = threading.Barrier(len(works))

    def one(work: Callable[[Connection[Any]], object], own: Connection[Any]) -> object:
        barrier.wait(30)
        return work(own)

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(one, work, connect()) for work in works]:
            done.result(60)


def complete_claimed(own: Connection[Any]) -> None:
    """A worker that claims and completes the tasks it finds, locking the runs first."""
    pipeline = Pipeline(own)
    for _ in range(10):
        (claimed,) = pipeline.run(
            [(claim_tasks, ClaimTasks("worker-2", "host", [1, 2], ["default"], [2]))]
        )
        runs = sorted({task.workflow_id for task in claimed if task.workflow_id})
        if claimed:
            pipeline.run([lock_runs(runs), _completion(claimed)])


def _completion(claimed: list[Any]) -> tuple[Statement[Any, Any], Any]:
    ids, generations = [task.id for task in claimed], [task.generation for task in claimed]
    return complete_tasks, CompleteTasks("worker-2", ids, generations, ['{"ok":1}'] * len(ids))


def test_cancels_expiries_pauses_and_workers_never_wait_in_a_circle(
    connection: Connection[Any], connect: Connect, start: Any
) -> None:
    before = deadlocks(connection)
    for number in range(ROUNDS):
        started = [start(SIZE, PAST if index % 2 else None) for index in range(3)]
        run_ids = [run_id for run_id, _ in started]
        task_ids = [task_id for _, ids in started for task_id in ids]

        def steer(own: Connection[Any], run_ids: list[str] = run_ids) -> None:
            for run_id in run_ids:
                pause_run.fetch(own, run_id)
                resume_run.fetch(own, run_id)

        def cancel_runs(own: Connection[Any], run_ids: list[str] = run_ids) -> None:
            for run_id in reversed(run_ids):
                cancel_run.fetch(own, run_id, REASON, False)

        together_with(
            connect,
            steer,
            cancel_runs if number % 2 else complete_claimed,
            complete_claimed,
            lambda own: [expire_all(own, []) for _ in range(5)],
            lambda own, ids=task_ids[::-2]: cancel_all(own, ids),  # type: ignore[misc]
        )
    connection.execute("SELECT pg_stat_force_next_flush()")
    assert deadlocks(connection) == before
    (left,) = connection.execute(
        "SELECT count(*) FROM horsies_workflows AS run CROSS JOIN horsies_problems_v1(run.id)"
    )
    assert left[0] == 0
