"""Plans on full tables: neither ticks nor looks at schedules read the history of tasks and runs."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.statement import Statement
from horsies.db.statements.schedules import (
    SCHEDULES,
    list_newest_schedule_runs,
)
from tests.support.query_plans import nodes, reads

STATEMENTS = [pytest.param(statement, id=name) for name, statement in SCHEDULES.statements.items()]

# 40,000 finished tasks, half of them runs of one schedule, one of which is unfinished; as many runs of
# workflows in the same way; and 1,000 schedules.
FILL = """
ALTER TABLE horsies_tasks DISABLE TRIGGER USER;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, sent_at, schedule_name)
SELECT gen_random_uuid(), 'work', 'mail', CASE WHEN n = 40000 THEN 'RUNNING' ELSE 'COMPLETED' END, 'sha',
       now() - n * interval '1 minute', CASE WHEN n % 2 = 0 THEN 'schedule 1' END
FROM generate_series(1, 40000) AS n;
INSERT INTO horsies_workflows (
    id, name, status, on_error, definition_key, fingerprint, root_workflow_id, total_nodes, open_nodes,
    sent_at, schedule_name)
SELECT id, 'flow', CASE WHEN n = 40000 THEN 'RUNNING' ELSE 'COMPLETED' END, 'fail', 'key', 'print', id, 1, 0,
       now() - n * interval '1 minute', CASE WHEN n % 2 = 0 THEN 'schedule 2' END
FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 40000) AS n) AS made;
INSERT INTO horsies_schedule_state (schedule_name, next_run_at, config_hash, task_name, definition)
SELECT 'schedule ' || n, now() - interval '1 minute', 'hash', 'work', CASE WHEN n % 2 = 0 THEN '{}' END
FROM generate_series(1, 1000) AS n;
ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
"""


@pytest.mark.parametrize("statement", STATEMENTS)
def test_no_statement_of_a_scheduler_reads_all_tasks_or_all_runs(
    full_url: str, statement: Statement[Any, Any]
) -> None:
    with psycopg.connect(full_url, autocommit=True) as full:
        full.execute("SET plan_cache_mode = force_generic_plan")
        plan = plan_of(full, statement)
    scanned = [
        node["Relation Name"]
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan"
        and node["Relation Name"] in ("horsies_tasks", "horsies_workflows")
    ]
    assert scanned == [], json.dumps(plan, indent=1)


def plan_of(connection: Connection[Any], statement: Statement[Any, Any]) -> Any:
    connection.execute(b"PREPARE under_test AS " + statement.numbered())
    names = statement.parameters
    given = f" ({', '.join('NULL' for _ in names)})" if names else ""
    found = connection.execute(
        f"EXPLAIN (FORMAT JSON) EXECUTE under_test{given}".encode()
    ).fetchone()
    assert found is not None
    return found[0]


def test_the_look_for_unfinished_runs_uses_the_index_of_open_ones(full_url: str) -> None:
    used = used_indexes(full_url, "find_due_schedules")
    assert {"horsies_tasks_schedule_open", "horsies_workflows_schedule_open"} <= used


def test_the_newest_runs_are_found_by_their_own_index(full_url: str) -> None:
    assert used_indexes(full_url, "list_schedule_runs") == {
        "horsies_tasks_schedule_runs",
        "horsies_workflows_schedule_runs",
    }


def used_indexes(url: str, name: str) -> set[str]:
    with psycopg.connect(url, autocommit=True) as full:
        full.execute("SET plan_cache_mode = force_generic_plan")
        plan = plan_of(full, SCHEDULES.statements[name])
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


def test_the_newest_runs_of_a_page_of_schedules_cost_what_is_shown(full_url: str) -> None:
    names = [f"schedule {number}" for number in range(1, 51)]
    for mode in ("force_generic_plan", "force_custom_plan"):
        with psycopg.connect(full_url, autocommit=True, prepare_threshold=0) as full:
            full.execute("SELECT set_config('plan_cache_mode', %s, false)", (mode,))
            with full.transaction():
                params = list_newest_schedule_runs(names, 20)
                rows, cost = reads(full, params)
        assert len(rows) == 40
        assert cost < 300
