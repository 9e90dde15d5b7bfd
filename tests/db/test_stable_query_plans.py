"""The worker plans its statements once; the plan must not depend on how full the table was then."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement
from horsies.db.statements.turn import ClaimTasks, CompleteTasks, claim_tasks, complete_tasks
from horsies.worker.connection import TURN_SETTINGS
from tests.support.query_plans import nodes

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


def rows_read(connection: Connection[Any]) -> int:
    """How many rows and index entries of tasks have been read, by any way."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    row = connection.execute(
        "SELECT sum(seq_tup_read) + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes "
        "WHERE relname = 'horsies_tasks') FROM pg_stat_user_tables WHERE relname = 'horsies_tasks'"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("count", [2, 4, 40])
def test_a_plan_made_on_an_almost_empty_table_serves_a_full_one(
    connection: Connection[Any], pipeline: Pipeline, count: int
) -> None:
    connection.execute(FILL, (count,))
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    turn(pipeline)
    connection.execute(FILL, (20_000,))
    pipeline.connection.execute("SELECT pg_stat_force_next_flush()")
    before = rows_read(connection)
    turn(pipeline)
    pipeline.connection.execute("SELECT pg_stat_force_next_flush()")
    assert rows_read(connection) - before < 200


def explained(connection: Connection[Any], statement: Statement[Any, Any], params: Any) -> Any:
    """The plan of a statement of the worker as it ran."""
    explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement.query()
    (found,) = connection.execute(explain, statement.mapping(params)).fetchall()
    return found[0]


def explained_claim(connection: Connection[Any], children: int) -> Any:
    """The plan of the statement that claims, from a copy of the function that explains it."""
    file = files("horsies.db.functions").joinpath("20_claim.sql").read_text("utf-8")
    body = file[file.index("CREATE OR REPLACE FUNCTION horsies_claim_v3") :].split("\n$$;")[0]
    claim = re.compile(r"RETURN QUERY\n(.+?;)\n.+?ROW_COUNT;", re.DOTALL)
    body, count = claim.subn(r"RETURN QUERY EXPLAIN (ANALYZE, FORMAT JSON)\n\1\nRETURN;", body)
    assert count == 1
    body = re.sub(r"RETURNS TABLE \(.+?\)", "RETURNS SETOF json", body, count=1, flags=re.DOTALL)
    connection.execute(body.replace("horsies_claim_v3", "pg_temp.claim", 1).encode() + b"$$")
    (found,) = connection.execute(
        "SELECT * FROM pg_temp.claim('worker-1', 'host', %s, 0, 60000, '{default}', %s, '{}', NULL, "
        "true, '{}')",
        (list(range(children)), [children]),
    ).fetchall()
    return found[0]


def test_a_turn_compares_no_task_with_the_ids_of_all_others(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    connection.execute(FILL, (200,))
    tuned = pipeline.connection
    plans = [explained_claim(tuned, 64)]
    mine = connection.execute(
        "SELECT id::text, generation FROM horsies_tasks WHERE status = 'RUNNING'"
    ).fetchall()
    assert len(mine) == 64
    ids, generations = (list(column) for column in zip(*mine, strict=True))
    done = CompleteTasks("worker-1", ids, generations, ['{"ok":1}'] * 64)
    plans.append(explained(tuned, complete_tasks, done))
    for plan in plans:
        removed = [node.get("Rows Removed by Join Filter", 0) for node in nodes(plan)]
        assert sum(removed) == 0, json.dumps(plan, indent=1)
        assert any(node.get("Actual Rows") == 64 for node in nodes(plan))
