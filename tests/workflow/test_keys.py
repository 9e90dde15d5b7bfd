"""Runs whose tasks have keys: where the keys come from, and what a pause does to them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from horsies import (
    Horsies,
    MapNode,
    WorkflowStartError,
    WorkflowStartErrorCode,
    from_node,
)
from horsies.db.statements.turn import CompleteTasks, complete_tasks
from horsies.db.statements.workflows import lock_runs
from horsies.errors import WorkflowValidationError
from horsies.ids import new_id
from horsies.tasks.keys import lane_of
from horsies.workflow.run.listing import audit
from tests.support.applications import Task
from tests.support.database import Database
from tests.support.keys import Ring, limit, retry
from tests.support.turns import Tasks
from tests.support.wait import wait_until

ROWS = """SELECT task_name::text, lane_key, lane, held FROM horsies_tasks
    WHERE status IN ('PENDING', 'RUNNING') ORDER BY id"""


def rows(connection: Database) -> list[tuple[Any, ...]]:
    return connection.execute(ROWS).fetchall()


def keyed(key: str) -> tuple[str, int, bool]:
    return key, lane_of("default", key).number, True


@pytest.fixture
def sync(app: Horsies) -> Task:
    @app.task("sync", key="tenant")
    def sync(tenant: str, number: int = 0) -> int:
        return number

    return sync


def chain(app: Horsies, tasks: Tasks, sync: Task, **options: Any) -> Any:
    first = sync.node(node_id="first")(tenant="acme")
    middle = tasks.square.node(node_id="middle")(item=3)
    middle.waits_for = [first]
    return app.workflow("chain", [first, middle], definition_key="chain", **options)


def finish(connection: Database, task: Any) -> None:
    done = CompleteTasks("w", [task.id], [task.generation], ['{"ok":7}'], [None])
    assert complete_tasks.run(connection, done)


def test_nodes_have_the_keys_of_their_tasks_and_of_the_run(
    app: Horsies, tasks: Tasks, sync: Task, connection: Database
) -> None:
    chain(app, tasks, sync, key="import").start().unwrap()
    assert rows(connection) == [("sync", *keyed("acme"))]
    ring = Ring(connection)
    (task,) = ring.take()
    finish(connection, task)
    assert rows(connection) == [("square", *keyed("import"))]


def test_a_start_gives_its_run_a_key(app: Horsies, tasks: Tasks, connection: Database) -> None:
    spec = app.workflow(
        "one", [tasks.number.node(node_id="first")()], definition_key="one", key="import"
    )
    spec.start(key="acme").unwrap()
    spec.start().unwrap()
    asyncio.run(spec.start_async(key="zeta")).unwrap()
    failed = WorkflowStartError(
        *(WorkflowStartErrorCode.ENQUEUE_FAILED, "down", True, "one", new_id()), key="again"
    )
    spec.retry_start(failed).unwrap()
    assert sorted(row[1] for row in rows(connection)) == ["acme", "again", "import", "zeta"]


@pytest.mark.parametrize("key", ["", 7, "x" * 256, "\0"])
def test_a_bad_key_of_a_start_is_refused(
    app: Horsies, tasks: Tasks, connection: Database, key: Any
) -> None:
    spec = app.workflow("bad", [tasks.number.node(node_id="first")()], definition_key="bad")
    refused = spec.start(key=key).unwrap_err()
    assert refused.code is WorkflowStartErrorCode.VALIDATION_FAILED
    assert refused.message.startswith("Workflow 'bad' was not started: key ")
    assert rows(connection) == []


def test_nodes_without_keys_stay_plain(
    app: Horsies, tasks: Tasks, sync: Task, connection: Database
) -> None:
    chain(app, tasks, sync).start().unwrap()
    (task,) = Ring(connection).take()
    finish(connection, task)
    assert rows(connection) == [("square", None, None, False)]


def test_the_items_of_a_map_have_the_key_of_the_run(
    app: Horsies, tasks: Tasks, connection: Database
) -> None:
    numbers = tasks.numbers.node(node_id="numbers")()
    squares = MapNode(tasks.square, over=numbers, node_id="squares")
    app.workflow("map", [numbers, squares], definition_key="map", key="acme").start().unwrap()
    ring = Ring(connection)
    (task,) = ring.take()
    done = CompleteTasks("w", [task.id], [task.generation], ['{"ok":[1,2,3]}'], [None])
    assert complete_tasks.run(connection, done)
    assert rows(connection) == [("square", *keyed("acme"))] * 3
    assert len(ring.take(8)) == 3


def test_a_pause_takes_tasks_out_of_their_lane_and_a_resume_puts_them_back(
    app: Horsies, tasks: Tasks, sync: Task, connection: Database
) -> None:
    handle = chain(app, tasks, sync).start().unwrap()
    ring = Ring(connection)
    handle.pause().unwrap()
    assert rows(connection) == [("sync", "acme", None, True)]
    assert ring.take() == []
    handle.resume().unwrap()
    assert rows(connection) == [("sync", *keyed("acme"))]
    assert len(ring.take()) == 1


def test_a_task_that_runs_counts_in_its_lane_while_its_run_is_paused(
    app: Horsies, tasks: Tasks, sync: Task, connection: Database
) -> None:
    handle = chain(app, tasks, sync).start().unwrap()
    ring = Ring(connection)
    (task,) = ring.take()
    handle.pause().unwrap()
    assert rows(connection) == [("sync", *keyed("acme"))]
    retry(connection, task, 0.0)
    assert rows(connection) == [("sync", "acme", None, True)], "it waits for the resume"
    assert ring.take() == []
    handle.resume().unwrap()
    assert [one.id for one in ring.take()] == [task.id]


class Claimers:
    """Threads that claim and end the tasks of one run, as four workers do."""

    def __init__(self, url: str, workflow_id: str) -> None:
        self._url, self._workflow_id = url, workflow_id
        self.has_ended = threading.Event()

    def serve(self, number: int) -> int:
        """Claim until the run has ended, and return how many tasks were ended."""
        ended = 0
        with psycopg.connect(self._url, autocommit=True) as connection:
            ring = Ring(connection)
            while not self.has_ended.is_set():
                taken = ring.take(2, worker_id=f"w{number}")
                for task in taken:
                    self._end(connection, f"w{number}", task)
                ended += len(taken)
                if not taken:
                    self.has_ended.wait(0.005)
        return ended

    def _end(self, connection: psycopg.Connection[Any], worker_id: str, task: Any) -> None:
        with connection.transaction():
            lock_runs.fetch(connection, [self._workflow_id])
            done = CompleteTasks(worker_id, [task.id], [task.generation], ['{"ok":7}'], [None])
            assert complete_tasks.run(connection, done)


def numbered(connection: Database, query: str, *values: Any) -> int:
    ((found,),) = connection.execute(query.encode(), values).fetchall()
    return int(found)


NODES = "SELECT count(*) FROM horsies_tasks WHERE status = 'COMPLETED'"
CLAIMED_SINCE = "SELECT count(*) FROM horsies_tasks WHERE claimed_at > %s"
CLOCK = "SELECT clock_timestamp()"
IN_FLIGHT = "SELECT count(*) FROM horsies_tasks WHERE status = 'RUNNING'"
CHAINS, LENGTH = 6, 8


def many_chains(app: Horsies, sync: Task) -> Any:
    """Chains side by side, with a key for every two of them."""
    nodes = []
    for chain_number in range(CHAINS):
        before: list[Any] = []
        for place in range(LENGTH):
            name = f"n{chain_number}-{place}"
            node = sync.node(node_id=name)(tenant=f"key {chain_number % 3}", number=place)
            node.waits_for = before
            before = [node]
            nodes.append(node)
    return app.workflow("chains", nodes, definition_key="chains")


def test_a_run_is_paused_and_resumed_while_four_workers_claim_its_tasks(
    app: Horsies, sync: Task, connection: Database, process_url: str
) -> None:
    limit(connection, max_concurrency=2)
    handle = many_chains(app, sync).start().unwrap()
    claimers = Claimers(process_url, handle.workflow_id)
    pauses = 0
    with ThreadPoolExecutor(4) as pool:
        served = pool.map(claimers.serve, range(4))
        try:
            while (done := numbered(connection, NODES)) < CHAINS * LENGTH:
                if not handle.pause().ok:
                    break  # it has just ended
                ((paused_at,),) = connection.execute(CLOCK).fetchall()
                wait_until(lambda: numbered(connection, IN_FLIGHT) == 0)
                assert numbered(connection, CLAIMED_SINCE, paused_at) == 0
                assert audit(app.get_broker(), 10).unwrap() == []
                done = numbered(connection, NODES)
                pauses += 1
                handle.resume().unwrap()
                goal = min(done + 5, CHAINS * LENGTH)
                wait_until(lambda goal=goal: numbered(connection, NODES) >= goal)  # type: ignore[misc]
        finally:
            claimers.has_ended.set()
        assert sum(served) == CHAINS * LENGTH
    assert pauses >= 3
    assert handle.get(30_000).is_ok()
    assert audit(app.get_broker(), 10).unwrap() == []
    found = connection.execute(
        "SELECT DISTINCT status, generation, lane = horsies_lane_v1(queue_name, lane_key) "
        "FROM horsies_tasks"
    )
    assert found.fetchall() == [("COMPLETED", 1, True)], "each task was claimed once"


def test_a_key_that_comes_from_another_node_is_refused_when_the_workflow_is_built(
    app: Horsies, sync: Task
) -> None:
    @app.task("name")
    def name() -> str:
        return "acme"

    first = name.node(node_id="first")()
    second = sync.node(node_id="second")(tenant=from_node(first))
    with pytest.raises(WorkflowValidationError, match="'tenant' comes from another node"):
        app.workflow("late", [first, second], definition_key="late")


@pytest.mark.parametrize("key", ["", 7, "x" * 256])
def test_a_bad_key_of_a_run_is_refused(app: Horsies, tasks: Tasks, key: Any) -> None:
    node = tasks.number.node(node_id="first")()
    with pytest.raises(WorkflowValidationError, match="has a key that cannot be stored: key must"):
        app.workflow("bad", [node], definition_key="bad", key=key)
