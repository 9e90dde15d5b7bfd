"""Plans on a full table: no hot statement reads it from end to end, and work for tomorrow costs nothing
today.

The plans are the generic ones, chosen without looking at any parameter, because those are what a
long-lived connection ends up with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.statement import Statement
from horsies.db.statements.tasks import TASKS, find_unique_task
from horsies.db.statements.transactions import TRANSACTIONS
from horsies.db.statements.turn import (
    TURN,
    ClaimTasks,
    ExpireTasks,
    LookAhead,
    claim_tasks,
    expire_tasks,
    seconds_until_due,
)
from horsies.db.statements.workers import (
    WORKERS,
    delete_kept_tasks,
    delete_old_untimed_tasks,
)
from tests.support.query_plans import nodes, roll_back, task_reads

HOT = [
    pytest.param(statement, id=name)
    for catalogue in (TASKS, TRANSACTIONS, TURN, WORKERS)
    for name, statement in catalogue.statements.items()
]
BIG_TABLES = ("horsies_tasks", "horsies_task_attempts")
QUEUES = ["mail", "reports", "images"]

# 107,700 tasks: most are history, 40,000 are due tomorrow, 3,000 now; the queue "tomorrow" has nothing
# but future work.
FILL = """
ALTER TABLE horsies_tasks DISABLE TRIGGER USER;
INSERT INTO horsies_tasks (id, task_name, queue_name, priority, status, enqueue_sha, enqueued_at,
                           completed_at, result, error_code, idempotency_key)
SELECT gen_random_uuid(), 'work', 'mail', 100, CASE WHEN n % 20 = 0 THEN 'FAILED' ELSE 'COMPLETED' END,
       'sha', now() - n * interval '1 second', now(), '{"ok":1}',
       CASE WHEN n % 20 = 0 THEN 'BROKE' END, CASE WHEN n % 50 = 0 THEN n::text END
FROM generate_series(1, 60000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, priority, enqueue_sha, enqueued_at)
SELECT gen_random_uuid(), 'work', (ARRAY['mail', 'reports', 'images', 'tomorrow'])[1 + n % 4],
       (ARRAY[1, 50, 100])[1 + n % 3], 'sha', now() + interval '1 day' + n * interval '1 second'
FROM generate_series(1, 40000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, priority, enqueue_sha, enqueued_at)
SELECT gen_random_uuid(), 'work', (ARRAY['mail', 'reports', 'images'])[1 + n % 3],
       (ARRAY[1, 50, 100])[1 + n % 3], 'sha', now() - n * interval '1 second'
FROM generate_series(1, 3000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, held)
SELECT gen_random_uuid(), 'work', 'mail', 'sha', true FROM generate_series(1, 2000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, enqueued_at, good_until)
SELECT gen_random_uuid(), 'work', 'mail', 'sha', now() + interval '1 day',
       now() + interval '2 days' - CASE WHEN n <= 100 THEN interval '3 days' ELSE interval '0' END
FROM generate_series(1, 2000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, claimed_by_worker_id, generation,
                           started_at, worker_pid)
SELECT gen_random_uuid(), 'work', 'mail', 'RUNNING', 'sha', 'worker-' || n % 50, 1, now(), n
FROM generate_series(1, 700) AS n;
INSERT INTO horsies_task_attempts (task_id, attempt, outcome, finished_at)
SELECT id, 1, 'COMPLETED', now() FROM horsies_tasks WHERE status = 'COMPLETED';
ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
"""


@pytest.fixture
def full(full_url: str) -> Iterator[Connection[Any]]:
    """A transaction on the full database with generic plans, rolled back in the end."""
    with psycopg.connect(full_url) as connection:
        connection.execute("SET plan_cache_mode = force_generic_plan")
        yield connection
        roll_back(connection)


def generic_plan(connection: Connection[Any], statement: Statement[Any, Any]) -> Any:
    connection.execute(b"PREPARE under_test AS " + statement.numbered())
    nothing = ", ".join("NULL" for _ in statement.parameters)
    given = f" ({nothing})" if nothing else ""
    found = connection.execute(
        f"EXPLAIN (FORMAT JSON) EXECUTE under_test{given}".encode()
    ).fetchone()
    assert found is not None
    return found[0]


def test_the_table_is_as_full_as_these_tests_need(full: Connection[Any]) -> None:
    found = full.execute(
        "SELECT count(*), count(*) FILTER (WHERE status = 'PENDING' AND enqueued_at > now()) "
        "FROM horsies_tasks"
    ).fetchone()
    assert found is not None
    assert found[0] > 100_000
    assert found[1] > 40_000


@pytest.mark.parametrize("statement", HOT)
def test_no_hot_statement_reads_a_big_table_from_end_to_end(
    full: Connection[Any], statement: Statement[Any, Any]
) -> None:
    plan = generic_plan(full, statement)
    scanned = [
        node["Relation Name"]
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] in BIG_TABLES
    ]
    assert scanned == [], json.dumps(plan, indent=1)


def claim_for(children: int, queues: list[str]) -> ClaimTasks:
    pids = list(range(1, children + 1))
    return ClaimTasks("worker-x", "host", pids, queues, [children] * len(queues))


@pytest.mark.parametrize("plan_cache_mode", ["force_generic_plan", "auto", "force_custom_plan"])
def test_a_claim_reads_hardly_more_than_it_takes(
    full: Connection[Any], plan_cache_mode: str
) -> None:
    full.execute("SELECT set_config('plan_cache_mode', %s, false)", (plan_cache_mode,))
    for _ in range(7):  # the sixth is where "auto" may change its mind
        rows, scans, fetched, entries = task_reads(full, (claim_tasks, claim_for(8, QUEUES)))
        assert len(rows) == 8
        assert scans == 0
        assert fetched < 150
        assert entries < 150


def test_a_claim_from_a_queue_of_future_work_does_not_read_it(full: Connection[Any]) -> None:
    rows, scans, fetched, entries = task_reads(full, (claim_tasks, claim_for(8, ["tomorrow"])))
    assert rows == []
    assert scans == 0
    assert fetched + entries < 20


def test_a_claim_of_everything_due_does_not_read_the_future_work_behind_it(
    full: Connection[Any],
) -> None:
    rows, scans, fetched, entries = task_reads(full, (claim_tasks, claim_for(5000, QUEUES)))
    assert len(rows) == 3000
    assert scans == 0
    assert fetched < 3 * 3000 + 100
    assert entries < 3 * 3000 + 100


def test_a_claim_touches_few_pages(full: Connection[Any]) -> None:
    claim_tasks.run(full, claim_for(8, QUEUES))  # so that the server has planned it before
    found = full.execute(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM horsies_claim_v1("
        "'w', 'h', ARRAY[1,2,3,4,5,6,7,8], 0, 60000, "
        "ARRAY['tomorrow', 'mail', 'reports', 'images'], ARRAY[8,8,8,8], '{}', NULL, true, '{}')"
    ).fetchone()
    assert found is not None
    plan = found[0][0]["Plan"]
    assert plan["Actual Rows"] == 8
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 400


@pytest.mark.parametrize("last_look", [None, datetime.now(UTC)], ids=["first", "later"])
def test_planning_the_next_sleep_probes_the_index_and_nothing_else(
    full: Connection[Any], last_look: datetime | None
) -> None:
    wanted = LookAhead([*QUEUES, "tomorrow", "empty"], last_look)
    rows, scans, fetched, entries = task_reads(full, (seconds_until_due, wanted))
    assert rows[0].seconds == 0, "some deadlines have passed"
    assert scans == 0
    assert fetched + entries < 150


def test_expiry_reads_only_what_is_late(full: Connection[Any]) -> None:
    rows, scans, fetched, entries = task_reads(full, (expire_tasks, ExpireTasks("{}", 1000)))
    assert len(rows) == 100
    assert scans == 0
    assert fetched + entries < 700


def test_retention_does_not_read_young_tasks_whose_ids_have_no_time(full: Connection[Any]) -> None:
    rows, scans, fetched, entries = task_reads(full, delete_old_untimed_tasks(24, 1000))
    assert rows == []
    assert scans == 0
    assert fetched + entries < 10


def test_retention_of_their_own_finds_tasks_by_their_index(full: Connection[Any]) -> None:
    full.execute(
        "UPDATE horsies_tasks SET retention = interval '1 hour', "
        "completed_at = now() - interval '2 hours' WHERE id IN (SELECT id FROM horsies_tasks "
        "WHERE status = 'COMPLETED' LIMIT 50)"
    )
    rows, scans, fetched, entries = task_reads(full, delete_kept_tasks(20))
    assert len(rows) == 20
    assert scans == 0
    assert fetched + entries < 200


def test_a_key_that_is_unique_for_a_time_is_found_by_its_index(full: Connection[Any]) -> None:
    full.execute("UPDATE horsies_tasks SET unique_key = id::text WHERE queue_name = 'tomorrow'")
    full.execute("UPDATE horsies_tasks SET unique_while = 'open' WHERE queue_name = 'tomorrow'")
    found = full.execute(
        "SELECT unique_key FROM horsies_tasks WHERE unique_key > '' LIMIT 1"
    ).fetchone()
    assert found is not None
    key = find_unique_task("work", found[0])
    rows, scans, fetched, entries = task_reads(full, key)
    assert (len(rows), scans) == (1, 0)
    assert fetched + entries < 10
