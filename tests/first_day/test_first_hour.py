"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

import pytest

from horsies.app import Horsies
from horsies.db.statements.turn import ClaimTasks, claim_tasks
from horsies.task_result import TaskError, TaskResult
from tests.support.database import Database
from tests.support.rows import row_of

# Sending


@pytest.mark.parametrize("way", ["send_many", "sends of one moment"])
def test_tasks_run_in_the_order_of_their_sends(
    app: Horsies, connection: Database, way: str
) -> None:
    @app.task("step")
    def step(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    if way == "send_many":
        step.send_many(step.bind(number) for number in range(20)).unwrap()
    else:
        for number in range(20):
            step.send(number).unwrap()
        connection.execute("UPDATE horsies_tasks SET enqueued_at = now()")
    claimed = [
        claim_tasks.run(connection, ClaimTasks("worker", "host", [1], ["default"], [1]))[0].id
        for _ in range(20)
    ]
    assert [row_of(connection, task_id)["args"] for task_id in claimed] == [
        f"[{number}]" for number in range(20)
    ]
