"""The reads and writes of progress, a handful of rows and no index in every plan; the deletion of nodes."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.ids import new_id
from horsies.worker.connection import TURN_SETTINGS
from tests.support.oracle.engine import Engine
from tests.support.oracle.plans import plan
from tests.support.oracle.shapes import NodeShape, RunShape, chain, fan
from tests.support.oracle.tree import End, Place

MAP = RunShape((NodeShape(), NodeShape(kind="map", after=(0,), over=0, max_parallel=4)))
NESTED = RunShape((NodeShape(kind="workflow", child=chain(2)), NodeShape(after=(0,))))

# Counted by this session and not yet handed to the server's statistics.
TOUCHED = """
SELECT relname, seq_scan, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0), n_tup_upd, n_tup_hot_upd
FROM pg_stat_xact_user_tables
WHERE relname IN ('horsies_tasks', 'horsies_workflows', 'horsies_workflow_tasks') ORDER BY relname
"""
END_BY_ID = """
UPDATE horsies_tasks AS task SET status = ended.status, result = ended.result
FROM unnest(%(ids)s::uuid[], %(statuses)s::text[], %(results)s::text[]) AS ended (id, status, result)
WHERE task.id = ANY(%(ids)s::uuid[]) AND task.id = ended.id
"""
Counts = dict[str, tuple[int, ...]]


def touched(engine: Engine, *ends: End) -> Counts:
    """End tasks; return sequential scans, rows read, updates, and updates that touched no index."""
    with engine.connection.transaction():
        engine.lock(end.place[0] for end in ends)
        ids = [task_id for task_id, _ in engine.tasks([end.place for end in ends])]
        values = {
            "ids": ids,
            "statuses": [end.state for end in ends],
            "results": [engine.result_text(end) for end in ends],
        }
        before = _counts(engine.connection)
        engine.connection.execute(END_BY_ID, values)
        after = _counts(engine.connection)
    return {
        table: tuple(now - then for now, then in zip(numbers, before[table], strict=True))
        for table, numbers in after.items()
    }


def _counts(connection: Connection[Any]) -> Counts:
    return {row[0]: row[1:] for row in connection.execute(TOUCHED).fetchall()}


def good(place: Place, value: Any = 1) -> End:
    return End(place, "COMPLETED", {"ok": value})


def bad(place: Place) -> End:
    error = {"error_code": "BOOM", "message": "", "data": None, "exception": None}
    return End(place, "FAILED", {"err": error})


def ends_of_every_sort(engine: Engine) -> dict[str, Counts]:
    plain, failing = engine.start(chain(3)), engine.start(chain(3))
    pausing = engine.start(chain(3, on_error="pause"))
    mapped, above, below = engine.start(MAP), new_id(), new_id()
    engine.start(NESTED, above)
    return {
        "a success": touched(engine, good((plain, 0, None))),
        "a failure": touched(engine, bad((failing, 0, None))),
        "a pause": touched(engine, bad((pausing, 0, None))),
        "a map": touched(engine, good((mapped, 0, None), list(range(20)))),
        "two items": touched(engine, good((mapped, 1, 0)), bad((mapped, 1, 1))),
        "a plan": touched(engine, End((above, 0, None), "COMPLETED", None, below, chain(2))),
        "a child's node": touched(engine, good((below, 0, None))),
        "a child's end": touched(engine, good((below, 1, None))),
        "a run's end": touched(engine, good((above, 1, None))),
    }


@pytest.mark.parametrize("known_to_be_empty", [True, False])
def test_an_end_reads_a_handful_of_rows_however_many_there_are_and_whenever_it_was_planned(
    migrated_url: str, known_to_be_empty: bool
) -> None:
    # A separate database: an open transaction of another session would keep dead rows alive.
    with (
        psycopg.connect(migrated_url, autocommit=True) as connection,
        psycopg.connect(migrated_url, autocommit=True, options=TURN_SETTINGS) as worker,
    ):
        if known_to_be_empty:
            connection.execute(
                "VACUUM (ANALYZE) horsies_tasks, horsies_workflows, horsies_workflow_tasks"
            )
        engine = Engine(worker)
        ends_of_every_sort(engine)
        Engine(connection).start_many([plan(new_id(), fan(8)) for _ in range(200)])
        read = ends_of_every_sort(engine)
    for counts in read.values():
        assert all(scans == 0 and rows <= 20 for scans, rows, _, _ in counts.values()), read


def test_a_pause_reads_a_handful_of_rows_however_many_families_there_are(
    process_url: str, connection: Connection[Any]
) -> None:
    helper = Engine(connection)
    for _ in range(60):
        above, below = new_id(), new_id()
        helper.start(NESTED, above)
        helper.finish([End((above, 0, None), "COMPLETED", None, below, chain(2))])
    connection.execute("VACUUM (ANALYZE) horsies_workflows")
    with psycopg.connect(process_url, autocommit=True, options=TURN_SETTINGS) as worker:
        engine = Engine(worker)
        pausing = engine.start(chain(3, on_error="pause"))
        read = touched(engine, bad((pausing, 0, None)))
    assert all(scans == 0 and rows <= 20 for scans, rows, _, _ in read.values()), read


def test_progress_writes_no_index(connection: Connection[Any]) -> None:
    engine = Engine(connection)
    run = engine.start(fan(40))
    counts = touched(engine, good((run, 0, None)))
    _, _, updates, hot = counts["horsies_workflow_tasks"]
    assert (updates, hot) == (41, 41), "forty begin where one ended, all of them in their pages"
    _, _, updates, hot = counts["horsies_workflows"]
    assert (updates, hot) == (1, 1)
    indexed = connection.execute(
        "SELECT array_agg(DISTINCT attname::text) FROM pg_index JOIN pg_attribute "
        "ON attrelid = indrelid AND attnum = ANY(indkey) "
        "WHERE indrelid = 'horsies_workflow_tasks'::regclass"
    ).fetchone()
    assert indexed == (["task_index", "workflow_id"],)


def nodes_by_run(connection: Connection[Any]) -> dict[str, int]:
    query = "SELECT workflow_id::text, count(*) FROM horsies_workflow_tasks GROUP BY workflow_id"
    return dict(connection.execute(query).fetchall())


def test_nodes_are_deleted_with_their_run_and_the_runs_below_it(
    connection: Connection[Any],
) -> None:
    engine = Engine(connection)
    above, below = new_id(), new_id()
    engine.start(NESTED, above)
    engine.finish([End((above, 0, None), "COMPLETED", None, below, chain(2))])
    other = engine.start(chain(3))
    assert nodes_by_run(connection) == {above: 2, below: 2, other: 3}
    connection.execute("DELETE FROM horsies_workflows WHERE id = %s", (above,))
    assert nodes_by_run(connection) == {other: 3}
    connection.execute("TRUNCATE horsies_workflows CASCADE")
    assert nodes_by_run(connection) == {}
