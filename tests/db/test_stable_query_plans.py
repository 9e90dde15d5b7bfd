"""The worker plans its statements once; the plan must not depend on how full the table was then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimTasks, CompleteTasks, claim_tasks, complete_tasks
from horsies.worker.connection import TURN_SETTINGS
from tests.support.query_plans import rows_read

FILL = """
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha)
SELECT gen_random_uuid(), 'work', 'default', 'sha' FROM generate_series(1, %s)
"""


@pytest.fixture
def pipeline(process_url: str, connection: Connection[Any]) -> Iterator[Pipeline]:
    with psycopg.connect(process_url, autocommit=True, options=TURN_SETTINGS) as tuned:
        yield Pipeline(tuned)


def turn(pipeline: Pipeline) -> None:
    wanted = ClaimTasks("worker-1", "host", [1, 2], ["default"], [2])
    (claimed,) = pipeline.run([(claim_tasks, wanted)])
    ids, generations = [task.id for task in claimed], [task.generation for task in claimed]
    done = CompleteTasks("worker-1", ids, generations, ['{"ok":1}'] * len(ids))
    assert len(pipeline.run([(complete_tasks, done)])[0]) == 2


@pytest.mark.parametrize("count", [2, 4, 40])
def test_a_plan_made_on_an_almost_empty_table_serves_a_full_one(
    connection: Connection[Any], pipeline: Pipeline, count: int
) -> None:
    connection.execute(FILL, (count,))
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    turn(pipeline)
    connection.execute(FILL, (20_000,))
    before = rows_read(pipeline.connection, connection)
    turn(pipeline)
    assert rows_read(pipeline.connection, connection) - before < 200
