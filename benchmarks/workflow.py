"""What workflows cost: nodes of a wide fan against plain tasks on the same worker, and steps of a chain."""

from __future__ import annotations

import importlib
import os
import statistics
from typing import Any

from psycopg import Connection

from benchmarks import lifecycle
from benchmarks.rounds import begin_round, heading, spread
from benchmarks.worker import connect, running_worker
from horsies.db.statements.workflows import start_runs
from horsies.ids import new_id
from horsies.workflow.build.plan import plan
from horsies.workflow.nodes.nodes import AnyNode, TaskNode
from horsies.workflow.spec import WorkflowSpec

WIDTH = 1_000
STEPS = 1_000
ROUNDS = 5
CHILDREN = (2, 4, 8)
TARGET = 0.7

# From the first start to the last end; the one node before and the one behind are not part of the fan.
FAN_SECONDS = """
SELECT extract(epoch FROM max(completed_at) - min(started_at)) FROM horsies_tasks
WHERE workflow_id = %s AND workflow_node_index BETWEEN 1 AND %s
"""
RUN_SECONDS = """
SELECT extract(epoch FROM max(completed_at) - min(started_at)) FROM horsies_tasks WHERE workflow_id = %s
"""
PLAIN_SECONDS = """
SELECT extract(epoch FROM max(completed_at) - min(started_at)) FROM horsies_tasks WHERE id = ANY(%s::uuid[])
"""
OPEN_RUNS = "SELECT count(*) FROM horsies_workflows WHERE status = 'RUNNING'"
OPEN_TASKS = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"


def _noop_app(url: str) -> Any:
    os.environ.setdefault("HORSIES_DATABASE_URL", url)
    return importlib.import_module("benchmarks.noop_app")


def _fan(app: Any, task: Any, *, takes: bool) -> WorkflowSpec[Any]:
    first = TaskNode(app.noop)
    after: dict[str, Any] = {"waits_for": [first]}
    if takes:
        after["args_from"] = {"before": first}
    middle: list[AnyNode] = [TaskNode(task, **after) for _ in range(WIDTH)]
    last = TaskNode(app.noop, waits_for=middle)
    spec: WorkflowSpec[Any] = app.app.workflow(
        "fan", [first, *middle, last], definition_key="benchmarks.fan"
    )
    return spec


def _chain(app: Any) -> WorkflowSpec[Any]:
    nodes = [TaskNode(app.noop)]
    for _ in range(STEPS - 1):
        before = nodes[-1]
        nodes.append(TaskNode(app.after, args_from={"before": before}, waits_for=[before]))
    spec: WorkflowSpec[Any] = app.app.workflow("chain", nodes, definition_key="benchmarks.chain")
    return spec


def _run(connection: Connection[Any], spec: WorkflowSpec[Any]) -> str:
    run_id = new_id()
    start_runs.fetch(connection, f"[{plan(spec, run_id)}]")
    _wait(connection, OPEN_RUNS)
    return run_id


def _wait(connection: Connection[Any], question: bytes | str) -> None:
    """Look rarely, so as not to be part of the load."""
    while _number(connection, question):
        connection.execute("SELECT pg_sleep(0.1)")


def _number(connection: Connection[Any], question: Any, *values: Any) -> float:
    row = connection.execute(question, values).fetchone()
    assert row is not None
    return float(row[0])


def _plain_rate(connection: Connection[Any]) -> float:
    ids = [new_id() for _ in range(WIDTH)]
    lifecycle.insert(connection, ids)
    _wait(connection, OPEN_TASKS)
    return WIDTH / _number(connection, PLAIN_SECONDS, ids)


def _rates(url: str, children: int) -> dict[str, list[float]]:
    app = _noop_app(url)
    found: dict[str, list[float]] = {"plain": [], "fan": [], "fan, taking": [], "chain": []}
    with connect(url) as connection:
        lifecycle.load(connection, 1)
        with running_worker(url, children, "--max-tasks-per-child", "0"):
            _wait(connection, OPEN_TASKS)
            for _ in range(ROUNDS):
                connection.execute("VACUUM (ANALYZE) horsies_tasks, horsies_workflow_tasks")
                begin_round()
                found["plain"].append(_plain_rate(connection))
                for name, task in (("fan", app.noop), ("fan, taking", app.after)):
                    run_id = _run(connection, _fan(app, task, takes=task is app.after))
                    seconds = _number(connection, FAN_SECONDS, run_id, WIDTH)
                    found[name].append(WIDTH / seconds)
                run_id = _run(connection, _chain(app))
                found["chain"].append(STEPS / _number(connection, RUN_SECONDS, run_id))
        connection.execute("TRUNCATE horsies_workflows CASCADE")
    return found


def workflow(url: str) -> bool:
    """Let one worker run plain tasks, wide fans and chains in turn, with 2, 4 and 8 children."""
    measured = {children: _rates(url, children) for children in CHILDREN}
    heading(
        f"workflows, {WIDTH} nodes wide and {STEPS} steps long, median (min-max) of {ROUNDS}, per second"
    )
    print(
        f"  {'':12}{'plain tasks':>24}{'fan':>24}{'fan, taking':>24}{'chain':>20}{'ratio':>8}{'target':>8}"
    )
    good = True
    for children, found in measured.items():
        ratio = statistics.median(found["fan"]) / statistics.median(found["plain"])
        good &= ratio >= TARGET
        print(
            f"  {children} children{'':2}{spread(found['plain']):>24}{spread(found['fan']):>24}"
            f"{spread(found['fan, taking']):>24}{spread(found['chain']):>20}{ratio:>8.2f}{TARGET:>8.2f}"
        )
    return good


BENCHMARKS = {"workflow": workflow}
