"""The cost of workflows: nodes of chains, fans and maps compared with plain tasks on the same worker,
and starts of runs compared with single sends by the same producer.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import psutil
from psycopg import Connection

from benchmarks import lifecycle
from benchmarks.figures import counters, processor_us, processor_us_of_worker
from benchmarks.rounds import alternate, begin_round, heading, median, ratios, spread
from benchmarks.worker import connect, costs, running_worker
from horsies import start_many
from horsies.ids import new_id
from horsies.workflow.nodes.nodes import AnyNode, MapNode, TaskNode
from horsies.workflow.spec import WorkflowSpec

# Nodes per shape and round; a fan or a map is one run.
NODES = 1_000
ROUNDS = 5
CHILDREN = (4, 8)
NODE_TARGET = 0.8
# The number of starts and sends per round.
STARTS = 200
SENDS = 600
START_TARGET = 0.4

# The time from the first start to the last finish, without the nodes before and after a fan or a
# map.
PLAIN_SECONDS = """
SELECT extract(epoch FROM max(completed_at) - min(started_at)) FROM horsies_tasks
WHERE id = ANY(%s::uuid[])
"""
NODE_SECONDS = """
SELECT extract(epoch FROM max(completed_at) - min(started_at)) FROM horsies_tasks
WHERE workflow_id = ANY(%s::uuid[]) AND workflow_node_index BETWEEN %s AND %s
"""
OPEN_RUNS = "SELECT count(*) FROM horsies_workflows WHERE status = 'RUNNING'"
OPEN_TASKS = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
EMPTY = "TRUNCATE horsies_workflows, horsies_workflow_tasks, horsies_tasks CASCADE"
# The server processes that work for the producer.
SERVER_PIDS = """
SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'horsies:%' AND datname = current_database()
"""


def _noop_app(url: str) -> Any:
    os.environ.setdefault("HORSIES_DATABASE_URL", url)
    app = importlib.import_module("benchmarks.noop_app")
    app.app.get_broker().ensure_schema_initialized().unwrap()
    return app


def _taking_chain(app: Any) -> WorkflowSpec[Any]:
    """Build nodes that take each other's results; ``app.chain`` only waits for them."""
    nodes = [TaskNode(app.noop)]
    while len(nodes) < app.STEPS:
        nodes.append(_after(app, nodes[-1], takes=True))
    return _spec(app, "chain", nodes)


def _fan(app: Any, *, takes: bool = False) -> WorkflowSpec[Any]:
    first = TaskNode(app.noop)
    middle: list[AnyNode] = [_after(app, first, takes=takes) for _ in range(NODES)]
    return _spec(app, "fan", [first, *middle, TaskNode(app.noop, waits_for=middle)])


def _after(app: Any, before: TaskNode[Any], *, takes: bool) -> TaskNode[Any]:
    """Build a node behind another node; it takes the result or only waits for it."""
    if takes:
        return TaskNode(app.after, args_from={"before": before}, waits_for=[before])
    return TaskNode(app.noop, waits_for=[before])


def _map(app: Any) -> WorkflowSpec[Any]:
    numbers = TaskNode(app.numbers, kwargs={"count": NODES})
    each = MapNode(app.number, over=numbers, each="number")
    return _spec(app, "map", [numbers, each])


def _spec(app: Any, name: str, nodes: Sequence[AnyNode]) -> WorkflowSpec[Any]:
    spec: WorkflowSpec[Any] = app.app.workflow(
        name, list(nodes), definition_key=f"benchmarks.{name}"
    )
    return spec


def _wait(connection: Connection[Any], question: str) -> None:
    """Poll rarely, to add little load."""
    while _number(connection, question):
        connection.execute("SELECT pg_sleep(0.1)")


def _number(connection: Connection[Any], question: Any, *values: Any) -> float:
    row = connection.execute(question, values).fetchone()
    assert row is not None
    return float(row[0])


class _Shape(NamedTuple):
    """Runs to start in one call, and the indexes of the nodes to measure."""

    spec: WorkflowSpec[Any]
    runs: int
    first: int
    last: int


def _shapes(app: Any) -> dict[str, _Shape]:
    chains = NODES // app.STEPS
    return {
        "chains": _Shape(app.chain(), chains, 0, app.STEPS),
        "chains, taking": _Shape(_taking_chain(app), chains, 0, app.STEPS),
        "fan": _Shape(_fan(app), 1, 1, NODES),
        "fan, taking": _Shape(_fan(app, takes=True), 1, 1, NODES),
        "map": _Shape(_map(app), 1, 1, 1),
    }


class _Drain:
    """One worker that runs the same number of plain tasks and of nodes."""

    def __init__(self, connection: Connection[Any], worker_pid: int) -> None:
        self._connection = connection
        self._worker_pid = worker_pid

    def plain(self) -> dict[str, float]:
        ids = [new_id() for _ in range(NODES)]
        return self._measured(
            lambda: lifecycle.insert(self._connection, ids),
            lambda: _number(self._connection, PLAIN_SECONDS, ids),
        )

    def runs(self, shape: _Shape) -> dict[str, float]:
        ids: list[str] = []

        def start() -> None:
            handles = start_many([shape.spec] * shape.runs).unwrap()
            ids.extend(handle.workflow_id for handle in handles)

        seconds = partial(_number, self._connection, NODE_SECONDS, ids, shape.first, shape.last)
        return self._measured(start, seconds)

    def _measured(self, load: Callable[[], None], seconds: Callable[[], float]) -> dict[str, float]:
        self._connection.execute("VACUUM (ANALYZE) horsies_tasks, horsies_workflow_tasks")
        begin_round()
        before = self._spent()
        load()
        _wait(self._connection, OPEN_RUNS)
        _wait(self._connection, OPEN_TASKS)
        after = self._spent()
        spent = {name: (after[name] - before[name]) / NODES for name in before}
        return {"rate": NODES / seconds(), **spent}

    def _spent(self) -> dict[str, float]:
        connection = self._connection
        return counters(connection) | processor_us_of_worker(connection, self._worker_pid)


def _rates(url: str, children: int) -> dict[str, list[dict[str, float]]]:
    app = _noop_app(url)
    with connect(url) as connection:
        connection.execute(EMPTY)
        with running_worker(url, children, "--max-tasks-per-child", "0") as worker:
            lifecycle.insert(connection, [new_id() for _ in range(4 * children)])
            _wait(connection, OPEN_TASKS)
            drain = _Drain(connection, worker.pid)
            variants: dict[str, Callable[[], dict[str, float]]] = {
                "plain tasks": drain.plain,
                **{name: partial(drain.runs, shape) for name, shape in _shapes(app).items()},
            }
            found = alternate(variants, ROUNDS)
        connection.execute(EMPTY)
    return found


def workflow(url: str) -> bool:
    """Let one worker run plain tasks, chains, fans and maps alternately, with 4 and 8 children."""
    measured = {children: _rates(url, children) for children in CHILDREN}
    heading(f"workflows, {NODES:,} nodes of each shape, median (min-max) of {ROUNDS}")
    good = True
    for children, found in measured.items():
        print(f"  {children} children")
        for name, runs in found.items():
            # A node that takes a result does more work than a plain task.
            good &= _print_shape(name, runs, found["plain tasks"]) or name.endswith("taking")
    print(f"  target of nodes that take no result: {NODE_TARGET}")
    return good


def _print_shape(
    name: str, runs: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]
) -> bool:
    parts = ratios(runs, plain, "rate")
    rates, each = spread([run["rate"] for run in runs]), costs([dict(run) for run in runs])
    print(f"    {name:14}{rates:>22} /s, ratio {spread(parts, 2)}; per node: {each}")
    return statistics.median(parts) >= NODE_TARGET


def starts(url: str) -> bool:
    """Send single tasks, and start runs of five nodes one by one and 200 in one call, without a worker."""
    app = _noop_app(url)
    with connect(url) as connection:
        producer = _Producer(app, connection)
        for warm_up in (producer.sends, producer.starts):
            warm_up()
        found = alternate(
            {
                "single sends": producer.sends,
                "starts": producer.starts,
                "built starts": producer.built_starts,
                "start_many": producer.start_many,
            },
            ROUNDS,
        )
        connection.execute(EMPTY)
    app.app.close()
    heading(
        f"starts of runs of {app.STEPS} nodes against single sends, median (min-max) of {ROUNDS}"
    )
    sends = found["single sends"]
    for name, runs in found.items():
        rates, parts = spread([run["rate"] for run in runs]), ratios(runs, sends, "rate")
        spent = ", ".join(
            f"{who} {median(runs, f'{who}_us'):.0f}" for who in ("producer", "server")
        )
        print(
            f"  {name:14}{rates:>22} /s, ratio {spread(parts, 2)}; each: {median(runs, 'commits'):.2f} "
            f"commits, {median(runs, 'wal_bytes'):,.0f} B of WAL, processor µs: {spent}"
        )
    print(f"  target of starts: {START_TARGET}")
    return statistics.median(ratios(found["starts"], sends, "rate")) >= START_TARGET


class _Producer:
    """One process that sends tasks and starts runs of one specification."""

    def __init__(self, app: Any, connection: Connection[Any]) -> None:
        self._app = app
        self._connection = connection
        self._spec = app.chain()

    def sends(self) -> dict[str, float]:
        return self._measured(SENDS, lambda: [self._app.noop.send().unwrap() for _ in range(SENDS)])

    def starts(self) -> dict[str, float]:
        return self._measured(STARTS, lambda: [self._spec.start().unwrap() for _ in range(STARTS)])

    def built_starts(self) -> dict[str, float]:
        def start() -> None:
            for _ in range(STARTS):
                self._app.chain().start().unwrap()

        return self._measured(STARTS, start)

    def start_many(self) -> dict[str, float]:
        return self._measured(STARTS, lambda: start_many([self._spec] * STARTS).unwrap())

    def _measured(self, count: int, work: Callable[[], object]) -> dict[str, float]:
        self._connection.execute(EMPTY)
        begin_round()
        before = self._spent()
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        after = self._spent()
        spent = {name: (after[name] - before[name]) / count for name in before}
        return {"rate": count / seconds, **spent}

    def _spent(self) -> dict[str, float]:
        pids = [row[0] for row in self._connection.execute(SERVER_PIDS).fetchall()]
        return counters(self._connection) | {
            "producer_us": time.process_time() * 1e6,
            "server_us": sum(processor_us(psutil.Process(pid)) for pid in pids),
        }


BENCHMARKS = {"workflow": workflow, "starts": starts}
