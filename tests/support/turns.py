"""The work of workers on the nodes of a run, executed by the test with the statements of a turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from horsies.app import Horsies
from horsies.db.statement import Statement
from horsies.db.statements.turn import CompleteTasks, FailTasks, complete_tasks, fail_tasks
from horsies.db.statements.workflows import lock_runs
from horsies.task import TaskFunction
from horsies.task_result import TaskError, TaskResult
from horsies.workflow.build.plan import Parent, plan
from horsies.workflow.spec import WorkflowSpec
from tests.support.database import Database

WORKER = "hands"

FIND = """
SELECT coalesce(item.id, node.task_id)::text FROM horsies_workflow_tasks AS node
LEFT JOIN LATERAL (
    SELECT task.id FROM horsies_tasks AS task
    WHERE task.workflow_id = node.workflow_id AND task.workflow_node_index = node.task_index
      AND task.workflow_item_index = %s
    ORDER BY task.id DESC LIMIT 1) AS item ON true
WHERE node.workflow_id = %s AND node.node_id = %s
"""

TAKE = """
UPDATE horsies_tasks SET status = 'RUNNING', generation = generation + 1, claimed_by_worker_id = %s,
    started_at = clock_timestamp(), worker_hostname = 'host-1', worker_pid = 7
WHERE id = %s AND status = 'PENDING' AND NOT held RETURNING generation
"""


@dataclass(frozen=True)
class Tasks:
    """The tasks of these tests' workflows."""

    number: TaskFunction[Any, int]
    numbers: TaskFunction[Any, list[int]]
    add: TaskFunction[Any, int]
    square: TaskFunction[Any, int]


def define_tasks(app: Horsies) -> Tasks:
    """Register the tasks with an application."""

    @app.task("number")
    def number(n: int = 1) -> TaskResult[int, TaskError]:
        return TaskResult(ok=n)

    @app.task("numbers")
    def numbers() -> TaskResult[list[int], TaskError]:
        return TaskResult(ok=[1, 2, 3])

    @app.task("add")
    def add(
        first: TaskResult[int, TaskError], second: TaskResult[int, TaskError] | None = None
    ) -> TaskResult[int, TaskError]:
        return TaskResult(ok=first.ok_value + (second.ok_value if second else 0))

    @app.task("square")
    def square(item: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=item * item)

    return Tasks(number, numbers, add, square)


class Hands:
    """Claims the tasks of nodes and records their outcomes."""

    def __init__(self, connection: Database) -> None:
        self.connection = connection

    def task_id(self, workflow_id: str, node_id: str, item: int | None = None) -> str:
        """Return the current task of a node, or of an item of a map."""
        found = self.connection.execute(FIND, (item, workflow_id, node_id)).fetchone()
        assert found is not None, f"there is no node {node_id}"
        assert found[0] is not None, f"node {node_id} has no task"
        return str(found[0])

    def take(self, workflow_id: str, node_id: str, item: int | None = None) -> tuple[str, int]:
        """Claim a task as a worker does; return it with its generation."""
        task_id = self.task_id(workflow_id, node_id, item)
        taken = self.connection.execute(TAKE, (WORKER, task_id)).fetchone()
        assert taken is not None, f"the task of node {node_id} cannot be claimed"
        return task_id, taken[0]

    def is_takeable(self, workflow_id: str, node_id: str) -> bool:
        """Return whether a worker could claim a node's task."""
        found = self.connection.execute(
            "SELECT status = 'PENDING' AND NOT held AND enqueued_at <= clock_timestamp() "
            "FROM horsies_tasks WHERE id = %s",
            (self.task_id(workflow_id, node_id),),
        ).fetchone()
        return found is not None and bool(found[0])

    def complete(
        self, workflow_id: str, node_id: str, value: Any = 1, item: int | None = None
    ) -> None:
        """Run a node's task successfully."""
        self.end(workflow_id, self.take(workflow_id, node_id, item), {"ok": value})

    def fail(
        self, workflow_id: str, node_id: str, code: str = "BOOM", item: int | None = None
    ) -> None:
        """Run a node's task unsuccessfully."""
        error = {"error_code": code, "message": f"{node_id} broke", "data": None, "exception": None}
        self.end(workflow_id, self.take(workflow_id, node_id, item), {"err": error})

    def end(self, workflow_id: str, taken: tuple[str, int], result: dict[str, Any]) -> None:
        """Record this result of a running task, in a transaction like a turn's."""
        text, (task_id, generation) = json.dumps(result, separators=(",", ":")), taken
        with self.connection.transaction():
            lock_runs.fetch(self.connection, [workflow_id])
            if "ok" in result:
                done = CompleteTasks(WORKER, [task_id], [generation], [text])
                assert self._ended(complete_tasks, done)
            else:
                code = str(result["err"]["error_code"])
                failed = FailTasks(
                    WORKER,
                    [task_id],
                    [generation],
                    ["FAILED"],
                    [text],
                    ["FAILED"],
                    [code],
                    [None],
                    [None],
                )
                assert self._ended(fail_tasks, failed)

    def _ended(self, statement: Statement[Any, Any], params: Any) -> bool:
        return len(statement.run(self.connection, params)) == 1

    def expand(
        self, workflow_id: str, node_id: str, spec: WorkflowSpec[Any], child_id: str
    ) -> None:
        """Complete the expansion task of a sub-workflow node with this child."""
        row = self.connection.execute(
            "SELECT run.root_workflow_id::text, run.depth, node.task_index "
            "FROM horsies_workflows AS run JOIN horsies_workflow_tasks AS node "
            "ON node.workflow_id = run.id WHERE run.id = %s AND node.node_id = %s",
            (workflow_id, node_id),
        ).fetchone()
        assert row is not None
        parent = Parent(
            workflow_id=workflow_id, root_workflow_id=row[0], depth=row[1], task_index=row[2]
        )
        self.complete(workflow_id, node_id, json.loads(plan(spec, child_id, parent=parent)))

    def statuses(self, workflow_id: str) -> dict[str, str]:
        """Return the stored status of every node."""
        found = self.connection.execute(
            "SELECT node_id, status FROM horsies_workflow_tasks WHERE workflow_id = %s",
            (workflow_id,),
        )
        return dict(found.fetchall())

    def status(self, workflow_id: str) -> str:
        """Return the stored status of the run."""
        found = self.connection.execute(
            "SELECT status FROM horsies_workflows WHERE id = %s", (workflow_id,)
        ).fetchone()
        assert found is not None
        return str(found[0])

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        found = self.connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert found is not None
        return int(found[0])
