"""A workflow in the database, with the changes that workers and operators make. It executes the
statements of the catalogues, and updates task rows directly if a test needs a change that no worker
makes in one statement. Plans are written directly, so nothing here depends on the way users write
workflows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from psycopg import Connection

from horsies.db.statement import Step
from horsies.db.statements.tasks import cancel_tasks
from horsies.db.statements.turn import (
    CompleteTasks,
    FailTasks,
    RetryTasks,
    complete_tasks,
    fail_tasks,
    retry_tasks,
)
from horsies.db.statements.workflows import (
    cancel_run,
    expire_run,
    find_broken_runs,
    lock_runs,
    pause_run,
    resume_retrying_run,
    resume_run,
    retry_run,
    signal_run,
    start_runs,
)
from horsies.ids import new_id
from tests.support.oracle.plans import Above, plan
from tests.support.oracle.shapes import RunShape, node_id
from tests.support.oracle.tree import End, Place

WORKER = "tester"
ERROR_CODES = {"CANCELLED": "TASK_CANCELLED", "EXPIRED": "TASK_EXPIRED"}

# The current task of a place: the node's own task, or the item's newest task.
FIND_TASKS = """
SELECT wanted.place, task.id::text AS id, task.generation
FROM unnest(%s::uuid[], %s::integer[], %s::integer[])
    WITH ORDINALITY AS wanted (workflow_id, task_index, item_index, place)
JOIN horsies_workflow_tasks AS node
    ON node.workflow_id = wanted.workflow_id AND node.task_index = wanted.task_index
LEFT JOIN LATERAL horsies_items(node.workflow_id, node.task_index) AS item
    ON item.item_index = wanted.item_index
LEFT JOIN horsies_tasks AS task ON task.id = coalesce(node.task_id, item.id)
ORDER BY wanted.place
"""

CLAIM = """
UPDATE horsies_tasks SET status = %s, generation = generation + 1, claimed_by_worker_id = %s,
    claimed_at = clock_timestamp(), claimed = %s = 'CLAIMED',
    claim_expires_at = CASE %s WHEN 'CLAIMED' THEN clock_timestamp() + interval '1 hour' END,
    started_at = CASE %s WHEN 'RUNNING' THEN clock_timestamp() END
WHERE id = ANY(%s::uuid[]) AND status IN ('PENDING', 'CLAIMED') AND NOT held
"""

FINISH = """
UPDATE horsies_tasks AS task SET
    status = ended.status, result = ended.result, error_code = ended.error_code,
    completed_at = CASE ended.status WHEN 'COMPLETED' THEN clock_timestamp() END,
    failed_at = CASE ended.status WHEN 'COMPLETED' THEN NULL ELSE clock_timestamp() END
FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[]) AS ended (id, status, result, error_code)
WHERE task.id = ended.id AND task.status IN ('PENDING', 'CLAIMED', 'RUNNING')
"""


class Engine:
    """One connection that starts, executes and controls runs."""

    def __init__(self, connection: Connection[Any]) -> None:
        self.connection = connection

    def start(self, shape: RunShape, run_id: str | None = None, **settings: Any) -> str:
        """Start one run and return its id."""
        run_id = run_id or new_id()
        self.start_many([plan(run_id, shape, **settings)])
        return run_id

    def start_many(self, plans: Sequence[dict[str, Any]]) -> list[Any]:
        """Start runs with one statement."""
        return start_runs.fetch(self.connection, json.dumps(plans))

    def pause(self, run_id: str) -> str | None:
        return self._steer(pause_run(run_id))

    def resume(self, run_id: str) -> str | None:
        return self._steer(resume_run(run_id))

    def resume_retrying(self, run_id: str) -> str | None:
        return self._steer(resume_retrying_run(run_id))

    def cancel(self, run_id: str, reason: dict[str, Any], interrupt: bool = False) -> str | None:
        return self._steer(cancel_run(run_id, json.dumps(reason), interrupt))

    def retry(self, run_id: str, indexes: Sequence[int] | None = None) -> str | None:
        names = None if indexes is None else [node_id(index) for index in indexes]
        return self._steer(retry_run(run_id, names))

    def signal(self, run_id: str, name: str, value: Any) -> str | None:
        return self._steer(signal_run(run_id, name, json.dumps(value)))

    def expire(self, run_id: str, reason: dict[str, Any]) -> bool:
        (row,) = expire_run.fetch(self.connection, run_id, 0, json.dumps(reason))
        return row.expired

    def problems(self) -> list[str]:
        """Return the inconsistencies of all open runs."""
        return [row.problem for row in find_broken_runs.fetch(self.connection, 50)]

    def problems_of(self, run_ids: Sequence[str]) -> list[str]:
        """Return the inconsistencies of these runs."""
        found = self.connection.execute(
            "SELECT problem FROM unnest(%s::uuid[]) AS run (id) "
            "CROSS JOIN LATERAL horsies_problems_v1(run.id) AS problem",
            (run_ids,),
        )
        return [problem for (problem,) in found]

    def _steer(self, step: Step) -> str | None:
        statement, params = step
        (row,) = statement.run(self.connection, params)
        answer: str | None = row.answer
        return answer

    def lock(self, run_ids: Iterable[str]) -> None:
        """Lock the roots of these runs, as a turn does before it records their tasks' outcomes."""
        lock_runs.fetch(self.connection, sorted(set(run_ids)))

    def tasks(self, places: Sequence[Place]) -> list[tuple[str, int]]:
        """Return the task of each place with its generation."""
        runs, indexes, items = (list(column) for column in zip(*places, strict=True))
        found = self.connection.execute(FIND_TASKS, (runs, indexes, items)).fetchall()
        assert len(found) == len(places)
        return [(task_id, generation) for _, task_id, generation in found]

    def claim(self, places: Sequence[Place], state: str = "RUNNING") -> int:
        """Claim these tasks, as RUNNING or CLAIMED; return the number of claimed tasks."""
        ids = [task_id for task_id, _ in self.tasks(places)]
        taken = self.connection.execute(CLAIM, (state, WORKER, state, state, state, ids))
        return taken.rowcount

    def finish(self, ends: Sequence[End]) -> None:
        """End all of these tasks with one update, each task with its own outcome."""
        with self.connection.transaction():
            self.lock(end.place[0] for end in ends)
            ids = [task_id for task_id, _ in self.tasks([end.place for end in ends])]
            columns = (
                [end.state for end in ends],
                [self.result_text(end) for end in ends],
                [ERROR_CODES.get(end.state) for end in ends],
            )
            changed = self.connection.execute(FINISH, (ids, *columns))
            assert changed.rowcount == len(ends)

    def finish_turn(self, ends: Sequence[End]) -> None:
        """End running tasks as a worker's turn does: first successes, then failures."""
        good = [end for end in ends if end.state == "COMPLETED"]
        bad = [end for end in ends if end.state != "COMPLETED"]
        with self.connection.transaction():
            self.lock(end.place[0] for end in ends)
            if good:
                self._complete(good)
            if bad:
                self._fail(bad)

    def _complete(self, ends: Sequence[End]) -> None:
        ids, generations = zip(*self.tasks([end.place for end in ends]), strict=True)
        results = [self.result_text(end) or "" for end in ends]
        done = complete_tasks.run(
            self.connection, CompleteTasks(WORKER, list(ids), list(generations), results)
        )
        assert len(done) == len(ends)

    def _fail(self, ends: Sequence[End]) -> None:
        ids, generations = zip(*self.tasks([end.place for end in ends]), strict=True)
        codes = [ERROR_CODES.get(end.state, "BOOM") for end in ends]
        done = fail_tasks.run(
            self.connection,
            FailTasks(
                WORKER,
                list(ids),
                list(generations),
                [end.state for end in ends],
                [self.result_text(end) for end in ends],
                ["FAILED"] * len(ends),
                codes,
                [None] * len(ends),
                [None] * len(ends),
            ),
        )
        assert len(done) == len(ends)

    def give_back(self, places: Sequence[Place]) -> int:
        """Retry running tasks later if a retry is still allowed; return the number of retried tasks."""
        ids, generations = zip(*self.tasks(places), strict=True)
        count = len(places)
        nothing: list[str | None] = [None] * count
        retried = retry_tasks.run(
            self.connection,
            RetryTasks(
                WORKER,
                list(ids),
                list(generations),
                [0.0] * count,
                ["FAILED"] * count,
                nothing,
                nothing,
                nothing,
            ),
        )
        return len(retried)

    def cancel_task(self, place: Place) -> bool:
        """Cancel one task that has not started; return whether it was cancelled."""
        ((task_id, _),) = self.tasks([place])
        (row,) = cancel_tasks.fetch(self.connection, [task_id], False)
        return row.applied

    def result_text(self, end: End) -> str | None:
        """Return the text of the result that the task stores."""
        if end.child_id is not None:
            return json.dumps({"ok": self._child_plan(end)})
        return None if end.result is None else json.dumps(end.result)

    def _child_plan(self, end: End) -> dict[str, Any]:
        """Return the result of an expansion task."""
        assert end.child_id is not None
        assert end.child is not None
        found = self.connection.execute(
            "SELECT root_workflow_id::text, depth FROM horsies_workflows WHERE id = %s",
            (end.place[0],),
        ).fetchone()
        assert found is not None
        above = Above(end.place[0], end.place[1], found[0], found[1])
        return plan(end.child_id, end.child, above, name="child")
