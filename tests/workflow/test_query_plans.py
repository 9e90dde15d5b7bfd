"""Plans on a database full of ended runs: the cost of a query depends on its result, not on the
history.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from psycopg import Connection

from horsies.db.statement import Step
from horsies.db.statements.workflows import (
    ListRuns,
    count_nodes_by_status,
    end_of_run_window,
    find_broken_runs,
    find_paused_runs,
    find_run_problems,
    list_map_items,
    list_newest_runs,
    list_open_runs,
    list_retried_attempts,
    read_items,
    read_node,
    read_nodes,
    read_result_nodes,
    read_results,
    read_run_position,
    read_run_status,
    read_runs,
    read_tree,
    read_tree_nodes,
)
from tests.support.query_plans import full as full
from tests.support.query_plans import reads

FIRST, LAST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
LAST_ID = f"{uuid.UUID(int=2**128 - 1)}"

# 40,000 ended runs under random ids, 200 running, 20 paused; every third is the child of the one before
# it. Three nodes each, and a task for every node.
FILL = """
ALTER TABLE horsies_workflows DISABLE TRIGGER USER;
ALTER TABLE horsies_tasks DISABLE TRIGGER USER;
CREATE FUNCTION numbered(number integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS
    $$ SELECT md5('run ' || number)::uuid $$;
CREATE FUNCTION tasked(number integer, node integer) RETURNS uuid LANGUAGE sql IMMUTABLE AS
    $$ SELECT md5('task ' || number || ' ' || node)::uuid $$;
INSERT INTO horsies_workflows (id, name, status, on_error, definition_key, fingerprint,
    root_workflow_id, parent_workflow_id, parent_task_index, depth, total_nodes, open_nodes,
    created_at, completed_at, paused_at)
SELECT numbered(n), 'work',
    CASE WHEN n > 40200 THEN 'PAUSED' WHEN n > 40000 THEN 'RUNNING' WHEN n % 20 = 0 THEN 'FAILED'
         ELSE 'COMPLETED' END,
    'fail', 'work', 'same', numbered(CASE WHEN n % 3 = 0 THEN n - 1 ELSE n END),
    CASE WHEN n % 3 = 0 THEN numbered(n - 1) END, CASE WHEN n % 3 = 0 THEN 0 END,
    (n % 3 = 0)::integer, 3, CASE WHEN n > 40000 THEN 3 ELSE 0 END,
    now() - (50000 - n) * interval '1 second', CASE WHEN n <= 40000 THEN now() END,
    CASE WHEN n > 40200 THEN now() - interval '1 day' END
FROM generate_series(1, 40220) AS n;
INSERT INTO horsies_workflow_tasks (workflow_id, task_index, node_id, kind, status, propagated,
    task_id, result_task_id, dependencies, dependents, context_dependents, join_type,
    allow_failed_deps, pauses, deps_open, task_name, task_kwargs, queue_name, priority,
    task_options, max_retries)
SELECT numbered(n), i, 'node-' || i, 'task', CASE WHEN n > 40000 THEN 'ENQUEUED' ELSE 'COMPLETED' END,
    n <= 40000, tasked(n, i), tasked(n, i), '{}', '{}', '{}', 'all',
    false, false, 0, 'work', '{}', 'default', 100, '{}', 0
FROM generate_series(1, 40220) AS n, generate_series(0, 2) AS i;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, result, held,
    workflow_id, workflow_node_index)
SELECT tasked(n, i), 'work', 'default', CASE WHEN n > 40000 THEN 'PENDING' ELSE 'COMPLETED' END, '',
    '{"ok":1}', n > 40200, numbered(n), i
FROM generate_series(1, 40220) AS n, generate_series(0, 2) AS i;
ALTER TABLE horsies_workflows ENABLE TRIGGER USER;
ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
"""


def numbered(connection: Connection[Any], number: int) -> str:
    found = connection.execute("SELECT numbered(%s)::text", (number,)).fetchone()
    assert found is not None
    return str(found[0])


def asked(**filters: Any) -> ListRuns:
    return ListRuns(**{**everything(), **filters})


def bounded(window: int, **filters: Any) -> Step:
    return list_newest_runs(**{**everything(), **filters}, window=window)


def everything() -> dict[str, Any]:
    return {
        "before_at": LAST,
        "before_id": LAST_ID,
        "since": FIRST,
        "statuses": [],
        "names": [],
        "workflow_keys": [],
        "include_children": True,
        "limit": 20,
    }


def test_the_newest_runs_cost_what_is_shown(full: Connection[Any]) -> None:
    rows, cost = reads(full, bounded(50_000))
    assert len(rows) == 20
    assert cost < 100
    rows, cost = reads(full, bounded(50_000, include_children=False))
    assert len(rows) == 20
    assert cost < 200


def test_a_filter_of_runs_that_matches_often_ends_early(full: Connection[Any]) -> None:
    rows, cost = reads(full, bounded(50_000, statuses=["FAILED"]))
    assert len(rows) == 20
    assert cost < 5_000


def test_a_filter_of_runs_that_matches_nothing_costs_the_window_and_no_more(
    full: Connection[Any],
) -> None:
    rows, cost = reads(full, bounded(1_000, names=["nothing"]))
    assert rows == []
    assert cost < 2_100
    edge, cost = reads(full, end_of_run_window(LAST, LAST_ID, FIRST, 1_000))
    assert len(edge) == 2
    assert cost < 2_100


def test_runs_that_have_not_ended_are_found_without_history(full: Connection[Any]) -> None:
    rows, cost = reads(full, (list_open_runs, asked(statuses=["RUNNING", "PAUSED"])))
    assert [row.status for row in rows] == ["PAUSED"] * 20
    # A scan with an array of statuses keeps the order of its index since PostgreSQL 17 only; older servers
    # read and sort all open runs, and still nothing of the history.
    assert cost < (200 if full.info.server_version >= 170_000 else 1_000)
    rows, cost = reads(full, (list_open_runs, asked(statuses=["RUNNING"], names=["nothing"])))
    assert rows == []
    assert cost < 1_000


@pytest.mark.parametrize(
    "step_of",
    [
        pytest.param(read_run_status, id="status"),
        pytest.param(read_run_position, id="position"),
        pytest.param(lambda run_id: read_runs([run_id], 1_000), id="outcome"),
        pytest.param(read_result_nodes, id="result nodes"),
        pytest.param(lambda run_id: read_results([run_id] * 3, [0, 1, 2], 1_000), id="results"),
        pytest.param(read_nodes, id="nodes"),
        pytest.param(lambda run_id: read_items(run_id, 1_000), id="items"),
        pytest.param(lambda run_id: read_node(run_id, "node-1", 1_000), id="node"),
        pytest.param(lambda run_id: read_tree(run_id, 100), id="tree"),
        pytest.param(lambda run_id: read_tree_nodes([run_id]), id="tree nodes"),
        pytest.param(count_nodes_by_status, id="node counts"),
        pytest.param(lambda run_id: list_retried_attempts([run_id], 100), id="retries"),
        pytest.param(lambda run_id: list_map_items(run_id, 1, False, -1, 100), id="map items"),
        pytest.param(lambda run_id: find_run_problems(run_id, 20), id="problems"),
    ],
)
def test_one_run_costs_its_own_rows(full: Connection[Any], step_of: Callable[[str], Step]) -> None:
    _, cost = reads(full, step_of(numbered(full, 20_000)))
    assert cost < 60


def test_runs_paused_for_too_long_are_found_among_the_paused(full: Connection[Any]) -> None:
    rows, cost = reads(full, find_paused_runs(3600, 50))
    assert len(rows) == 20
    assert cost < 200


def test_an_audit_reads_the_open_runs_only(full: Connection[Any]) -> None:
    rows, cost = reads(full, find_broken_runs(1_000))
    assert rows == []
    assert cost < 40_000
