"""Query plans: their nodes, and the number of rows that a statement reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.statement import Step

COUNTERS = """
SELECT sum(pg_stat_get_xact_tuples_fetched(oid)) +
       sum(CASE WHEN relkind = 'r' THEN pg_stat_get_xact_tuples_returned(oid) END) +
       sum(CASE WHEN relkind = 'i' THEN pg_stat_get_xact_tuples_returned(oid) END)
FROM pg_class WHERE relname LIKE 'horsies%'
"""


def nodes(plan: Any) -> Iterator[dict[str, Any]]:
    if isinstance(plan, dict):
        if "Node Type" in plan:
            yield plan
        plan = list(plan.values())
    if isinstance(plan, list):
        for part in plan:
            yield from nodes(part)


def reads(connection: Connection[Any], step: Step) -> tuple[Sequence[Any], int]:
    """Run the statement; return its rows, and the number of rows and index entries that it read."""
    statement, params = step
    before = connection.execute(COUNTERS).fetchone()
    rows = statement.run(connection, params)
    after = connection.execute(COUNTERS).fetchone()
    assert before is not None
    assert after is not None
    return rows, int(after[0] - before[0])


def roll_back(connection: Connection[Any]) -> None:
    """End a test's transaction; vacuum if it wrote rows, whose index entries the next test would read."""
    written = connection.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL").fetchone()
    connection.rollback()
    if written == (True,):
        connection.autocommit = True
        connection.execute("VACUUM")


@pytest.fixture(params=["force_generic_plan", "force_custom_plan"])
def full(full_url: str, request: pytest.FixtureRequest) -> Iterator[Connection[Any]]:
    """Open a transaction on the full database that is rolled back at the end."""
    with psycopg.connect(full_url, prepare_threshold=0) as connection:
        connection.execute("SELECT set_config('plan_cache_mode', %s, false)", (request.param,))
        yield connection
        roll_back(connection)


TASK_COUNTERS = """
SELECT pg_stat_get_xact_numscans('horsies_tasks'::regclass),
       pg_stat_get_xact_tuples_fetched('horsies_tasks'::regclass),
       (SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index
        WHERE indrelid = 'horsies_tasks'::regclass)
"""


def task_reads(connection: Connection[Any], step: Step) -> Any:
    """Run the statement; return its rows and its cost: table scans, rows fetched through an index, index
    entries read.
    """
    statement, params = step
    before = connection.execute(TASK_COUNTERS).fetchone()
    rows = statement.run(connection, params)
    after = connection.execute(TASK_COUNTERS).fetchone()
    assert before is not None
    assert after is not None
    return rows, *(int(new - old) for old, new in zip(before, after, strict=True))


def rows_read(*connections: Connection[Any]) -> int:
    """Count the rows and index entries of tasks that have been read, including by these sessions."""
    for one in connections:
        one.execute("SELECT pg_stat_force_next_flush()")
    row = (
        connections[-1]
        .execute(
            "SELECT sum(seq_tup_read) + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes "
            "WHERE relname = 'horsies_tasks') FROM pg_stat_user_tables WHERE relname = 'horsies_tasks'"
        )
        .fetchone()
    )
    assert row is not None
    return int(row[0])
